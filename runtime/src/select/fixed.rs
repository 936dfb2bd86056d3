//! `static`: the best fixed set.

use super::{ActiveSets, Certainty, Point, Selector, SelectorKind, SelectorOptions, TopK};
use crate::Result;
use np_formats::{Centroids, Geometry, Mask};

/// The K neurons of highest ½ log E\[I²\] over the calibration text, for every token the same.
///
/// No I/O after the first token. Resident: K ids per layer. Cost per token: none.
pub struct Static {
    first: u16,
    sets: Vec<Mask>,
}

impl Static {
    /// The sets of all sparse layers.
    pub fn new(centroids: &Centroids, geometry: &Geometry, options: SelectorOptions) -> Result<Self> {
        let mut top_k = TopK::new(geometry.intermediate);
        let mut sets = Vec::new();
        for layer in options.dense_layers..geometry.layers {
            let energy = centroids.static_energy(layer)?;
            let mut set = Mask::new(geometry.intermediate);
            top_k.pick(options.k, |neuron| energy[neuron], &mut set);
            sets.push(set);
        }
        Ok(Self { first: options.dense_layers as u16, sets })
    }

    /// Every neuron of every sparse layer.
    pub fn full(geometry: &Geometry, options: SelectorOptions) -> Self {
        let sparse = geometry.layers - options.dense_layers;
        Self { first: options.dense_layers as u16, sets: vec![Mask::full(geometry.intermediate); sparse] }
    }
}

impl Selector for Static {
    fn kind(&self) -> SelectorKind {
        SelectorKind::Static
    }

    fn watches(&self, point: Point) -> bool {
        point == Point::LayerOutput(0)
    }

    fn observe(&mut self, _: Point, _: &[f32], _: Option<&[f32]>, _: &[Mask], out: &mut ActiveSets) {
        for (index, set) in self.sets.iter().enumerate() {
            out.name(self.first + index as u16, Certainty::Firm).copy_from(set);
        }
    }
}
