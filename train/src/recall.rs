//! Neuron recall: how much of the true top K the resulting active sets have. This is what a prediction is for;
//! naming the right centroid is only a way there.

use crate::{Dataset, Error, Result};
use half::bf16;
use np_formats::{Mask, Projection, SeparateTable, TensorDtype, TensorFile, layer_trace_path};
use np_runtime::select::TopK;
use np_runtime::select::score::{argmax, meet, mix_energy, softmax};
use rayon::prelude::*;

/// Held-out tokens that recall is taken over. Times all layers these are enough for three digits.
const SAMPLE_TOKENS_MAX: usize = 512;

/// The tables and true masks that recall is taken from.
pub struct Recall {
    /// Held-out tokens that are looked at, ascending.
    pub sample: Vec<u32>,
    /// Recall of the K neurons of most energy over the calibration text, the same for every token: what a predictor
    /// must beat.
    pub static_recall: f64,
    centroids: usize,
    layers: Vec<Layer>,
}

/// One sparse layer.
struct Layer {
    tables: Tables,
    /// One for each sampled token.
    truth: Vec<Mask>,
    k: usize,
}

enum Tables {
    /// (centroids, neurons): mixed by probability.
    Joint(Vec<bf16>),
    /// Frequencies of the argmax gate and up centroids.
    Separate(SeparateTable),
}

impl Recall {
    /// Reads the tables of `projection` and the sampled tokens' joint masks.
    pub fn open(dataset: &Dataset, projection: Projection) -> Result<Self> {
        let held_out = &dataset.held_out;
        let step = held_out.len().div_ceil(SAMPLE_TOKENS_MAX);
        let sample: Vec<u32> = held_out.iter().step_by(step).copied().collect();
        let mut layers = Vec::new();
        let mut static_recalls = Vec::new();
        for id in 1..dataset.geometry.layers {
            let truth = read_masks(dataset, id, &sample)?;
            let k = truth[0].count();
            let tables = match projection {
                Projection::Joint => Tables::Joint(dataset.centroids.joint(id)?.energy),
                Projection::Separate => Tables::Separate(dataset.centroids.separate(id)?),
            };
            let energy = dataset.centroids.static_energy(id)?;
            let fixed = pick(k, energy.len(), |neuron| energy[neuron]);
            static_recalls.extend(truth.iter().map(|truth| truth.count_and(&fixed) as f64 / k as f64));
            layers.push(Layer { tables, truth, k });
        }
        let centroids = dataset.centroids.count(projection)?;
        Ok(Self { sample, static_recall: average(&static_recalls), centroids, layers })
    }

    /// Recall of the active sets that follow from the sampled tokens' logits (tokens, heads * C).
    pub fn of(&self, logits: &[f32]) -> f64 {
        let outputs = logits.len() / self.sample.len();
        let per_layer = outputs / self.layers.len();
        let tokens = logits.par_chunks_exact(outputs).enumerate();
        let recalls = tokens.flat_map_iter(|(index, logits)| {
            let heads = logits.chunks_exact(per_layer);
            heads.zip(&self.layers).map(move |(heads, layer)| {
                let active = layer.active(heads, self.centroids);
                layer.truth[index].count_and(&active) as f64 / layer.k as f64
            })
        });
        average(&recalls.collect::<Vec<_>>())
    }
}

impl Layer {
    /// The active set that the runtime's `mixture` or `centroid` selector would name at a cold start.
    fn active(&self, heads: &[f32], centroids: usize) -> Mask {
        let neurons = self.truth[0].neurons();
        match &self.tables {
            Tables::Joint(table) => {
                let (mut probabilities, mut energy) = (vec![0.0; centroids], vec![0.0; neurons]);
                softmax(heads, &mut probabilities);
                mix_energy(table, &probabilities, &mut energy);
                // The order of energies is that of half their logarithms.
                pick(self.k, neurons, |neuron| energy[neuron])
            }
            Tables::Separate(table) => {
                let (gate, up) = heads.split_at(centroids);
                let gate = &table.gate_frequency[argmax(gate) * neurons..][..neurons];
                let up = &table.up_frequency[argmax(up) * neurons..][..neurons];
                pick(self.k, neurons, |neuron| meet(gate[neuron], up[neuron]))
            }
        }
    }
}

fn pick(k: usize, neurons: usize, score: impl Fn(usize) -> f32) -> Mask {
    let mut active = Mask::new(neurons);
    TopK::new(neurons).pick(k, score, &mut active);
    active
}

fn average(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The joint masks of the sampled tokens. All have K neurons, which finds most damage without reading the whole trace.
fn read_masks(dataset: &Dataset, layer: usize, sample: &[u32]) -> Result<Vec<Mask>> {
    let path = layer_trace_path(&dataset.directory, layer);
    let remedy = "run `np-prep collect` again";
    let file = TensorFile::open_made_from(&path, dataset.parent).map_err(|error| match error {
        np_formats::Error::Missing { path, .. } => np_formats::Error::Missing { path, remedy },
        other => other,
    })?;
    let (neurons, tensor) = (dataset.geometry.intermediate, "masks.joint");
    let mut words = Mask::new(neurons).words().to_vec();
    file.expect(tensor, TensorDtype::U64, &[dataset.tokens(), words.len()])?;
    let mut masks: Vec<Mask> = Vec::new();
    for &token in sample {
        file.read_at(tensor, u64::from(token) * 8 * words.len() as u64, bytemuck::cast_slice_mut(&mut words))?;
        let whole = |mask: &Mask| mask.count() > 0 && masks.first().is_none_or(|first| first.count() == mask.count());
        let mask = Mask::from_words(neurons, &words).filter(whole).ok_or_else(|| Error::Values {
            path: path.clone(),
            tensor: tensor.into(),
            problem: format!("tokens {} and {token} have masks of different sizes; {remedy}", sample[0]),
        })?;
        masks.push(mask);
    }
    Ok(masks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bf16s(values: &[f32]) -> Vec<bf16> {
        values.iter().copied().map(bf16::from_f32).collect()
    }

    #[track_caller]
    fn check(tables: Tables, centroids: usize, heads: &[f32], expected: &[u32]) {
        let truth = vec![Mask::from_ones(4, expected)];
        let layer = Layer { tables, truth: truth.clone(), k: expected.len() };
        assert_eq!(layer.active(heads, centroids), truth[0]);
        let recall = Recall { sample: vec![9], static_recall: 0.0, centroids, layers: vec![layer] };
        assert_eq!(recall.of(heads), 1.0);
    }

    #[test]
    fn joint_tables_are_mixed_softly() {
        let table = || Tables::Joint(bf16s(&[4.0, 3.0, 0.0, 0.0, 0.0, 0.0, 2.0, 9.0]));
        check(table(), 2, &[20.0, 0.0], &[0, 1]);
        check(table(), 2, &[0.0, 20.0], &[2, 3]);
        // Neither argmax alone: 2, 1.5, 1, 4.5.
        check(table(), 2, &[0.0, 0.0], &[0, 3]);
    }

    #[test]
    fn the_intersection_comes_first() {
        let table = || {
            Tables::Separate(SeparateTable {
                gate_frequency: bf16s(&[0.5, 1.0, 0.25, 0.0, 0.0, 0.0, 1.0, 1.0]),
                up_frequency: bf16s(&[0.5, 0.45, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
            })
        };
        // 0 is in both although 1's product is higher.
        check(table(), 2, &[1.0, 0.0, 1.0, 0.0], &[0]);
        check(table(), 2, &[1.0, 0.0, 1.0, 0.0], &[0, 1]);
        check(table(), 2, &[0.0, 1.0, 1.0, 0.0], &[2, 3]);
    }
}
