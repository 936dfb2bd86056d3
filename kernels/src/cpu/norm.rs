//! Root-mean-square normalisation.

use super::Cpu;
use super::convert::{bytes_of, dots};
use super::pool::Parts;
use super::simd::{Element, F32, Kernel, Lanes};
use np_formats::Dtype;

/// Rows in a task.
const TASK_ROWS: usize = 16;

/// Each row of x (rows, width of `weight`) over its root mean square, times `weight`.
pub(super) fn rms_norm(cpu: &mut Cpu, weight: &[f32], eps: f32, x: &mut [f32]) {
    let width = weight.len();
    let count = x.len();
    let path = cpu.path;
    let parts = Parts::new(x);
    let task_values = TASK_ROWS * width;
    cpu.pool.run(count.div_ceil(task_values), &|task, _| {
        // SAFETY: tasks have ranges of their own.
        let rows = unsafe { parts.part(task * task_values..count.min((task + 1) * task_values)) };
        path.run(Dtype::F32, Normalise { weight, eps, rows });
    });
}

struct Normalise<'a> {
    weight: &'a [f32],
    eps: f32,
    rows: &'a mut [f32],
}

impl Kernel for Normalise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes, E: Element>(self, lanes: L) {
        let width = self.weight.len();
        for row in self.rows.chunks_exact_mut(width) {
            let [squares] = dots::<L, F32, 1>(lanes, [bytes_of(row)], row);
            let scale = 1.0 / (squares / width as f32 + self.eps).sqrt();
            row.iter_mut().zip(self.weight).for_each(|(x, weight)| *x = *x * scale * weight);
        }
    }
}
