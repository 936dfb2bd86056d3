//! `predictor.safetensors`: the small network that names centroids from the first layer's output.
//!
//! For a residual stream `h` after layer 0: `x = clip((h / rms(h) − mean) / std, ±6)`,
//! `z = silu(hidden.weight · x + hidden.bias)`, `logits = heads.weight · z + heads.bias`, one softmax per layer 1 and up
//! (joint), or one for gate and then one for up per layer (separate).

use crate::error::Result;
use crate::{CENTROIDS_NAME, Error, Fingerprint, Projection, TensorDtype, TensorFile, TensorSpec};
use std::path::Path;

/// Name of the file in an artifact directory.
pub const PREDICTOR_NAME: &str = "predictor.safetensors";
/// Standardised features are clipped to plus and minus this.
pub const FEATURE_CLIP: f32 = 6.0;

const CENTROIDS_KEY: &str = "np.centroids";

/// One trained network.
#[derive(Clone, PartialEq, Debug)]
pub struct PredictorNetwork {
    /// Width of the hidden layer.
    pub width: usize,
    /// Logits of all heads together.
    pub outputs: usize,
    /// (width, hidden).
    pub hidden_weight: Vec<f32>,
    /// (width).
    pub hidden_bias: Vec<f32>,
    /// (outputs, width).
    pub heads_weight: Vec<f32>,
    /// (outputs).
    pub heads_bias: Vec<f32>,
}

/// The features' statistics and the networks that are there.
#[derive(Clone, PartialEq, Debug)]
pub struct PredictorWeights {
    /// (hidden): mean of the normalised features.
    pub mean: Vec<f32>,
    /// (hidden): their standard deviation.
    pub std: Vec<f32>,
    /// Names joint centroids.
    pub joint: Option<PredictorNetwork>,
    /// Names gate and up centroids.
    pub separate: Option<PredictorNetwork>,
}

impl PredictorWeights {
    /// Reads the predictor of `directory`, which must belong to `parent` and to the vocabulary with checksum
    /// `centroids`.
    pub fn read(directory: &Path, hidden: usize, parent: Fingerprint, centroids: Option<Fingerprint>) -> Result<Self> {
        let path = directory.join(PREDICTOR_NAME);
        let file = match TensorFile::open_made_from(&path, parent) {
            Err(Error::Missing { path, .. }) => {
                return Err(Error::Missing { path, remedy: "run `np-train predictor` first" });
            }
            other => other?,
        };
        file.verify()?;
        let expected = centroids.map_or("no known".into(), |checksum| checksum.to_string());
        let found = file.extra(CENTROIDS_KEY).unwrap_or("no known").to_string();
        if found != expected {
            let (found, expected) = (format!("{found} {CENTROIDS_NAME}"), format!("{expected} {CENTROIDS_NAME}"));
            let remedy = "run `np-train predictor` again";
            return Err(Error::Foreign { path, found, expected, remedy });
        }
        Ok(Self {
            mean: file.read("features.mean", TensorDtype::F32, &[hidden])?,
            std: file.read("features.std", TensorDtype::F32, &[hidden])?,
            joint: network(&file, Projection::Joint, hidden)?,
            separate: network(&file, Projection::Separate, hidden)?,
        })
    }

    /// Entries for the file's free-form header that tie it to its vocabulary.
    pub fn extra(centroids: Option<Fingerprint>) -> Vec<(&'static str, String)> {
        centroids.map(|checksum| (CENTROIDS_KEY, checksum.to_string())).into_iter().collect()
    }
}

/// Tensors of the file, in order.
pub fn predictor_specs(hidden: usize, networks: &[(Projection, &PredictorNetwork)]) -> Vec<TensorSpec> {
    let mut specs = vec![
        TensorSpec::new("features.mean", TensorDtype::F32, &[hidden]),
        TensorSpec::new("features.std", TensorDtype::F32, &[hidden]),
    ];
    for (projection, network) in networks {
        let mut add = |name: &str, shape: &[usize]| {
            specs.push(TensorSpec::new(format!("{}.{name}", projection.name()), TensorDtype::F32, shape));
        };
        add("hidden.weight", &[network.width, hidden]);
        add("hidden.bias", &[network.width]);
        add("heads.weight", &[network.outputs, network.width]);
        add("heads.bias", &[network.outputs]);
    }
    specs
}

fn network(file: &TensorFile, projection: Projection, hidden: usize) -> Result<Option<PredictorNetwork>> {
    let name = |part: &str| format!("{}.{part}", projection.name());
    let Some(heads) = file.spec(&name("heads.weight")) else {
        return Ok(None);
    };
    let (outputs, width) = match heads.shape[..] {
        [outputs, width] => (outputs, width),
        _ => (0, 0),
    };
    let read = |part: &str, shape: &[usize]| file.read::<f32>(&name(part), TensorDtype::F32, shape);
    Ok(Some(PredictorNetwork {
        width,
        outputs,
        hidden_weight: read("hidden.weight", &[width, hidden])?,
        hidden_bias: read("hidden.bias", &[width])?,
        heads_weight: read("heads.weight", &[outputs, width])?,
        heads_bias: read("heads.bias", &[outputs])?,
    }))
}
