//! From one token's activations to its masks.
//!
//! A neuron's importance is how much it can add to the layer's output: `|silu(g) · u| · ‖down‖`. The joint mask has
//! the K most important neurons; the separate masks have the √(K/M)·M largest `|silu(g)|` and `|u|`, so that two
//! independent masks would share K.

use np_formats::MASK_WORD_BITS;

/// Neurons in a joint mask: `k_fraction` of `neurons`, rounded, at least one.
pub fn joint_count(k_fraction: f64, neurons: usize) -> usize {
    ((k_fraction * neurons as f64).round() as usize).clamp(1, neurons)
}

/// Neurons in a gate or up mask where the joint mask has `joint_count` of `neurons`.
pub fn separate_count(joint_count: usize, neurons: usize) -> usize {
    let share = joint_count as f64 / neurons as f64;
    ((share.sqrt() * neurons as f64).round() as usize).clamp(1, neurons)
}

/// Importance (M) from the gate's products (M), the up projection's products (M) and the norms of the down rows (M).
pub fn importance(gate: &[f32], up: &[f32], down_norm: &[f32], importance: &mut [f32]) {
    assert!(gate.len() == up.len() && gate.len() == down_norm.len() && gate.len() == importance.len());
    for (index, importance) in importance.iter_mut().enumerate() {
        *importance = np_runtime::importance::importance(gate[index], up[index], down_norm[index]);
    }
}

/// `|silu(g)|` (M) of the gate's products (M): the score of the gate mask. The score of the up mask is `u` itself.
pub fn gate_magnitude(gate: &[f32], magnitude: &mut [f32]) {
    assert_eq!(gate.len(), magnitude.len());
    for (gate, magnitude) in gate.iter().zip(magnitude) {
        *magnitude = silu(*gate).abs();
    }
}

/// Writes the packed mask (words) of the `count` neurons with the largest absolute score (M). Ties go to the lower
/// neuron. `scratch` is only memory: one that is kept between calls saves an allocation for each.
pub fn top_mask(scores: &[f32], count: usize, scratch: &mut Vec<u32>, words: &mut [u64]) {
    assert!(1 <= count && count <= scores.len(), "{count} of {} neurons", scores.len());
    assert_eq!(words.len(), scores.len().div_ceil(MASK_WORD_BITS));
    scratch.clear();
    scratch.extend(scores.iter().map(|score| magnitude_bits(*score)));
    let (_, &mut threshold, _) = scratch.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
    let above = scores.iter().filter(|score| magnitude_bits(**score) > threshold).count();
    let mut ties = count - above;
    for (word, scores) in words.iter_mut().zip(scores.chunks(MASK_WORD_BITS)) {
        *word = 0;
        for (bit, score) in scores.iter().enumerate() {
            let bits = magnitude_bits(*score);
            let tied = bits == threshold && ties > 0;
            ties -= usize::from(tied);
            *word |= u64::from(bits > threshold || tied) << bit;
        }
    }
}

fn silu(value: f32) -> f32 {
    value / (1.0 + (-value).exp())
}

/// Orders absolute values as integers, which is total and quicker than comparing floats.
fn magnitude_bits(value: f32) -> u32 {
    value.abs().to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;
    use np_formats::Mask;
    use proptest::prelude::*;

    fn top(scores: &[f32], count: usize) -> Vec<u32> {
        let mut words = vec![u64::MAX; scores.len().div_ceil(MASK_WORD_BITS)];
        top_mask(scores, count, &mut Vec::new(), &mut words);
        Mask::from_words(scores.len(), &words).expect("no bit past the last neuron").ones().collect()
    }

    #[test]
    fn counts_are_rounded() {
        assert_eq!(joint_count(0.5, 1536), 768);
        assert_eq!(joint_count(0.384, 1536), 590);
        assert_eq!(joint_count(0.0, 1536), 1);
        assert_eq!(joint_count(1.0, 1536), 1536);
        assert_eq!(separate_count(768, 1536), 1086);
        assert_eq!(separate_count(1536, 1536), 1536);
    }

    #[test]
    fn importance_weighs_by_the_down_row() {
        let mut found = [0.0; 3];
        importance(&[0.0, 2.0, -2.0], &[5.0, -3.0, 3.0], &[1.0, 0.5, 2.0], &mut found);
        let silu = |x: f32| x / (1.0 + (-x).exp());
        assert_eq!(found, [0.0, silu(2.0) * 3.0 * 0.5, -silu(-2.0) * 3.0 * 2.0]);
        let mut magnitude = [0.0; 2];
        gate_magnitude(&[1.0, -1.0], &mut magnitude);
        assert_eq!(magnitude, [silu(1.0), -silu(-1.0)]);
    }

    #[test]
    fn ties_go_to_the_lower_neuron() {
        assert_eq!(top(&[1.0, -3.0, 2.0, 0.5], 2), [1, 2]);
        assert_eq!(top(&[1.0, 1.0, 1.0, 2.0], 2), [0, 3]);
        assert_eq!(top(&[0.0; 70], 3), [0, 1, 2]);
        assert_eq!(top(&[0.0, -0.0, 1.0], 3), [0, 1, 2]);
    }

    proptest! {
        #[test]
        fn top_agrees_with_sorting(scores in proptest::collection::vec(-4i8..4, 1..200), share in 0.0f64..1.0) {
            let scores: Vec<f32> = scores.into_iter().map(f32::from).collect();
            let count = joint_count(share, scores.len());
            let mut order: Vec<u32> = (0..scores.len() as u32).collect();
            order.sort_by(|&a, &b| scores[b as usize].abs().total_cmp(&scores[a as usize].abs()));
            let mut expected = order[..count].to_vec();
            expected.sort_unstable();
            prop_assert_eq!(top(&scores, count), expected);
        }
    }
}
