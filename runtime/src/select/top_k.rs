//! Exactly K neurons of highest score.

use np_formats::Mask;

/// Picks the K highest of a layer's scores. Ties go to the lower neuron, so that equal scores always give equal sets.
#[derive(Clone, Debug)]
pub struct TopK {
    keys: Vec<u64>,
}

impl TopK {
    /// For layers of `neurons` neurons.
    pub fn new(neurons: usize) -> Self {
        Self { keys: vec![0; neurons] }
    }

    /// Writes into `out` the `k` neurons of highest `score(neuron)`. NaN counts as lowest.
    pub fn pick(&mut self, k: usize, score: impl Fn(usize) -> f32, out: &mut Mask) {
        let neurons = self.keys.len();
        assert!(k <= neurons && out.neurons() == neurons, "{k} of {neurons}");
        out.clear();
        for (neuron, key) in self.keys.iter_mut().enumerate() {
            *key = u64::from(descending(score(neuron))) << 32 | neuron as u64;
        }
        if 0 < k && k < neurons {
            self.keys.select_nth_unstable(k - 1);
        }
        for key in &self.keys[..k] {
            out.insert(*key as u32);
        }
    }
}

/// Maps floats to integers of the opposite order.
fn descending(score: f32) -> u32 {
    if score.is_nan() {
        return u32::MAX;
    }
    // -0 and 0 are one score.
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    !ascending
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[track_caller]
    fn check(scores: &[f32], k: usize, expected: &[u32]) {
        let mut out = Mask::full(scores.len());
        TopK::new(scores.len()).pick(k, |neuron| scores[neuron], &mut out);
        assert_eq!(out.ones().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn ties_go_to_the_lower_neuron() {
        check(&[1.0, 2.0, 2.0, 2.0, 0.5], 2, &[1, 2]);
        check(&[0.0, -0.0, 0.0], 2, &[0, 1]);
        check(&[-1.0, f32::NAN, f32::NEG_INFINITY, -2.0], 3, &[0, 2, 3]);
        check(&[1.0, 2.0], 0, &[]);
        check(&[1.0, 2.0], 2, &[0, 1]);
    }

    proptest! {
        #[test]
        fn agrees_with_sorting(scores in proptest::collection::vec(-3i32..3, 70), k in 0usize..70) {
            let scores: Vec<f32> = scores.into_iter().map(|score| score as f32 * 0.25).collect();
            let mut order: Vec<u32> = (0..70).collect();
            order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b)));
            let mut expected = order[..k].to_vec();
            expected.sort_unstable();
            check(&scores, k, &expected);
        }
    }
}
