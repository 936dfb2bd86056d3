//! What is stored of a cluster of tokens: how much each neuron matters there, and how often it is in the mask.

use crate::cluster::{PackedMasks, members};
use half::bf16;
use np_formats::{LayerTrace, importance_from_u8};
use rayon::prelude::*;

/// Importance above this quantile of its layer counts as the quantile: a few outliers would own every mean of squares.
const CLIP_QUANTILE: f64 = 0.9999;

/// Energies (C, M): the mean of squared, clipped importance over a centroid's `usable` tokens and one more that has
/// the layer's means, so that a rare centroid is not sure of what it has hardly seen.
pub fn energy_table(trace: &LayerTrace, usable: &[u32], labels: &[u16], centroids: usize) -> Vec<bf16> {
    let row = |token: u32| &trace.importance[token as usize * trace.neurons..][..trace.neurons];
    let squares = clipped_squares(usable.iter().map(|&token| row(token)));
    let sums = |tokens: &Vec<u32>| -> Vec<f64> {
        let mut sums = vec![0.0; trace.neurons];
        for &token in tokens {
            for (sum, &step) in sums.iter_mut().zip(row(token)) {
                *sum += squares[step as usize];
            }
        }
        sums
    };
    shrunk_means(&members_of(usable, labels, centroids), trace.neurons, sums)
}

/// Frequencies (C, M): the share of a centroid's `usable` tokens whose mask has the neuron, with one more token that
/// has the layer's shares.
pub fn frequency_table(masks: PackedMasks<'_>, usable: &[u32], labels: &[u16], centroids: usize) -> Vec<bf16> {
    let sums = |tokens: &Vec<u32>| masks.occurrences(tokens).into_iter().map(f64::from).collect();
    shrunk_means(&members_of(usable, labels, centroids), masks.neurons(), sums)
}

fn members_of(usable: &[u32], labels: &[u16], centroids: usize) -> Vec<Vec<u32>> {
    let labels: Vec<u16> = usable.iter().map(|&token| labels[token as usize]).collect();
    members(usable, &labels, centroids)
}

/// The square of each step's importance, clipped at the quantile of all `rows`.
fn clipped_squares<'a>(rows: impl Iterator<Item = &'a [u8]>) -> [f64; 256] {
    let mut counts = [0u64; 256];
    rows.flatten().for_each(|&step| counts[step as usize] += 1);
    let total: u64 = counts.iter().sum();
    let wanted = (CLIP_QUANTILE * total as f64).ceil() as u64;
    let mut below = 0;
    let reaches = |count: &u64| {
        below += count;
        below >= wanted
    };
    let clip = counts.iter().position(reaches).unwrap_or(255);
    std::array::from_fn(|step| f64::from(importance_from_u8(step.min(clip) as u8)).powi(2))
}

/// (C, M): each centroid's sums over its members and over one more token with the mean of all members.
fn shrunk_means(members: &[Vec<u32>], neurons: usize, sums: impl Fn(&Vec<u32>) -> Vec<f64> + Sync + Send) -> Vec<bf16> {
    let sums: Vec<Vec<f64>> = members.par_iter().map(sums).collect();
    let total: usize = members.iter().map(Vec::len).sum();
    let mut mean = vec![0.0; neurons];
    // One centroid after another, so that the sum is the same on any number of threads.
    for sums in &sums {
        mean.iter_mut().zip(sums).for_each(|(mean, sum)| *mean += sum / total as f64);
    }
    let rows = sums.iter().zip(members).flat_map(|(sums, members)| {
        let tokens = members.len() as f64 + 1.0;
        sums.iter().zip(&mean).map(move |(sum, mean)| bf16::from_f64((sum + mean) / tokens))
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use np_formats::importance_to_u8;

    fn trace(importance: &[f32], neurons: usize) -> LayerTrace {
        LayerTrace {
            tokens: importance.len() / neurons,
            neurons,
            importance: importance.iter().copied().map(importance_to_u8).collect(),
            joint: vec![],
            gate: vec![],
            up: vec![],
            energy: vec![],
            count: 0,
            k_fraction: 0.5,
        }
    }

    #[track_caller]
    fn check_table(found: &[bf16], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            // bf16 has eight bits.
            assert!((found.to_f64() - expected).abs() <= expected.abs() / 256.0, "{found} {expected}");
        }
    }

    #[test]
    fn energies_are_shrunk_to_the_layers_mean() {
        // Powers of two lie on the importance scale. Token 0 is not usable.
        let trace = trace(&[64.0, 64.0, 1.0, 2.0, 1.0, 4.0, 0.0, 0.5], 2);
        let found = energy_table(&trace, &[1, 2, 3], &[0, 0, 0, 2], 3);
        let mean = [2.0 / 3.0, 20.25 / 3.0];
        let expected =
            [(2.0 + mean[0]) / 3.0, (20.0 + mean[1]) / 3.0, mean[0], mean[1], mean[0] / 2.0, (0.25 + mean[1]) / 2.0];
        check_table(&found, &expected);
    }

    #[test]
    fn one_outlier_in_twenty_thousand_is_clipped() {
        let mut importance = vec![1.0; 20_000];
        importance[7] = 1024.0;
        let found = energy_table(&trace(&importance, 1), &(0..20_000).collect::<Vec<_>>(), &[0; 20_000], 1);
        check_table(&found, &[1.0]);
        importance[..5].fill(1024.0);
        let found = energy_table(&trace(&importance, 1), &(0..20_000).collect::<Vec<_>>(), &[0; 20_000], 1);
        assert!(found[0].to_f64() > 100.0, "a quantile that clips everything: {}", found[0]);
    }

    #[test]
    fn frequencies_are_shrunk_to_the_layers_share() {
        let words = [0b11u64, 0b01, 0b01, 0b10];
        let found = frequency_table(PackedMasks::new(2, &words), &[1, 2, 3], &[1, 0, 0, 1], 2);
        let mean = [2.0 / 3.0, 1.0 / 3.0];
        check_table(&found, &[(2.0 + mean[0]) / 3.0, mean[1] / 3.0, mean[0] / 2.0, (1.0 + mean[1]) / 2.0]);
    }
}
