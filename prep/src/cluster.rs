//! Clusters masks: many tokens' masks in, a few centroids and each token's label out.
//!
//! linfa's k-means on a random projection gives the start; Lloyd's algorithm on packed bits finishes. A centroid is the
//! mean of its masks in steps of a fifteenth, so that sixteen steps fit a byte and a token's distance to it is sums of
//! bytes, 16 and more at a time.
//! All sums that decide anything are of integers: neither the number of threads nor their order changes a label.

use linfa::DatasetBase;
use linfa::traits::{Fit, Predict};
use linfa_clustering::KMeans;
use ndarray::Array2;
use np_formats::MASK_WORD_BITS;
use rand::seq::index;
use rand::{RngCore, SeedableRng};
use rand_xoshiro::Xoshiro256Plus;
use rayon::prelude::*;

/// Tokens that place the centroids. More of them hardly move a mean of a hundred masks; all tokens get a label.
const LLOYD_TOKENS_MAX: usize = 8_192;
/// Tokens that linfa sees, for each centroid and at most: its seeding costs tokens × dimensions × centroids².
const START_TOKENS_PER_CENTROID: usize = 16;
const START_TOKENS_MAX: usize = 4_096;
/// Dimensions of the random projection: distances survive to about an eighth, enough to start from.
const START_DIMENSIONS: usize = 64;
/// linfa's iterations.
const START_ITERATIONS: u64 = 4;
/// Iterations of Lloyd's algorithm; labels settle within about ten.
const LLOYD_ITERATIONS: usize = 10;
/// The share 1 in steps of a centroid.
const SCALE: i64 = 15;
/// Steps that a byte can sum.
const STEPS_PER_SUM: usize = 16;
const _: () = assert!(SCALE as usize * STEPS_PER_SUM <= u8::MAX as usize);

/// Masks of many tokens over the same neurons, packed one after another.
#[derive(Clone, Copy)]
pub struct PackedMasks<'a> {
    neurons: usize,
    words: &'a [u64],
}

/// What to make.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClusterOptions {
    /// Centroids (C), 1 to 65,536.
    pub centroids: usize,
    /// Same seed, same bytes.
    pub seed: u64,
}

/// Centroids and labels. A centroid that no mask is nearest to, as when there are fewer distinct masks than centroids,
/// has no label.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Clusters {
    /// (T): centroid of every token.
    pub labels: Vec<u16>,
    /// (C, words): neurons in more than half of the centroid's masks.
    pub masks: Vec<u64>,
}

impl<'a> PackedMasks<'a> {
    /// Masks (T, ceil(`neurons` / 64)).
    pub fn new(neurons: usize, words: &'a [u64]) -> Self {
        assert!(neurons > 0 && words.len().is_multiple_of(neurons.div_ceil(MASK_WORD_BITS)), "masks are cut off");
        Self { neurons, words }
    }

    /// Neurons (M).
    pub fn neurons(&self) -> usize {
        self.neurons
    }

    /// Words of one mask.
    pub fn row_words(&self) -> usize {
        self.neurons.div_ceil(MASK_WORD_BITS)
    }

    /// Tokens (T).
    pub fn tokens(&self) -> usize {
        self.words.len() / self.row_words()
    }

    /// The mask of one token.
    pub fn row(&self, token: usize) -> &'a [u64] {
        &self.words[token * self.row_words()..][..self.row_words()]
    }

    /// Per neuron (M), how many of these tokens have it.
    pub fn occurrences(&self, tokens: &[u32]) -> Vec<u32> {
        let mut occurrences = vec![0; self.row_words() * MASK_WORD_BITS];
        for &token in tokens {
            for (&word, counts) in self.row(token as usize).iter().zip(occurrences.chunks_exact_mut(MASK_WORD_BITS)) {
                for (bit, count) in counts.iter_mut().enumerate() {
                    *count += (word >> bit & 1) as u32;
                }
            }
        }
        occurrences.truncate(self.neurons);
        occurrences
    }
}

/// Clusters the masks of the tokens `usable` (ascending, not empty) and labels all tokens.
pub fn cluster(masks: PackedMasks<'_>, usable: &[u32], options: ClusterOptions) -> Clusters {
    assert!(!usable.is_empty(), "no token to cluster");
    assert!((1..=1 << 16).contains(&options.centroids), "{} centroids", options.centroids);
    let mut rng = Xoshiro256Plus::seed_from_u64(options.seed);
    let sample = sample(usable, LLOYD_TOKENS_MAX, &mut rng);
    let mut labels = start(masks, &sample, options, &mut rng);
    let mut centroids = Vec::new();
    for _ in 0..LLOYD_ITERATIONS {
        centroids = means(masks, &members(&sample, &labels, options.centroids));
        let mut found = assign(masks, &sample, &centroids);
        fill_empty(&mut found, masks, &sample, options.centroids);
        let next: Vec<u16> = found.iter().map(|nearest| nearest.label).collect();
        if next == labels {
            break;
        }
        labels = next;
    }
    let all: Vec<u32> = (0..masks.tokens() as u32).collect();
    let labels: Vec<u16> = assign(masks, &all, &centroids).iter().map(|nearest| nearest.label).collect();
    let masks = majorities(masks, usable, &labels, options.centroids);
    Clusters { labels, masks }
}

/// The tokens of each centroid, ascending. `labels` belong to `tokens`, one each.
pub fn members(tokens: &[u32], labels: &[u16], centroids: usize) -> Vec<Vec<u32>> {
    assert_eq!(tokens.len(), labels.len());
    let mut members = vec![Vec::new(); centroids];
    for (&token, &label) in tokens.iter().zip(labels) {
        members[label as usize].push(token);
    }
    members
}

/// At most `count_max` of `tokens`, ascending.
fn sample(tokens: &[u32], count_max: usize, rng: &mut Xoshiro256Plus) -> Vec<u32> {
    if tokens.len() <= count_max {
        return tokens.to_vec();
    }
    let mut chosen: Vec<u32> = index::sample(rng, tokens.len(), count_max).iter().map(|at| tokens[at]).collect();
    chosen.sort_unstable();
    chosen
}

/// Labels of `tokens` by k-means on a random projection: dimension d counts the neurons that a mask shares with the
/// d-th random half of all neurons.
fn start(masks: PackedMasks<'_>, tokens: &[u32], options: ClusterOptions, rng: &mut Xoshiro256Plus) -> Vec<u16> {
    let halves: Vec<u64> = (0..START_DIMENSIONS * masks.row_words()).map(|_| rng.next_u64()).collect();
    let project = |tokens: &[u32]| -> Array2<f32> {
        let shared = tokens.par_iter().flat_map_iter(|&token| {
            let row = masks.row(token as usize);
            halves.chunks_exact(row.len()).map(move |half| shared(row, half) as f32)
        });
        let values: Vec<f32> = shared.collect();
        Array2::from_shape_vec((tokens.len(), START_DIMENSIONS), values).expect("one row per token")
    };
    let few = sample(tokens, START_TOKENS_MAX.min(START_TOKENS_PER_CENTROID * options.centroids), rng);
    let model = KMeans::params_with_rng(options.centroids, rng.clone())
        .n_runs(1)
        .max_n_iterations(START_ITERATIONS)
        .fit(&DatasetBase::from(project(&few)))
        .expect("points are finite and centroids at least one");
    let labels = model.predict(&project(tokens));
    labels.iter().map(|&label| label as u16).collect()
}

/// A centroid's mean mask in steps of 1 / [`SCALE`].
struct Centroid {
    /// (words * 64): each neuron's share of the masks, in steps.
    steps: Vec<u8>,
    /// Sum of squared steps.
    square: i64,
}

/// The nearest centroid of a token.
#[derive(Clone, Copy)]
struct Nearest {
    label: u16,
    /// Squared distance, times [`SCALE`]².
    distance: i64,
}

/// Mean masks of the members; `None` where there are none.
fn means(masks: PackedMasks<'_>, members: &[Vec<u32>]) -> Vec<Option<Centroid>> {
    let mean = |tokens: &Vec<u32>| -> Option<Centroid> {
        let count = i64::try_from(tokens.len()).expect("tokens are few");
        if count == 0 {
            return None;
        }
        let mut centroid = Centroid { steps: vec![0; masks.row_words() * MASK_WORD_BITS], square: 0 };
        for (step, occurrences) in centroid.steps.iter_mut().zip(masks.occurrences(tokens)) {
            let rounded = (2 * SCALE * i64::from(occurrences) + count) / (2 * count);
            centroid.square += rounded * rounded;
            *step = rounded as u8;
        }
        Some(centroid)
    };
    members.par_iter().map(mean).collect()
}

/// The nearest centroid of each of `tokens`; ties go to the lower one.
fn assign(masks: PackedMasks<'_>, tokens: &[u32], centroids: &[Option<Centroid>]) -> Vec<Nearest> {
    let nearest = |bytes: &mut Vec<u8>, &token: &u32| -> Nearest {
        let row = masks.row(token as usize);
        unpack(row, bytes);
        let own = SCALE * SCALE * i64::from(shared(row, row));
        let distances = centroids.iter().enumerate().filter_map(|(label, centroid)| {
            let centroid = centroid.as_ref()?;
            let distance = own - 2 * SCALE * masked_sum(bytes, &centroid.steps) + centroid.square;
            Some(Nearest { label: label as u16, distance })
        });
        distances.min_by_key(|nearest| nearest.distance).expect("some centroid has members")
    };
    tokens.par_iter().map_init(|| vec![0; masks.row_words() * MASK_WORD_BITS], nearest).collect()
}

/// Eight bits as eight bytes, all ones or zero, lowest bit first.
const UNPACKED: [[u8; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut at = 0;
    while at < 256 * 8 {
        table[at / 8][at % 8] = if (at / 8) >> (at % 8) & 1 == 1 { u8::MAX } else { 0 };
        at += 1;
    }
    table
};

/// Writes a byte of all ones or zero for each bit of a mask.
fn unpack(row: &[u64], bytes: &mut [u8]) {
    for (word, bytes) in row.iter().zip(bytes.chunks_exact_mut(MASK_WORD_BITS)) {
        for (packed, bytes) in word.to_le_bytes().into_iter().zip(bytes.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&UNPACKED[packed as usize]);
        }
    }
}

/// Sum of the steps where the mask's byte is all ones and not zero. Both have a multiple of [`MASK_WORD_BITS`] bytes.
fn masked_sum(mask: &[u8], steps: &[u8]) -> i64 {
    let (mask, _) = mask.as_chunks::<MASK_WORD_BITS>();
    let (steps, _) = steps.as_chunks::<MASK_WORD_BITS>();
    let sum = |(mask, steps): (&[[u8; MASK_WORD_BITS]], &[[u8; MASK_WORD_BITS]])| -> i64 {
        let mut sums = [0u8; MASK_WORD_BITS];
        for (mask, steps) in mask.iter().zip(steps) {
            for ((sum, mask), step) in sums.iter_mut().zip(mask).zip(steps) {
                // Sixteen steps fit; saying so keeps the check for overflow out of the innermost loop.
                *sum = sum.wrapping_add(mask & step);
            }
        }
        i64::from(sums.iter().map(|&sum| u32::from(sum)).fold(0, u32::wrapping_add))
    };
    mask.chunks(STEPS_PER_SUM).zip(steps.chunks(STEPS_PER_SUM)).map(sum).sum()
}

/// Gives each centroid without a token the worst-served token that has company and whose mask no other such centroid
/// has got. A token that is its centroid's very mask is well served, so that fewer masks than centroids leave the rest
/// empty.
fn fill_empty(found: &mut [Nearest], masks: PackedMasks<'_>, tokens: &[u32], centroids: usize) {
    let mut counts = vec![0u32; centroids];
    found.iter().for_each(|nearest| counts[nearest.label as usize] += 1);
    let empty: Vec<u16> = (0..centroids).filter(|&label| counts[label] == 0).map(|label| label as u16).collect();
    if empty.is_empty() {
        return;
    }
    let mut worst: Vec<usize> = (0..found.len()).filter(|&at| found[at].distance > 0).collect();
    worst.sort_by_key(|&at| (-found[at].distance, at));
    let mut given: Vec<&[u64]> = Vec::new();
    let mut empty = empty.into_iter();
    for at in worst {
        let row = masks.row(tokens[at] as usize);
        if counts[found[at].label as usize] == 1 || given.contains(&row) {
            continue;
        }
        let Some(label) = empty.next() else { return };
        counts[found[at].label as usize] -= 1;
        counts[label as usize] = 1;
        found[at] = Nearest { label, distance: 0 };
        given.push(row);
    }
}

/// Masks (C, words) of the neurons that more than half of a centroid's usable tokens have; of all usable tokens where
/// a centroid has none.
fn majorities(masks: PackedMasks<'_>, usable: &[u32], labels: &[u16], centroids: usize) -> Vec<u64> {
    let usable_labels: Vec<u16> = usable.iter().map(|&token| labels[token as usize]).collect();
    let members = members(usable, &usable_labels, centroids);
    let majority = |tokens: &Vec<u32>| -> Vec<u64> {
        let tokens = if tokens.is_empty() { usable } else { tokens };
        let occurrences = masks.occurrences(tokens);
        let bits = occurrences.chunks(MASK_WORD_BITS).map(|counts| {
            let ones = counts.iter().enumerate().filter(|(_, count)| 2 * **count as usize > tokens.len());
            ones.fold(0, |word, (bit, _)| word | 1u64 << bit)
        });
        bits.collect()
    };
    members.par_iter().flat_map_iter(majority).collect()
}

fn shared(a: &[u64], b: &[u64]) -> u32 {
    a.iter().zip(b).map(|(a, b)| (a & b).count_ones()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::Rng;

    const NEURONS: usize = 200;
    const WORDS: usize = NEURONS.div_ceil(MASK_WORD_BITS);

    /// Tokens that are one of `patterns` random masks with a few bits flipped, and which pattern each is.
    fn planted(tokens: usize, patterns: usize, flips: usize, seed: u64) -> (Vec<u64>, Vec<usize>) {
        let mut rng = Xoshiro256Plus::seed_from_u64(seed);
        let random: Vec<Vec<bool>> = (0..patterns).map(|_| (0..NEURONS).map(|_| rng.gen_bool(0.5)).collect()).collect();
        let truth: Vec<usize> = (0..tokens).map(|_| rng.gen_range(0..patterns)).collect();
        let mut words = vec![0; tokens * WORDS];
        for (token, &pattern) in truth.iter().enumerate() {
            let mut bits = random[pattern].clone();
            (0..flips).for_each(|_| bits[rng.gen_range(0..NEURONS)] ^= true);
            for (neuron, _) in bits.iter().enumerate().filter(|(_, bit)| **bit) {
                words[token * WORDS + neuron / 64] |= 1 << (neuron % 64);
            }
        }
        (words, truth)
    }

    fn run(words: &[u64], usable: &[u32], centroids: usize, seed: u64) -> Clusters {
        cluster(PackedMasks::new(NEURONS, words), usable, ClusterOptions { centroids, seed })
    }

    fn all(tokens: usize) -> Vec<u32> {
        (0..tokens as u32).collect()
    }

    #[track_caller]
    fn check_same_partition(labels: &[u16], truth: &[usize]) {
        for (a, (label, pattern)) in labels.iter().zip(truth).enumerate() {
            for (b, (other_label, other_pattern)) in labels.iter().zip(truth).enumerate() {
                assert_eq!(label == other_label, pattern == other_pattern, "tokens {a} and {b}");
            }
        }
    }

    #[test]
    fn masked_sums_are_exact() {
        let mut rng = Xoshiro256Plus::seed_from_u64(0);
        for words in [1, 15, 16, 17, 40] {
            let row: Vec<u64> = (0..words).map(|_| rng.next_u64() | 1 << 63).collect();
            for steps in [vec![15u8; words * 64], (0..words * 64).map(|_| rng.gen_range(0..16)).collect()] {
                let ones = (0..words * 64).filter(|bit| row[bit / 64] >> (bit % 64) & 1 == 1);
                let expected: i64 = ones.map(|bit| i64::from(steps[bit])).sum();
                let mut bytes = vec![7; words * 64];
                unpack(&row, &mut bytes);
                assert_eq!(masked_sum(&bytes, &steps), expected);
            }
        }
    }

    #[test]
    fn planted_clusters_are_found() {
        for seed in 0..8 {
            // More centroids than patterns: k-means may split a pattern, but must not mix two.
            let (words, truth) = planted(600, 12, 20, seed);
            let labels = run(&words, &all(600), 18, seed).labels;
            for (a, b) in (0..600).flat_map(|a| (0..a).map(move |b| (a, b))) {
                assert!(labels[a] != labels[b] || truth[a] == truth[b], "seed {seed}: tokens {a} and {b}");
            }
        }
    }

    #[test]
    fn majority_masks_undo_the_noise() {
        let (clean, _) = planted(1, 1, 0, 9);
        let (words, _) = planted(400, 1, 30, 9);
        assert_eq!(run(&words, &all(400), 1, 0).masks, clean);
    }

    #[test]
    fn the_same_seed_gives_the_same_bytes_on_any_number_of_threads() {
        let (words, _) = planted(3_000, 40, 60, 1);
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| run(&words, &all(3_000), 16, 5))
        };
        let one = on(1);
        assert_eq!(one, on(1));
        assert_eq!(one, on(3));
        assert_ne!(one, run(&words, &all(3_000), 16, 6), "the seed has no effect");
    }

    #[test]
    fn an_empty_centroid_gets_the_worst_served_token() {
        let words = [0b0011u64, 0b0011, 0b0111, 0b1100];
        let masks = PackedMasks::new(4, &words);
        let nearest = |label, distance| Nearest { label, distance };
        let mut found = vec![nearest(0, 10), nearest(0, 10), nearest(0, 40), nearest(2, 90)];
        fill_empty(&mut found, masks, &all(4), 4);
        // Token 3 is worst served but alone with its centroid; of the equal tokens 0 and 1 only one moves.
        let labels: Vec<u16> = found.iter().map(|nearest| nearest.label).collect();
        assert_eq!(labels, [3, 0, 1, 2]);
    }

    #[test]
    fn no_centroid_stays_empty_while_masks_differ() {
        let (words, _) = planted(500, 3, 40, 2);
        let found = run(&words, &all(500), 32, 0);
        let used: std::collections::BTreeSet<u16> = found.labels.iter().copied().collect();
        assert_eq!(used.len(), 32);
    }

    #[test]
    fn fewer_masks_than_centroids_leave_the_rest_empty() {
        let (words, truth) = planted(50, 4, 0, 3);
        let found = run(&words, &all(50), 16, 0);
        check_same_partition(&found.labels, &truth);
        assert_eq!(found.masks.len(), 16 * WORDS);
        let single = run(&words[..WORDS], &all(1), 8, 0);
        assert!(single.labels[0] < 8);
        assert_eq!(single.masks[..WORDS], words[..WORDS]);
    }

    #[test]
    fn tokens_that_are_not_usable_get_a_label_and_no_say() {
        let (mut words, truth) = planted(300, 6, 10, 4);
        let usable: Vec<u32> = (0..300).filter(|token| token % 3 != 0).collect();
        let before = run(&words, &usable, 6, 0);
        check_same_partition(&before.labels, &truth);
        words[..WORDS].fill(u64::MAX >> 56);
        let after = run(&words, &usable, 6, 0);
        assert_eq!(before.masks, after.masks);
        assert_eq!(before.labels[1..], after.labels[1..]);
    }
}
