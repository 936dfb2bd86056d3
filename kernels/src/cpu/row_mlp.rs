//! One token through the active neurons' rows.

use super::convert::{add_scaled, dots};
use super::pool::Parts;
use super::simd::{Element, Kernel, Lanes};
use super::{Cpu, grown};
use crate::{NEURON_BLOCK, Rows};
use np_formats::RECORD_ROWS;
use std::ops::Range;

/// Records walked side by side: the memory then delivers several streams at once. It changes no bit.
const TOGETHER: usize = 4;
/// Values of y in a task of the final sum.
const STRIP: usize = 512;

/// y += sum over active n, ascending, of silu(gate·x) (up·x) down, in blocks as [`NEURON_BLOCK`] says.
pub(super) fn row_mlp(cpu: &mut Cpu, rows: &Rows, active: &[u32], slot_map: &[i32], x: &[f32], y: &mut [f32]) {
    let hidden = x.len();
    let path = cpu.path;
    let dtype = rows.layout().dtype();
    let blocks = &mut cpu.scratch.active;
    let blocks_max = slot_map.len().div_ceil(NEURON_BLOCK);
    blocks.clear();
    blocks.reserve(blocks_max);
    cut_into_blocks(active, blocks);
    let blocks = &cpu.scratch.active[..];
    let sums = grown(&mut cpu.scratch.blocks, blocks_max * hidden);
    let parts = Parts::new(sums);
    cpu.pool.run(blocks.len(), &|task, _| {
        // SAFETY: tasks have ranges of their own.
        let sum = unsafe { parts.part(task * hidden..(task + 1) * hidden) };
        path.run(dtype, SumBlock { rows, active: &active[blocks[task].clone()], slot_map, x, sum });
    });
    let sums = &cpu.scratch.blocks[..];
    let parts = Parts::new(y);
    cpu.pool.run(hidden.div_ceil(STRIP), &|task, _| {
        let strip = task * STRIP..hidden.min((task + 1) * STRIP);
        // SAFETY: tasks have ranges of their own.
        let y = unsafe { parts.part(strip.clone()) };
        for block in 0..blocks.len() {
            let sum = &sums[block * hidden..][strip.clone()];
            y.iter_mut().zip(sum).for_each(|(y, sum)| *y += sum);
        }
    });
}

/// Appends, for each block that has active neurons, their range in `active`.
fn cut_into_blocks(active: &[u32], blocks: &mut Vec<Range<usize>>) {
    let mut start = 0;
    for (index, pair) in active.windows(2).enumerate() {
        assert!(pair[0] < pair[1], "active ids must ascend: {} then {}", pair[0], pair[1]);
        if pair[0] as usize / NEURON_BLOCK != pair[1] as usize / NEURON_BLOCK {
            blocks.push(start..index + 1);
            start = index + 1;
        }
    }
    if start < active.len() {
        blocks.push(start..active.len());
    }
}

/// The contributions of one block's active neurons, each record walked once.
struct SumBlock<'a> {
    rows: &'a Rows,
    active: &'a [u32],
    slot_map: &'a [i32],
    x: &'a [f32],
    sum: &'a mut [f32],
}

impl Kernel for SumBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes, E: Element>(mut self, lanes: L) {
        self.sum.fill(0.0);
        let (fours, rest) = self.active.as_chunks::<TOGETHER>();
        for &neurons in fours {
            self.add::<L, E, TOGETHER>(lanes, neurons);
        }
        for &neuron in rest {
            self.add::<L, E, 1>(lanes, [neuron]);
        }
    }
}

impl SumBlock<'_> {
    #[inline(always)]
    fn add<L: Lanes, E: Element, const R: usize>(&mut self, lanes: L, neurons: [u32; R]) {
        let records = neurons.map(|neuron| self.rows.weights(slot_of(self.slot_map, neuron)));
        let gates = dots::<L, E, R>(lanes, records.map(|[gate, _, _]| gate), self.x);
        let ups = dots::<L, E, R>(lanes, records.map(|[_, up, _]| up), self.x);
        let factors = std::array::from_fn(|index| silu(gates[index]) * ups[index]);
        add_scaled::<L, E, R>(lanes, factors, records.map(|[_, _, down]| down), self.sum);
    }
}

impl Rows {
    /// The gate, up and down^T rows of the record in `slot`.
    #[inline(always)]
    pub(super) fn weights(&self, slot: usize) -> [&[u8]; RECORD_ROWS] {
        let row_bytes = self.layout().row_bytes();
        let record = self.record(slot);
        std::array::from_fn(|row| &record[row * row_bytes..][..row_bytes])
    }
}

fn slot_of(slot_map: &[i32], neuron: u32) -> usize {
    let slot = slot_map[neuron as usize];
    usize::try_from(slot).unwrap_or_else(|_| panic!("active neuron {neuron} has no slot"))
}

/// x times its logistic function.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(active: &[u32], expected: &[Range<usize>]) {
        let mut blocks = Vec::new();
        cut_into_blocks(active, &mut blocks);
        assert_eq!(blocks, expected);
    }

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "one range is what is expected")]
    fn blocks_are_cut_by_id() {
        check(&[], &[]);
        check(&[63], &[0..1]);
        check(&[0, 63, 64, 65, 200], &[0..2, 2..4, 4..5]);
        check(&[64, 127], &[0..2]);
    }

    #[test]
    #[should_panic(expected = "ascend: 5 then 5")]
    fn ids_out_of_order_are_a_bug() {
        check(&[5, 5], &[]);
    }
}
