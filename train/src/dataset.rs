//! What the predictor learns from: features of tokens, and the centroids that their masks fell to.

use crate::{Error, Result};
use np_formats::{
    CENTROIDS_NAME, Centroids, FEATURE_CLIP, Features, Fingerprint, Geometry, Manifest, Projection, TensorDtype,
    TensorFile, VOCABULARY_KEY, features_path, labels_path,
};
use rayon::prelude::*;
use std::path::{Path, PathBuf};

/// One sequence in this many is held out, and they are the last.
const HELD_OUT_SHARE: usize = 10;
/// A feature that never changes has this deviation, so that it stays zero and not infinite.
const STD_MIN: f64 = 1e-6;

/// Features of all tokens, standardised and clipped, and which tokens train and which try.
pub struct Dataset {
    /// The artifact directory.
    pub directory: PathBuf,
    /// Its model's sizes.
    pub geometry: Geometry,
    /// What the predictor is made from.
    pub parent: Fingerprint,
    /// The vocabulary.
    pub centroids: Centroids,
    /// (T, H), standardised and clipped.
    pub features: Vec<f32>,
    /// (H): mean over the training tokens.
    pub mean: Vec<f32>,
    /// (H): deviation over the training tokens.
    pub std: Vec<f32>,
    /// Tokens to train on, ascending. The first of a sequence is in neither list.
    pub train: Vec<u32>,
    /// Tokens to try on, ascending.
    pub held_out: Vec<u32>,
    labels: TensorFile,
}

/// The centroids of all tokens in one projection.
pub struct Labels {
    /// Heads: layers 1 and up; for separate, gate and then up of each.
    pub heads: usize,
    /// Centroids of each head.
    pub centroids: usize,
    /// (T, heads)
    pub values: Vec<u16>,
}

impl Dataset {
    /// Opens an artifact directory whose vocabulary has been built.
    pub fn open(directory: &Path) -> Result<Self> {
        let manifest = Manifest::open(directory)?;
        let (geometry, parent) = (manifest.geometry, manifest.fingerprint);
        let centroids = Centroids::open(directory, &geometry, parent)?;
        let labels = open_labels(directory, parent)?;
        let path = features_path(directory);
        let Features { values: mut features, sequence_starts, .. } =
            Features::read(directory, geometry.hidden, parent)?;
        TensorFile::open_made_from(&path, parent)?.verify()?;
        let tokens = features.len() / geometry.hidden;
        let (train, held_out) = split(tokens, &sequence_starts);
        if train.is_empty() || held_out.is_empty() {
            return Err(Error::TooFewTokens { path, tokens: train.len() + held_out.len() });
        }
        let (mean, std) = moments(&features, geometry.hidden, &train);
        standardise(&mut features, &mean, &std);
        let directory = directory.into();
        Ok(Self { directory, geometry, parent, centroids, features, mean, std, train, held_out, labels })
    }

    /// Tokens (T).
    pub fn tokens(&self) -> usize {
        self.features.len() / self.geometry.hidden
    }

    /// Projections that have been clustered.
    pub fn projections(&self) -> Result<Vec<Projection>> {
        let there = |projection: &Projection| self.labels.spec(&label_names(*projection, 1)[0]).is_some();
        let found: Vec<_> = [Projection::Joint, Projection::Separate].into_iter().filter(there).collect();
        if found.is_empty() { Err(Error::NoLabels { path: self.labels.path().into() }) } else { Ok(found) }
    }

    /// The labels of one projection.
    pub fn labels(&self, projection: Projection) -> Result<Labels> {
        let centroids = self.centroids.count(projection)?;
        let names: Vec<String> = (1..self.geometry.layers).flat_map(|layer| label_names(projection, layer)).collect();
        let (tokens, heads) = (self.tokens(), names.len());
        let mut values = vec![0; tokens * heads];
        for (head, name) in names.iter().enumerate() {
            let column: Vec<u16> = self.labels.read(name, TensorDtype::U16, &[tokens])?;
            if let Some(label) = column.iter().find(|label| usize::from(**label) >= centroids) {
                let problem = format!(
                    "label {label}, where there are {centroids} centroids; run `np-prep build-centroids` again"
                );
                return Err(Error::Values { path: self.labels.path().into(), tensor: name.clone(), problem });
            }
            values[head..].iter_mut().step_by(heads).zip(column).for_each(|(value, label)| *value = label);
        }
        Ok(Labels { heads, centroids, values })
    }

    /// Features (tokens, H) of some tokens, in their order.
    pub fn gather(&self, tokens: &[u32]) -> Vec<f32> {
        let hidden = self.geometry.hidden;
        tokens.iter().flat_map(|&token| &self.features[token as usize * hidden..][..hidden]).copied().collect()
    }
}

impl Labels {
    /// Labels (tokens, heads) of some tokens, in their order, as burn wants them.
    pub fn gather(&self, tokens: &[u32]) -> Vec<i64> {
        tokens.iter().flat_map(|&token| self.row(token)).map(|&label| i64::from(label)).collect()
    }

    /// Labels (heads) of one token.
    pub fn row(&self, token: u32) -> &[u16] {
        &self.values[token as usize * self.heads..][..self.heads]
    }
}

fn label_names(projection: Projection, layer: usize) -> Vec<String> {
    let parts: &[&str] = match projection {
        Projection::Joint => &["joint"],
        Projection::Separate => &["gate", "up"],
    };
    parts.iter().map(|part| format!("layers.{layer}.{part}")).collect()
}

fn open_labels(directory: &Path, parent: Fingerprint) -> Result<TensorFile> {
    let remedy = "run `np-prep build-centroids` first";
    let labels = TensorFile::open_made_from(&labels_path(directory), parent).map_err(|error| match error {
        np_formats::Error::Missing { path, .. } => np_formats::Error::Missing { path, remedy },
        other => other,
    })?;
    labels.verify()?;
    let centroids = TensorFile::open_made_from(&directory.join(CENTROIDS_NAME), parent)?;
    if labels.extra(VOCABULARY_KEY) != centroids.extra(VOCABULARY_KEY) {
        return Err(Error::TwoBuilds { labels: labels.path().into(), centroids: centroids.path().into() });
    }
    Ok(labels)
}

/// Usable tokens to train and to try on: whole sequences apart, since neighbours are too much alike. One sequence alone
/// is cut.
fn split(tokens: usize, sequence_starts: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let usable: Vec<u32> = (0..tokens as u32).filter(|token| sequence_starts.binary_search(token).is_err()).collect();
    let cut = match sequence_starts.len() {
        0 | 1 => usable.len() - usable.len() / HELD_OUT_SHARE,
        sequences => {
            let first = sequence_starts[sequences - sequences.div_ceil(HELD_OUT_SHARE)];
            usable.partition_point(|&token| token < first)
        }
    };
    let (train, held_out) = usable.split_at(cut);
    (train.to_vec(), held_out.to_vec())
}

/// Mean and deviation (H) over some tokens.
fn moments(features: &[f32], hidden: usize, tokens: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let mut sums = vec![[0.0f64; 2]; hidden];
    for &token in tokens {
        for ([sum, squares], &value) in sums.iter_mut().zip(&features[token as usize * hidden..][..hidden]) {
            *sum += f64::from(value);
            *squares += f64::from(value).powi(2);
        }
    }
    let count = tokens.len() as f64;
    let moments = sums.into_iter().map(|[sum, squares]| {
        let mean = sum / count;
        (mean as f32, (squares / count - mean * mean).max(0.0).sqrt().max(STD_MIN) as f32)
    });
    moments.unzip()
}

fn standardise(features: &mut [f32], mean: &[f32], std: &[f32]) {
    features.par_chunks_exact_mut(mean.len()).for_each(|row| {
        for ((value, mean), std) in row.iter_mut().zip(mean).zip(std) {
            *value = ((*value - mean) / std).clamp(-FEATURE_CLIP, FEATURE_CLIP);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_sequences_are_held_out_and_first_tokens_are_left_out() {
        let (train, held_out) = split(12, &[0, 4, 8]);
        assert_eq!(train, [1, 2, 3, 5, 6, 7]);
        assert_eq!(held_out, [9, 10, 11]);
        let starts: Vec<u32> = (0..40).map(|sequence| sequence * 3).collect();
        assert_eq!(split(120, &starts).1, [109, 110, 112, 113, 115, 116, 118, 119]);
        let (train, held_out) = split(21, &[0]);
        assert_eq!((train.len(), held_out), (18, vec![19, 20]));
        assert_eq!(split(1, &[0]), (vec![], vec![]));
    }

    #[test]
    fn features_are_standardised_over_the_training_tokens_and_clipped() {
        let mut features = vec![9.0, 9.0, 1.0, 5.0, 3.0, 5.0, 1e9, 6.0];
        let (mean, std) = moments(&features, 2, &[1, 2]);
        assert_eq!((mean.as_slice(), std.as_slice()), (&[2.0, 5.0][..], &[1.0, 1e-6][..]));
        standardise(&mut features, &mean, &std);
        assert_eq!(features, [6.0, 6.0, -1.0, 0.0, 1.0, 0.0, 6.0, 6.0]);
    }
}
