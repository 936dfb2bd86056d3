//! One bit per neuron of one layer.

use std::ops::Range;

/// A set of neurons of one layer, as packed bits.
///
/// An activation mask, a centroid, an active set, the incoming and the outgoing neurons are all masks, so that a
/// delta is two operations and sorted order is bit order. Bits past the neuron count are always zero.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mask {
    neurons: usize,
    words: Vec<u64>,
}

/// Neurons that one packed word holds.
pub const MASK_WORD_BITS: usize = 64;

impl Mask {
    /// An empty set over `neurons` neurons.
    pub fn new(neurons: usize) -> Self {
        Self { neurons, words: vec![0; neurons.div_ceil(MASK_WORD_BITS)] }
    }

    /// The set of all `neurons` neurons.
    pub fn full(neurons: usize) -> Self {
        let mut mask = Self::new(neurons);
        mask.fill();
        mask
    }

    /// The set with exactly these members.
    pub fn from_ones(neurons: usize, ones: &[u32]) -> Self {
        let mut mask = Self::new(neurons);
        for &one in ones {
            mask.insert(one);
        }
        mask
    }

    /// The set held in packed words, lowest neuron in the lowest bit. `None` when the word count is wrong or a bit
    /// past the last neuron is set.
    pub fn from_words(neurons: usize, words: &[u64]) -> Option<Self> {
        let mask = Self { neurons, words: words.to_vec() };
        let whole = words.len() == neurons.div_ceil(MASK_WORD_BITS);
        let tail_bits = neurons % MASK_WORD_BITS;
        let clean = tail_bits == 0 || words.last().is_none_or(|last| last >> tail_bits == 0);
        (whole && clean).then_some(mask)
    }

    /// The packed words.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Neurons in the layer, members or not.
    pub fn neurons(&self) -> usize {
        self.neurons
    }

    /// Members.
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether `neuron` is a member.
    pub fn contains(&self, neuron: u32) -> bool {
        assert!((neuron as usize) < self.neurons, "neuron {neuron} of {}", self.neurons);
        self.words[neuron as usize / MASK_WORD_BITS] >> (neuron as usize % MASK_WORD_BITS) & 1 == 1
    }

    /// Adds `neuron`.
    pub fn insert(&mut self, neuron: u32) {
        assert!((neuron as usize) < self.neurons, "neuron {neuron} of {}", self.neurons);
        self.words[neuron as usize / MASK_WORD_BITS] |= 1 << (neuron as usize % MASK_WORD_BITS);
    }

    /// Removes `neuron`.
    pub fn remove(&mut self, neuron: u32) {
        assert!((neuron as usize) < self.neurons, "neuron {neuron} of {}", self.neurons);
        self.words[neuron as usize / MASK_WORD_BITS] &= !(1 << (neuron as usize % MASK_WORD_BITS));
    }

    /// Removes every member.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Adds every neuron.
    pub fn fill(&mut self) {
        self.words.fill(u64::MAX);
        let tail_bits = self.neurons % MASK_WORD_BITS;
        if tail_bits != 0 {
            *self.words.last_mut().expect("a layer with a tail has a word") = (1 << tail_bits) - 1;
        }
    }

    /// Makes this the same set as `other` without allocating.
    pub fn copy_from(&mut self, other: &Mask) {
        self.check(other);
        self.words.copy_from_slice(&other.words);
    }

    /// Members of both.
    pub fn and(&self, other: &Mask) -> Mask {
        self.zip(other, |a, b| a & b)
    }

    /// Members of this and not of `other`.
    pub fn and_not(&self, other: &Mask) -> Mask {
        self.zip(other, |a, b| a & !b)
    }

    /// Members of either.
    pub fn or(&self, other: &Mask) -> Mask {
        self.zip(other, |a, b| a | b)
    }

    /// Makes this the members of `a` that are not in `b`, without allocating.
    pub fn set_and_not(&mut self, a: &Mask, b: &Mask) {
        self.check(a);
        self.check(b);
        for (word, (a, b)) in self.words.iter_mut().zip(a.words.iter().zip(&b.words)) {
            *word = a & !b;
        }
    }

    /// Adds the members of `other`.
    pub fn insert_all(&mut self, other: &Mask) {
        self.check(other);
        for (word, other) in self.words.iter_mut().zip(&other.words) {
            *word |= other;
        }
    }

    /// Members of both, counted without allocating.
    pub fn count_and(&self, other: &Mask) -> usize {
        self.check(other);
        self.words.iter().zip(&other.words).map(|(a, b)| (a & b).count_ones() as usize).sum()
    }

    /// Members of this and not of `other`, counted without allocating.
    pub fn count_and_not(&self, other: &Mask) -> usize {
        self.check(other);
        self.words.iter().zip(&other.words).map(|(a, b)| (a & !b).count_ones() as usize).sum()
    }

    /// Members, ascending.
    pub fn ones(&self) -> impl Iterator<Item = u32> + '_ {
        self.words.iter().enumerate().flat_map(|(index, &word)| {
            let base = (index * MASK_WORD_BITS) as u32;
            std::iter::successors((word != 0).then_some(word), |rest| {
                let rest = rest & (rest - 1);
                (rest != 0).then_some(rest)
            })
            .map(move |rest| base + rest.trailing_zeros())
        })
    }

    /// Maximal runs of consecutive members, ascending.
    pub fn runs(&self) -> Runs<'_> {
        Runs { mask: self, next: 0 }
    }

    fn check(&self, other: &Mask) {
        assert_eq!(self.neurons, other.neurons, "masks of different layers");
    }

    fn zip(&self, other: &Mask, op: impl Fn(u64, u64) -> u64) -> Mask {
        self.check(other);
        let words = self.words.iter().zip(&other.words).map(|(&a, &b)| op(a, b)).collect();
        Mask { neurons: self.neurons, words }
    }

    /// The first member at or after `from`, or the neuron count.
    fn next_one(&self, from: usize) -> usize {
        self.scan(from, |word| word)
    }

    /// The first non-member at or after `from`, or the neuron count.
    fn next_zero(&self, from: usize) -> usize {
        self.scan(from, |word| !word)
    }

    fn scan(&self, from: usize, view: impl Fn(u64) -> u64) -> usize {
        let mut index = from / MASK_WORD_BITS;
        let mut keep = u64::MAX << (from % MASK_WORD_BITS);
        while index < self.words.len() {
            let word = view(self.words[index]) & keep;
            if word != 0 {
                return (index * MASK_WORD_BITS + word.trailing_zeros() as usize).min(self.neurons);
            }
            keep = u64::MAX;
            index += 1;
        }
        self.neurons
    }
}

/// See [`Mask::runs`].
pub struct Runs<'a> {
    mask: &'a Mask,
    next: usize,
}

impl Iterator for Runs<'_> {
    type Item = Range<u32>;

    fn next(&mut self) -> Option<Range<u32>> {
        let start = self.mask.next_one(self.next);
        if start == self.mask.neurons {
            return None;
        }
        self.next = self.mask.next_zero(start);
        Some(start as u32..self.next as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[track_caller]
    fn check_runs(neurons: usize, ones: &[u32], expected: &[Range<u32>]) {
        assert_eq!(Mask::from_ones(neurons, ones).runs().collect::<Vec<_>>(), expected);
    }

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "one range is what is expected")]
    fn runs_join_neighbours() {
        check_runs(16, &[], &[]);
        check_runs(16, &[3, 4, 5, 9], &[3..6, 9..10]);
        check_runs(16, &[0, 15], &[0..1, 15..16]);
        check_runs(130, &[62, 63, 64, 65, 128, 129], &[62..66, 128..130]);
        check_runs(128, &(0..128).collect::<Vec<_>>(), &[0..128]);
    }

    #[test]
    fn full_has_no_bit_past_the_last_neuron() {
        for neurons in [1, 63, 64, 65, 1536] {
            assert_eq!(Mask::full(neurons).count(), neurons);
        }
    }

    #[test]
    fn words_with_a_bit_past_the_end_are_refused() {
        assert_eq!(Mask::from_words(3, &[0b101]), Some(Mask::from_ones(3, &[0, 2])));
        assert_eq!(Mask::from_words(3, &[0b1000]), None);
        assert_eq!(Mask::from_words(3, &[]), None);
        assert_eq!(Mask::from_words(64, &[u64::MAX]).map(|mask| mask.count()), Some(64));
    }

    fn sets() -> impl Strategy<Value = (BTreeSet<u32>, BTreeSet<u32>)> {
        let set = || proptest::collection::btree_set(0u32..200, 0..120);
        (set(), set())
    }

    proptest! {
        #[test]
        fn operations_agree_with_a_set((a, b) in sets()) {
            let mask = |set: &BTreeSet<u32>| Mask::from_ones(200, &set.iter().copied().collect::<Vec<_>>());
            let (left, right) = (mask(&a), mask(&b));
            prop_assert_eq!(left.and(&right), mask(&(&a & &b)));
            prop_assert_eq!(left.or(&right), mask(&(&a | &b)));
            prop_assert_eq!(left.and_not(&right), mask(&(&a - &b)));
            prop_assert_eq!(left.count_and(&right), (&a & &b).len());
            prop_assert_eq!(left.count_and_not(&right), (&a - &b).len());
            prop_assert_eq!(left.ones().collect::<Vec<_>>(), a.iter().copied().collect::<Vec<_>>());
            let from_runs: BTreeSet<u32> = left.runs().flatten().collect();
            prop_assert_eq!(from_runs, a);
        }
    }
}
