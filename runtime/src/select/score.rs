//! The scores of the rules, without the engine around them: training measures recall with the same ones.

use half::bf16;

/// A centroid with less probability than this does not enter the mixture: it could move a score by 0.0005 nats where
/// tables are alike, and leaving it out saves a pass over a table row.
const PROBABILITY_MIN: f32 = 1e-3;
/// Keeps a score finite where all tables are zero.
const ENERGY_MIN: f32 = 1e-30;
/// A neuron is a member of a centroid from this frequency on.
const MEMBER_FREQUENCY: f32 = 0.5;
/// Puts neurons outside the intersection behind all neurons inside it: two frequencies with one pseudo-count over fewer
/// than a million tokens multiply to more than this.
const OUTSIDE: f32 = 1e-12;

/// Writes into `energy` (neurons) the mean squared importance that `table` (centroids, neurons) gives under
/// `probabilities` (centroids). Half its logarithm is the score of `mixture`.
pub fn mix_energy(table: &[bf16], probabilities: &[f32], energy: &mut [f32]) {
    energy.fill(ENERGY_MIN);
    let rows = table.chunks_exact(energy.len());
    for (row, &probability) in rows.zip(probabilities).filter(|(_, p)| **p >= PROBABILITY_MIN) {
        for (energy, value) in energy.iter_mut().zip(row) {
            *energy += probability * widen(*value);
        }
    }
}

/// The exponential of the score of `centroid` for a neuron with these frequencies in the gate and the up centroid: their
/// product, with the intersection of the two masks before all else.
pub fn meet(gate: bf16, up: bf16) -> f32 {
    let (gate, up) = (widen(gate), widen(up));
    let inside = gate >= MEMBER_FREQUENCY && up >= MEMBER_FREQUENCY;
    gate * up * if inside { 1.0 } else { OUTSIDE }
}

/// Writes the probabilities of `logits`.
pub fn softmax(logits: &[f32], probabilities: &mut [f32]) {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for (probability, logit) in probabilities.iter_mut().zip(logits) {
        *probability = (logit - highest).exp();
        sum += *probability;
    }
    probabilities.iter_mut().for_each(|probability| *probability /= sum);
}

/// Index of the highest logit, the first of equals.
pub fn argmax(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, index| if logits[index] > logits[best] { index } else { best })
}

/// The half crate's own conversion tests for NaN, which keeps loops from being vectorised; tables hold none.
fn widen(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bf16s(values: &[f32]) -> Vec<bf16> {
        values.iter().copied().map(bf16::from_f32).collect()
    }

    #[test]
    fn tables_are_mixed_softly() {
        let table = bf16s(&[4.0, 3.0, 0.0, 0.0, 0.0, 0.0, 2.0, 9.0]);
        let mut energy = [0.0; 4];
        mix_energy(&table, &[0.5, 0.5], &mut energy);
        assert_eq!(energy, [2.0, 1.5, 1.0, 4.5]);
        mix_energy(&table, &[1.0, 0.0], &mut energy);
        assert_eq!(energy, [4.0, 3.0, ENERGY_MIN, ENERGY_MIN]);
    }

    #[test]
    fn the_intersection_comes_first() {
        let score = |gate, up| meet(bf16::from_f32(gate), bf16::from_f32(up));
        assert!(score(0.5, 0.5) > score(1.0, 0.45), "although the product is lower");
        assert!(score(0.5, 0.75) > score(0.5, 0.5));
        assert!(score(1.0, 0.45) > score(0.5, 0.25));
    }

    #[test]
    fn softmax_is_stable() {
        let mut probabilities = [0.0; 2];
        softmax(&[1000.0, 1000.0], &mut probabilities);
        assert_eq!(probabilities, [0.5, 0.5]);
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
    }
}
