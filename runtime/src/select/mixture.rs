//! `mixture`: energy tables, mixed softly.

use super::score::{mix_energy, softmax};
use super::{ActiveSets, Certainty, Point, Selector, SelectorKind, SelectorOptions, TopK, no_network};
use crate::Result;
use crate::predictor::Predictor;
use half::bf16;
use np_formats::{Centroids, Geometry, Mask, PredictorWeights, Projection};

/// Score ½ log Σ_c p_c E\[c\]\[i\] (+ margin for the previous active set), where p is the predictor's softmax over the
/// layer's joint centroids and E\[c\]\[i\] the mean squared importance of neuron i over centroid c's tokens.
///
/// Resident: C·M bf16 values per sparse layer (57 MB for 31 layers of 14,336 neurons and 64 centroids) and the
/// predictor. Cost per token: the predictor, and one pass over the table rows of the probable centroids.
pub struct Mixture {
    predictor: Predictor,
    first: usize,
    k: usize,
    /// What the margin multiplies energy by: half a logarithm of energy is a logarithm of importance.
    bonus: f32,
    centroids: usize,
    /// One (centroids, neurons) table per sparse layer.
    tables: Vec<Vec<bf16>>,
    energy: Vec<f32>,
    probabilities: Vec<f32>,
    top_k: TopK,
}

impl Mixture {
    /// Tables and predictor heads of all sparse layers.
    pub fn new(
        centroids: &Centroids,
        predictor: PredictorWeights,
        geometry: &Geometry,
        options: SelectorOptions,
    ) -> Result<Self> {
        let count = centroids.count(Projection::Joint)?;
        let network = predictor.joint.as_ref().ok_or_else(|| no_network("joint"))?;
        let skipped = (options.dense_layers - 1) * count;
        let predictor = Predictor::new(&predictor, network, geometry, count * (geometry.layers - 1), skipped)?;
        let tables = (options.dense_layers..geometry.layers)
            .map(|layer| Ok(centroids.joint(layer)?.energy))
            .collect::<Result<_>>()?;
        Ok(Self {
            predictor,
            first: options.dense_layers,
            k: options.k,
            bonus: (2.0 * options.margin).exp(),
            centroids: count,
            tables,
            energy: vec![0.0; geometry.intermediate],
            probabilities: vec![0.0; count],
            top_k: TopK::new(geometry.intermediate),
        })
    }
}

impl Selector for Mixture {
    fn kind(&self) -> SelectorKind {
        SelectorKind::Mixture
    }

    fn watches(&self, point: Point) -> bool {
        point == Point::LayerOutput(0)
    }

    fn observe(&mut self, _: Point, residual: &[f32], _: Option<&[f32]>, previous: &[Mask], out: &mut ActiveSets) {
        let logits = self.predictor.logits(residual);
        for (index, table) in self.tables.iter().enumerate() {
            let layer = self.first + index;
            softmax(&logits[index * self.centroids..][..self.centroids], &mut self.probabilities);
            mix_energy(table, &self.probabilities, &mut self.energy);
            let (energy, previous, bonus) = (&self.energy, &previous[layer], self.bonus);
            // Multiplying before the logarithm is adding after it, and the order of energies is that of their logarithms.
            let score = |neuron| energy[neuron] * if previous.contains(neuron as u32) { bonus } else { 1.0 };
            self.top_k.pick(self.k, score, out.name(layer as u16, Certainty::Firm));
        }
    }
}
