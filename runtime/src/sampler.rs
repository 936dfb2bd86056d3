//! The next token from the logits.

use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::cmp::Ordering;

/// Candidates that are put in order at first for the nucleus; few texts need more.
const NUCLEUS_STEP: usize = 64;

/// How tokens are chosen. The default is greedy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerOptions {
    /// What logits are divided by; 0 takes the likeliest token always.
    pub temperature: f32,
    /// Keeps this many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the likeliest tokens until their probabilities sum to this, 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this many times as likely as the likeliest, 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of recent tokens; 1 changes nothing.
    pub repetition_penalty: f32,
    /// The same seed gives the same tokens.
    pub seed: u64,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

impl SamplerOptions {
    /// Says which option is out of range.
    ///
    /// # Errors
    /// One line, for the user.
    pub fn check(&self) -> Result<(), String> {
        let Self { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            return Err(format!("temperature {temperature}: must be 0 (greedy) or more"));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(format!("top-p {top_p}: must be above 0 and at most 1"));
        }
        if !(0.0..=1.0).contains(&min_p) {
            return Err(format!("min-p {min_p}: must be from 0 to 1"));
        }
        if !(repetition_penalty > 0.0 && repetition_penalty.is_finite()) {
            return Err(format!("repetition penalty {repetition_penalty}: must be above 0; 1 is none"));
        }
        Ok(())
    }
}

/// Chooses tokens. Allocates nothing after it is made.
///
/// Order: repetition penalty, temperature, top-k, top-p (of what top-k left), min-p, then a draw.
pub struct Sampler {
    options: SamplerOptions,
    random: Xoshiro256PlusPlus,
    candidates: Vec<Candidate>,
    /// By token: whether it was penalised in this step already.
    penalised: Vec<bool>,
}

/// A token that may be drawn. Weights are probabilities up to a common factor; the likeliest token's is 1.
#[derive(Clone, Copy)]
struct Candidate {
    id: u32,
    weight: f32,
}

impl Sampler {
    /// A sampler for logits of `vocabulary_count` tokens.
    ///
    /// # Panics
    /// When [`SamplerOptions::check`] would complain.
    pub fn new(options: SamplerOptions, vocabulary_count: usize) -> Self {
        options.check().expect("options are checked where they come from");
        Self {
            options,
            random: Xoshiro256PlusPlus::seed_from_u64(options.seed),
            candidates: Vec::with_capacity(vocabulary_count),
            penalised: vec![false; vocabulary_count],
        }
    }

    /// The next token, given its `logits` (one per token of the vocabulary; penalties change them) and the `recent`
    /// tokens. Logits that are no number are never chosen while another is there.
    ///
    /// # Panics
    /// When there are more logits than the vocabulary has tokens.
    pub fn sample(&mut self, logits: &mut [f32], recent: &[u32]) -> u32 {
        assert!(logits.len() <= self.penalised.len(), "{} logits, {} tokens", logits.len(), self.penalised.len());
        self.penalise(logits, recent);
        let likeliest = greedy(logits);
        if self.options.temperature == 0.0 {
            return likeliest;
        }
        self.weigh(logits, logits[likeliest as usize]);
        if self.candidates.is_empty() {
            return likeliest;
        }
        let all = self.candidates.len();
        self.keep_top_k();
        self.keep_top_p();
        let min_p = self.options.min_p;
        self.candidates.retain(|candidate| candidate.weight >= min_p);
        if self.candidates.len() < all {
            // The filters leave an order of their own; a draw must depend on the candidates alone.
            self.candidates.sort_unstable_by_key(|candidate| candidate.id);
        }
        self.draw()
    }

    /// Makes tokens that occurred lately less likely, each once however often it occurred.
    fn penalise(&mut self, logits: &mut [f32], recent: &[u32]) {
        let penalty = self.options.repetition_penalty;
        if penalty == 1.0 {
            return;
        }
        for &id in recent {
            let index = id as usize;
            if index < logits.len() && !std::mem::replace(&mut self.penalised[index], true) {
                logits[index] = if logits[index] > 0.0 { logits[index] / penalty } else { logits[index] * penalty };
            }
        }
        for &id in recent {
            if let Some(penalised) = self.penalised.get_mut(id as usize) {
                *penalised = false;
            }
        }
    }

    /// Makes candidates of all tokens that are possible at all.
    fn weigh(&mut self, logits: &[f32], highest: f32) {
        let temperature = self.options.temperature;
        self.candidates.clear();
        for (id, &logit) in (0..).zip(logits) {
            // An infinite logit less itself is no number.
            let weight = if logit == highest { 1.0 } else { ((logit - highest) / temperature).exp() };
            if weight > 0.0 {
                self.candidates.push(Candidate { id, weight });
            }
        }
    }

    fn keep_top_k(&mut self) {
        let count = self.options.top_k;
        if count > 0 && count < self.candidates.len() {
            self.candidates.select_nth_unstable_by(count - 1, by_weight);
            self.candidates.truncate(count);
        }
    }

    /// Sorts only as many of the likeliest as it takes.
    fn keep_top_p(&mut self) {
        if self.options.top_p == 1.0 {
            return;
        }
        let count = self.candidates.len();
        let wanted = f64::from(self.options.top_p) * total(&self.candidates);
        let (mut sorted, mut sum) = (0, 0.0);
        while sorted < count {
            let end = (sorted * 4).max(NUCLEUS_STEP).min(count);
            let rest = &mut self.candidates[sorted..];
            if end < count {
                rest.select_nth_unstable_by(end - sorted, by_weight);
            }
            rest[..end - sorted].sort_unstable_by(by_weight);
            for index in sorted..end {
                sum += f64::from(self.candidates[index].weight);
                if sum >= wanted {
                    return self.candidates.truncate(index + 1);
                }
            }
            sorted = end;
        }
    }

    /// One of the candidates, each as often as its weight says.
    fn draw(&mut self) -> u32 {
        let mut left = self.random.gen_range(0.0..total(&self.candidates));
        for candidate in &self.candidates {
            left -= f64::from(candidate.weight);
            if left < 0.0 {
                return candidate.id;
            }
        }
        // Rounding may leave a little.
        self.candidates.last().expect("the likeliest token passes every filter").id
    }
}

/// The token of the highest logit, the first of equals.
pub fn greedy(logits: &[f32]) -> u32 {
    let mut likeliest = 0;
    for (index, &logit) in logits.iter().enumerate() {
        if logit > logits[likeliest] || (logits[likeliest].is_nan() && !logit.is_nan()) {
            likeliest = index;
        }
    }
    likeliest as u32
}

fn total(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| f64::from(candidate.weight)).sum()
}

/// Likeliest first, the lower id first among equals.
fn by_weight(left: &Candidate, right: &Candidate) -> Ordering {
    right.weight.total_cmp(&left.weight).then(left.id.cmp(&right.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAWS: usize = 20_000;
    /// Probabilities 0.4, 0.3, 0.2, 0.1 of tokens 2, 0, 3, 1.
    const PROBABILITIES: [f32; 4] = [0.3, 0.1, 0.4, 0.2];

    fn sampling() -> SamplerOptions {
        SamplerOptions { temperature: 1.0, ..SamplerOptions::default() }
    }

    /// Draws often and compares the shares with `expected`, which need not sum to 1.
    #[track_caller]
    fn check(options: SamplerOptions, recent: &[u32], expected: &[f64]) {
        let mut sampler = Sampler::new(options, expected.len());
        let mut counts = vec![0_u32; expected.len()];
        for _ in 0..DRAWS {
            let mut logits: Vec<f32> = PROBABILITIES.iter().map(|probability| probability.ln()).collect();
            counts[sampler.sample(&mut logits, recent) as usize] += 1;
        }
        let sum: f64 = expected.iter().sum();
        for (count, expected) in counts.iter().zip(expected) {
            let (share, expected) = (f64::from(*count) / DRAWS as f64, expected / sum);
            // Five standard deviations of a share: a right sampler is never outside with this seed.
            let tolerance = 5.0 * (expected * (1.0 - expected) / DRAWS as f64).sqrt();
            assert!((share - expected).abs() <= tolerance, "{share} instead of {expected}: {counts:?}");
        }
    }

    #[test]
    fn draws_as_often_as_probabilities_say() {
        check(sampling(), &[], &[0.3, 0.1, 0.4, 0.2]);
        check(SamplerOptions { temperature: 0.5, ..sampling() }, &[], &[0.09, 0.01, 0.16, 0.04]);
        check(SamplerOptions { temperature: 2.0, ..sampling() }, &[], &PROBABILITIES.map(|p| f64::from(p).sqrt()));
        check(SamplerOptions { temperature: 1e-6, ..sampling() }, &[], &[0.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn filters_keep_what_they_say() {
        check(SamplerOptions { top_k: 1, ..sampling() }, &[], &[0.0, 0.0, 1.0, 0.0]);
        check(SamplerOptions { top_k: 2, ..sampling() }, &[], &[0.3, 0.0, 0.4, 0.0]);
        check(SamplerOptions { top_k: 9, ..sampling() }, &[], &[0.3, 0.1, 0.4, 0.2]);
        check(SamplerOptions { top_p: 0.39, ..sampling() }, &[], &[0.0, 0.0, 1.0, 0.0]);
        check(SamplerOptions { top_p: 0.69, ..sampling() }, &[], &[0.3, 0.0, 0.4, 0.0]);
        check(SamplerOptions { top_p: 0.71, ..sampling() }, &[], &[0.3, 0.0, 0.4, 0.2]);
        check(SamplerOptions { min_p: 0.4, ..sampling() }, &[], &[0.3, 0.0, 0.4, 0.2]);
        check(SamplerOptions { min_p: 0.6, ..sampling() }, &[], &[0.3, 0.0, 0.4, 0.0]);
        check(SamplerOptions { min_p: 1.0, ..sampling() }, &[], &[0.0, 0.0, 1.0, 0.0]);
        // Top-p counts of what top-k left: 0.3 of 0.7 is needed to pass 0.6.
        check(SamplerOptions { top_k: 2, top_p: 0.6, ..sampling() }, &[], &[0.3, 0.0, 0.4, 0.0]);
        check(SamplerOptions { top_k: 2, top_p: 0.5, ..sampling() }, &[], &[0.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn recent_tokens_are_penalised_once() {
        // Logits are logarithms of probabilities, all negative: a penalty of 2 squares the probability.
        let options = SamplerOptions { repetition_penalty: 2.0, ..sampling() };
        check(options, &[2, 2, 2, 99], &[0.3, 0.1, 0.16, 0.2]);
        let mut sampler = Sampler::new(SamplerOptions { temperature: 0.0, ..options }, 3);
        let mut logits = [4.0, 3.0, -1.0];
        assert_eq!(sampler.sample(&mut logits, &[0, 2, 0]), 1);
        assert_eq!(logits, [2.0, 3.0, -2.0]);
        assert_eq!(sampler.sample(&mut logits, &[1]), 0);
    }

    #[test]
    fn the_nucleus_is_the_same_however_it_is_sorted() {
        let count = 5000;
        let logits: Vec<f32> = (0..count).map(|id| ((id * 7919) % count) as f32 / 1000.0).collect();
        for top_p in [0.001, 0.1, 0.5, 0.9, 0.999] {
            let mut sampler = Sampler::new(SamplerOptions { top_p, ..sampling() }, count);
            sampler.weigh(&logits, logits[greedy(&logits) as usize]);
            let mut naive = sampler.candidates.clone();
            naive.sort_by(by_weight);
            let wanted = f64::from(top_p) * total(&naive);
            let mut sum = 0.0;
            let kept = naive.iter().take_while(|candidate| {
                let takes = sum < wanted;
                sum += f64::from(candidate.weight);
                takes
            });
            let kept: Vec<u32> = kept.map(|candidate| candidate.id).collect();
            sampler.keep_top_p();
            assert_eq!(sampler.candidates.iter().map(|candidate| candidate.id).collect::<Vec<_>>(), kept);
        }
    }

    #[test]
    fn a_seed_repeats() {
        let draw = |seed| {
            let mut sampler = Sampler::new(SamplerOptions { seed, top_p: 0.9, ..sampling() }, 100);
            let logits: Vec<f32> = (0..100).map(|id| (id % 7) as f32).collect();
            (0..50).map(|_| sampler.sample(&mut logits.clone(), &[])).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        let check = |logits: &[f32], expected| {
            assert_eq!(greedy(logits), expected);
            assert_eq!(Sampler::new(SamplerOptions::default(), 9).sample(&mut logits.to_vec(), &[]), expected);
        };
        check(&[1.0, 3.0, 3.0, 2.0], 1);
        check(&[-0.0, 0.0], 0);
        check(&[f32::NAN, 1.0, f32::NAN, 2.0], 3);
        check(&[f32::NEG_INFINITY, f32::NEG_INFINITY], 0);
        check(&[f32::NAN, f32::NAN], 0);
    }

    #[test]
    fn odd_logits_are_survived() {
        let mut sampler = Sampler::new(sampling(), 4);
        assert_eq!(sampler.sample(&mut [f32::NAN; 4], &[]), 0);
        assert_eq!(sampler.sample(&mut [f32::NAN, 1.0, f32::NEG_INFINITY, f32::NAN], &[]), 1);
        assert_eq!(sampler.sample(&mut [1.0, f32::INFINITY, 2.0, 3.0], &[]), 1);
        assert!(sampler.sample(&mut [f32::NEG_INFINITY; 4], &[]) < 4);
    }

    #[test]
    fn options_out_of_range_are_named() {
        let check = |options: SamplerOptions, name: &str| {
            assert!(options.check().is_err_and(|message| message.contains(name)), "{options:?}");
        };
        check(SamplerOptions { temperature: -0.1, ..sampling() }, "temperature");
        check(SamplerOptions { temperature: f32::NAN, ..sampling() }, "temperature");
        check(SamplerOptions { top_p: 0.0, ..sampling() }, "top-p");
        check(SamplerOptions { top_p: 1.1, ..sampling() }, "top-p");
        check(SamplerOptions { min_p: -1.0, ..sampling() }, "min-p");
        check(SamplerOptions { repetition_penalty: 0.0, ..sampling() }, "repetition");
        assert_eq!(sampling().check(), Ok(()));
    }
}
