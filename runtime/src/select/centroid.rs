//! `centroid`: the paper's rule, as a faithful baseline.

use super::score::{argmax, meet};
use super::{ActiveSets, Certainty, Point, Selector, SelectorKind, SelectorOptions, TopK, no_network};
use crate::Result;
use crate::predictor::Predictor;
use np_formats::{Centroids, Geometry, Mask, PredictorWeights, Projection, SeparateTable};

/// The argmax gate centroid and the argmax up centroid of each layer: their intersection first, each part in the order
/// of log f_gate + log f_up (+ margin for the previous active set), trimmed or filled to exactly K.
///
/// Resident: 2·C·M bf16 frequencies per sparse layer and the predictor. Cost per token: the predictor.
pub struct Centroid {
    predictor: Predictor,
    first: usize,
    k: usize,
    bonus: f32,
    centroids: usize,
    tables: Vec<SeparateTable>,
    top_k: TopK,
}

impl Centroid {
    /// Tables and predictor heads of all sparse layers.
    pub fn new(
        centroids: &Centroids,
        predictor: PredictorWeights,
        geometry: &Geometry,
        options: SelectorOptions,
    ) -> Result<Self> {
        let count = centroids.count(Projection::Separate)?;
        let network = predictor.separate.as_ref().ok_or_else(|| no_network("separate"))?;
        let skipped = (options.dense_layers - 1) * 2 * count;
        let outputs = 2 * count * (geometry.layers - 1);
        let predictor = Predictor::new(&predictor, network, geometry, outputs, skipped)?;
        let tables = (options.dense_layers..geometry.layers)
            .map(|layer| Ok(centroids.separate(layer)?))
            .collect::<Result<_>>()?;
        Ok(Self {
            predictor,
            first: options.dense_layers,
            k: options.k,
            bonus: options.margin.exp(),
            centroids: count,
            tables,
            top_k: TopK::new(geometry.intermediate),
        })
    }
}

impl Selector for Centroid {
    fn kind(&self) -> SelectorKind {
        SelectorKind::Centroid
    }

    fn watches(&self, point: Point) -> bool {
        point == Point::LayerOutput(0)
    }

    fn observe(&mut self, _: Point, residual: &[f32], _: Option<&[f32]>, previous: &[Mask], out: &mut ActiveSets) {
        let logits = self.predictor.logits(residual);
        for (index, table) in self.tables.iter().enumerate() {
            let layer = self.first + index;
            let heads = &logits[index * 2 * self.centroids..][..2 * self.centroids];
            let (gate_logits, up_logits) = heads.split_at(self.centroids);
            let previous = &previous[layer];
            let neurons = previous.neurons();
            let gate = &table.gate_frequency[argmax(gate_logits) * neurons..][..neurons];
            let up = &table.up_frequency[argmax(up_logits) * neurons..][..neurons];
            let bonus = self.bonus;
            let score = |neuron: usize| {
                meet(gate[neuron], up[neuron]) * if previous.contains(neuron as u32) { bonus } else { 1.0 }
            };
            self.top_k.pick(self.k, score, out.name(layer as u16, Certainty::Firm));
        }
    }
}
