//! How fast the CPU's kernels go through weights: GB/s of one token, GFLOP/s of many.
//!
//! Bytes that must move: every weight once. The ceiling is the rate at which all threads together read memory, which
//! the first line measures by summing the same bytes.
//!
//! `cargo run --release -p np-kernels --example bandwidth [THREADS]`

use np_formats::{Dtype, RecordLayout};
use np_kernels::{Backend, Cpu, Output, Result, Rows};
use std::hint::black_box;
use std::time::Instant;

/// Rounds of each measurement; the median is shown with the range.
const ROUNDS: usize = 7;

fn main() -> Result<()> {
    let threads = std::env::args().nth(1).and_then(|argument| argument.parse().ok()).unwrap_or(2);
    let mut cpu = Cpu::new(threads)?;
    println!("{threads} threads");
    for dtype in [Dtype::F16, Dtype::Bf16] {
        one_token(&mut cpu, threads, dtype)?;
    }
    many_tokens(&mut cpu, 512, 576, 1536)?;
    many_tokens(&mut cpu, 512, 4096, 2048)
}

fn one_token(cpu: &mut Cpu, threads: usize, dtype: Dtype) -> Result<()> {
    let (hidden, neurons) = (4096, 5500);
    let rows = filled_rows(hidden, neurons, dtype)?;
    let active: Vec<u32> = (0..neurons as u32).collect();
    let in_order: Vec<i32> = (0..neurons as i32).collect();
    // A step that is coprime to the number of neurons: no two neighbours are neighbours in memory.
    let scattered: Vec<i32> = (0..neurons).map(|neuron| (neuron * 2003 % neurons) as i32).collect();
    let (mut x, mut y) = (cpu.buffer(hidden)?, cpu.buffer(hidden)?);
    x.fill(0.01);
    let gigabytes = (rows.layout().payload_bytes() * neurons) as f64 / 1e9;
    measure("sum of the same bytes", "GB/s", gigabytes, || sum_bytes(&rows, threads));
    for (name, slots) in [("row_mlp, slots in order", &in_order), ("row_mlp, slots scattered", &scattered)] {
        let name = format!("{} {name}", dtype.name());
        measure(&name, "GB/s", gigabytes, || cpu.row_mlp(&rows, &active, slots, &x, &mut y).unwrap());
    }
    let matrix = cpu.matrix(3 * neurons, hidden, dtype, &mut |bytes| {
        bytes.chunks_exact_mut(2).for_each(|value| value.copy_from_slice(&[0, 0x20]));
        Ok(())
    })?;
    let mut out = cpu.buffer(3 * neurons)?;
    let name = format!("{} linear, one token", dtype.name());
    measure(&name, "GB/s", gigabytes, || cpu.linear(&matrix, None, &x, 1, &mut out, Output::Write).unwrap());
    Ok(())
}

fn many_tokens(cpu: &mut Cpu, tokens: usize, hidden: usize, neurons: usize) -> Result<()> {
    let rows = filled_rows(hidden, neurons, Dtype::F16)?;
    let slots: Vec<i32> = (0..neurons as i32).collect();
    let (mut x, mut y) = (cpu.buffer(tokens * hidden)?, cpu.buffer(tokens * hidden)?);
    x.fill(0.01);
    let gigaflops = 6.0 * (tokens * hidden * neurons) as f64 / 1e9;
    measure(&format!("F16 block_mlp, {tokens} tokens, H {hidden}, M {neurons}"), "GFLOP/s", gigaflops, || {
        cpu.block_mlp(&rows, 0..neurons as u32, &slots, &x, tokens, &mut y, None).unwrap();
    });
    let matrix = cpu.matrix(hidden, hidden, Dtype::F16, &mut |bytes| {
        bytes.fill(0x20);
        Ok(())
    })?;
    let gigaflops = 2.0 * (tokens * hidden * hidden) as f64 / 1e9;
    measure(&format!("F16 linear, {tokens} tokens, {hidden} x {hidden}"), "GFLOP/s", gigaflops, || {
        cpu.linear(&matrix, None, &x, tokens, &mut y, Output::Write).unwrap();
    });
    Ok(())
}

fn filled_rows(hidden: usize, neurons: usize, dtype: Dtype) -> Result<Rows> {
    let mut rows = Rows::new(RecordLayout::new(hidden, dtype), neurons)?;
    rows.bytes_mut().chunks_exact_mut(2).for_each(|value| value.copy_from_slice(&[0, 0x20]));
    Ok(rows)
}

/// Reads every payload byte with all threads.
fn sum_bytes(rows: &Rows, threads: usize) {
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let payload = rows.layout().payload_bytes();
                for slot in (thread..rows.slots()).step_by(threads) {
                    let words = rows.record(slot)[..payload].chunks_exact(64);
                    black_box(words.fold([0_u64; 8], |sums, line| {
                        std::array::from_fn(|word| {
                            let bytes = line[8 * word..][..8].try_into().expect("eight bytes");
                            sums[word] ^ u64::from_le_bytes(bytes)
                        })
                    }));
                }
            });
        }
    });
}

fn measure(name: &str, unit: &str, amount: f64, mut work: impl FnMut()) {
    work();
    let mut rates: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            work();
            amount / start.elapsed().as_secs_f64()
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    println!("{name:<52} {:7.1} {unit} ({:.1} to {:.1})", rates[ROUNDS / 2], rates[0], rates[ROUNDS - 1]);
}
