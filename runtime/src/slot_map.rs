//! Which neuron's row lies in which slot: the only mutable bookkeeping of the engine.

use np_formats::Mask;

/// The slot of a neuron that has none.
pub const NO_SLOT: i32 = -1;

/// Use counts shrink by this factor per token; measured on recorded traces, 13 to 22 % fewer misses than
/// least-recently-used.
const USE_DECAY: f32 = 0.97;
/// Use weights are scaled back before they could overflow: 0.97^-2000 is 3e26, far from the largest f32.
const RESCALE_TOKENS: u32 = 2_000;

/// Neuron → slot and back for one layer, the free slots, and what eviction needs.
///
/// Capacity may exceed the active set: rows that are no longer active stay until their slots are needed, and the
/// least frequently used go first. Slots never move while a row is resident.
#[derive(Clone, Debug)]
pub struct SlotMap {
    slot_of: Vec<i32>,
    capacity: usize,
    free: Vec<u32>,
    resident: Mask,
    uses: Vec<f32>,
    use_weight: f32,
    tokens: u32,
    leavers: Vec<u32>,
}

impl SlotMap {
    /// An empty map for a layer of `neurons` neurons with `capacity` slots.
    pub fn new(neurons: usize, capacity: usize) -> Self {
        assert!(capacity <= neurons, "{capacity} slots for {neurons} neurons");
        let mut map = Self {
            slot_of: vec![NO_SLOT; neurons],
            capacity,
            free: Vec::with_capacity(capacity),
            resident: Mask::new(neurons),
            uses: vec![0.0; neurons],
            use_weight: 1.0,
            tokens: 0,
            leavers: Vec::with_capacity(neurons),
        };
        map.clear();
        map
    }

    /// Forgets every row. What was known of use stays.
    pub fn clear(&mut self) {
        self.slot_of.fill(NO_SLOT);
        self.resident.clear();
        self.free.clear();
        // Popped from the end, so that an empty map fills its slots in ascending order.
        self.free.extend((0..self.capacity as u32).rev());
    }

    /// Slots.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Neurons that have a slot.
    pub fn resident(&self) -> &Mask {
        &self.resident
    }

    /// Slot of each neuron, or [`NO_SLOT`].
    pub fn slot_of(&self) -> &[i32] {
        &self.slot_of
    }

    /// Gives every neuron of `active` a slot and writes those that had none into `incoming`: their rows must be read
    /// before the layer computes. Rows that are not active lose their slots as far as these are needed.
    pub fn advance(&mut self, active: &Mask, incoming: &mut Mask) {
        assert!(active.count() <= self.capacity(), "{} active, {} slots", active.count(), self.capacity());
        incoming.set_and_not(active, &self.resident);
        self.note_uses(active);
        let wanted = incoming.count();
        if self.free.len() < wanted {
            self.evict(active, wanted - self.free.len());
        }
        for neuron in incoming.ones() {
            let slot = self.free.pop().expect("eviction made room");
            self.slot_of[neuron as usize] = slot as i32;
        }
        self.resident.insert_all(incoming);
    }

    /// Takes `count` slots from resident rows outside `active`.
    fn evict(&mut self, active: &Mask, count: usize) {
        self.leavers.clear();
        self.leavers.extend(self.resident.ones().filter(|&neuron| !active.contains(neuron)));
        assert!(count <= self.leavers.len(), "{count} slots to free, {} rows may leave", self.leavers.len());
        if count < self.leavers.len() {
            let uses = &self.uses;
            // Ties go by neuron, so that the same tokens always give the same slots.
            self.leavers
                .select_nth_unstable_by(count, |&a, &b| uses[a as usize].total_cmp(&uses[b as usize]).then(a.cmp(&b)));
            self.leavers.truncate(count);
        }
        // Highest slot first, so that the lowest is given out first.
        let slot_of = &self.slot_of;
        self.leavers.sort_unstable_by_key(|&neuron| std::cmp::Reverse(slot_of[neuron as usize]));
        for &neuron in &self.leavers {
            let slot = std::mem::replace(&mut self.slot_of[neuron as usize], NO_SLOT);
            self.free.push(slot as u32);
            self.resident.remove(neuron);
        }
    }

    /// Counts a use of each active neuron. Weights grow instead of all counts shrinking, which is the same order.
    fn note_uses(&mut self, active: &Mask) {
        self.use_weight /= USE_DECAY;
        self.tokens += 1;
        if self.tokens == RESCALE_TOKENS {
            self.uses.iter_mut().for_each(|uses| *uses /= self.use_weight);
            self.use_weight = 1.0;
            self.tokens = 0;
        }
        for neuron in active.ones() {
            self.uses[neuron as usize] += self.use_weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const NEURONS: usize = 80;
    const ACTIVE: usize = 20;

    #[track_caller]
    fn check_consistent(map: &SlotMap) {
        let resident: Vec<u32> = map.resident().ones().collect();
        let mut taken: BTreeSet<i32> = map.free.iter().map(|&slot| slot as i32).collect();
        assert!(taken.len() == map.free.len(), "a slot is free twice");
        for neuron in 0..NEURONS as u32 {
            let slot = map.slot_of()[neuron as usize];
            assert_eq!(slot != NO_SLOT, map.resident().contains(neuron), "neuron {neuron}");
            assert!(slot == NO_SLOT || taken.insert(slot), "slot {slot} has two neurons");
        }
        assert_eq!(resident.len() + map.free.len(), map.capacity());
    }

    fn active_sets() -> impl Strategy<Value = Vec<BTreeSet<u32>>> {
        let neurons: Vec<u32> = (0..NEURONS as u32).collect();
        let set = proptest::sample::subsequence(neurons, ACTIVE);
        proptest::collection::vec(set.prop_map(BTreeSet::from_iter), 1..40)
    }

    proptest! {
        #[test]
        fn advance_agrees_with_sets(tokens in active_sets(), slack in 0usize..30) {
            let mut map = SlotMap::new(NEURONS, ACTIVE + slack);
            let mut incoming = Mask::new(NEURONS);
            for active in tokens {
                let before: BTreeSet<u32> = map.resident().ones().collect();
                let slots_before = map.slot_of().to_vec();
                let mask = Mask::from_ones(NEURONS, &active.iter().copied().collect::<Vec<_>>());
                map.advance(&mask, &mut incoming);
                check_consistent(&map);
                let expected: BTreeSet<u32> = &active - &before;
                prop_assert_eq!(incoming.ones().collect::<BTreeSet<_>>(), expected.clone());
                let after: BTreeSet<u32> = map.resident().ones().collect();
                prop_assert!(active.is_subset(&after));
                prop_assert!(after.len() <= map.capacity());
                prop_assert!(after.is_subset(&(&before | &active)));
                // No more leave than must.
                let must_leave = (before.len() + expected.len()).saturating_sub(map.capacity());
                prop_assert_eq!((&before - &after).len(), must_leave);
                for neuron in &before & &after {
                    prop_assert_eq!(map.slot_of()[neuron as usize], slots_before[neuron as usize]);
                }
            }
        }
    }

    #[test]
    fn the_least_frequently_used_leave_first() {
        let mut map = SlotMap::new(NEURONS, 3);
        let mut incoming = Mask::new(NEURONS);
        for active in [[1u32, 2].as_slice(), &[1, 3], &[1, 2], &[4]] {
            map.advance(&Mask::from_ones(NEURONS, active), &mut incoming);
        }
        assert_eq!(map.resident().ones().collect::<Vec<_>>(), [1, 2, 4]);
    }

    #[test]
    fn a_full_layer_has_identity_slots() {
        let mut map = SlotMap::new(NEURONS, NEURONS);
        let mut incoming = Mask::new(NEURONS);
        map.advance(&Mask::full(NEURONS), &mut incoming);
        assert!(map.slot_of().iter().enumerate().all(|(neuron, &slot)| slot == neuron as i32));
        assert_eq!(incoming, Mask::full(NEURONS));
    }

    #[test]
    fn use_counts_are_scaled_back_and_keep_their_order() {
        let mut map = SlotMap::new(NEURONS, 2);
        let mut incoming = Mask::new(NEURONS);
        for token in 0..3 * RESCALE_TOKENS {
            let often = Mask::from_ones(NEURONS, if token % 4 == 0 { &[6] } else { &[5] });
            map.advance(&often, &mut incoming);
        }
        map.advance(&Mask::from_ones(NEURONS, &[7]), &mut incoming);
        assert_eq!(map.resident().ones().collect::<Vec<_>>(), [5, 7]);
        assert!(map.uses.iter().all(|uses| uses.is_finite()));
    }
}
