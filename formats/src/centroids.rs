//! `centroids.safetensors`: the vocabulary of masks, and what the selectors need beside it.

use crate::error::Result;
use crate::{Error, Fingerprint, Geometry, MASK_WORD_BITS, TensorDtype, TensorFile, TensorSpec};
use half::bf16;
use std::path::Path;

/// Name of the file in an artifact directory.
pub const CENTROIDS_NAME: &str = "centroids.safetensors";

/// What was clustered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Projection {
    /// Masks of the whole neuron's importance.
    Joint,
    /// Masks of the gate and of the up projection, apart: the paper's.
    Separate,
}

impl Projection {
    /// Prefix of its tensors.
    pub fn name(self) -> &'static str {
        match self {
            Self::Joint => "joint",
            Self::Separate => "separate",
        }
    }
}

/// Joint centroids of one layer.
pub struct JointTable {
    /// (centroids, neurons): mean squared importance over the centroid's tokens.
    pub energy: Vec<bf16>,
}

/// Gate and up centroids of one layer.
pub struct SeparateTable {
    /// (centroids, neurons): share of the gate centroid's tokens whose gate mask has the neuron.
    pub gate_frequency: Vec<bf16>,
    /// (centroids, neurons): the same of up.
    pub up_frequency: Vec<bf16>,
}

/// What selectors read of the vocabulary, layer by layer. Layer 0 has none: its output is what predicts the others.
pub struct Centroids {
    file: TensorFile,
    neurons: usize,
}

impl Centroids {
    /// Opens the vocabulary of `directory`, which must belong to `parent`.
    pub fn open(directory: &Path, geometry: &Geometry, parent: Fingerprint) -> Result<Self> {
        let path = directory.join(CENTROIDS_NAME);
        let file = match TensorFile::open_made_from(&path, parent) {
            Err(Error::Missing { path, .. }) => {
                return Err(Error::Missing {
                    path,
                    remedy: "run `np-prep collect` and `np-prep build-centroids` first",
                });
            }
            other => other?,
        };
        file.verify()?;
        Ok(Self { file, neurons: geometry.intermediate })
    }

    /// The file's checksum: what a predictor of these centroids carries.
    pub fn checksum(&self) -> Option<Fingerprint> {
        self.file.checksum()
    }

    /// Centroids per layer and projection.
    pub fn count(&self, projection: Projection) -> Result<usize> {
        let name = match projection {
            Projection::Joint => "layers.1.joint.energy",
            Projection::Separate => "layers.1.gate.frequency",
        };
        let spec = self.file.spec(name).ok_or_else(|| Error::Tensor {
            path: self.file.path().into(),
            tensor: name.into(),
            problem: format!("is missing; run `np-prep build-centroids --projection {}`", projection.name()),
        })?;
        Ok(spec.shape.first().copied().unwrap_or(0))
    }

    /// Mean squared importance of each neuron of `layer`.
    pub fn static_energy(&self, layer: usize) -> Result<Vec<f32>> {
        self.file.read(&format!("layers.{layer}.static.energy"), TensorDtype::F32, &[self.neurons])
    }

    /// Energy tables of `layer`.
    pub fn joint(&self, layer: usize) -> Result<JointTable> {
        let count = self.count(Projection::Joint)?;
        Ok(JointTable { energy: self.table(&format!("layers.{layer}.joint.energy"), count)? })
    }

    /// Frequency tables of `layer`.
    pub fn separate(&self, layer: usize) -> Result<SeparateTable> {
        let count = self.count(Projection::Separate)?;
        Ok(SeparateTable {
            gate_frequency: self.table(&format!("layers.{layer}.gate.frequency"), count)?,
            up_frequency: self.table(&format!("layers.{layer}.up.frequency"), count)?,
        })
    }

    fn table(&self, name: &str, count: usize) -> Result<Vec<bf16>> {
        self.file.read(name, TensorDtype::BF16, &[count, self.neurons])
    }
}

/// Tensors of one layer, in file order. `joint` and `separate` are the centroid counts, where that projection is there.
pub fn centroid_specs(layer: usize, neurons: usize, joint: Option<usize>, separate: Option<usize>) -> Vec<TensorSpec> {
    let words = neurons.div_ceil(MASK_WORD_BITS);
    let mut specs = vec![TensorSpec::new(format!("layers.{layer}.static.energy"), TensorDtype::F32, &[neurons])];
    let mut add = |name: &str, dtype, shape: [usize; 2]| {
        specs.push(TensorSpec::new(format!("layers.{layer}.{name}"), dtype, &shape));
    };
    if let Some(count) = joint {
        add("joint.energy", TensorDtype::BF16, [count, neurons]);
        add("joint.masks", TensorDtype::U64, [count, words]);
    }
    if let Some(count) = separate {
        add("gate.frequency", TensorDtype::BF16, [count, neurons]);
        add("gate.masks", TensorDtype::U64, [count, words]);
        add("up.frequency", TensorDtype::BF16, [count, neurons]);
        add("up.masks", TensorDtype::U64, [count, words]);
    }
    specs
}
