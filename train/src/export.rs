//! Writes `predictor.safetensors`.

use crate::{Dataset, Result};
use np_formats::{PREDICTOR_NAME, PredictorNetwork, PredictorWeights, Projection, TensorFileWriter, predictor_specs};
use std::path::PathBuf;

/// Writes the networks, with the features' statistics and what they were made from, into the dataset's directory. The
/// file appears when it is whole. Returns its path.
pub fn export(dataset: &Dataset, networks: &[(Projection, PredictorNetwork)]) -> Result<PathBuf> {
    let path = dataset.directory.join(PREDICTOR_NAME);
    let named: Vec<_> = networks.iter().map(|(projection, network)| (*projection, network)).collect();
    let specs = predictor_specs(dataset.geometry.hidden, &named);
    let extra = PredictorWeights::extra(dataset.centroids.checksum());
    let mut writer = TensorFileWriter::create(&path, dataset.parent, &extra, specs)?;
    writer.write_values("features.mean", &dataset.mean)?;
    writer.write_values("features.std", &dataset.std)?;
    for (projection, network) in networks {
        let name = |part: &str| format!("{}.{part}", projection.name());
        writer.write_values(&name("hidden.weight"), &network.hidden_weight)?;
        writer.write_values(&name("hidden.bias"), &network.hidden_bias)?;
        writer.write_values(&name("heads.weight"), &network.heads_weight)?;
        writer.write_values(&name("heads.bias"), &network.heads_bias)?;
    }
    writer.finish()?;
    Ok(path)
}
