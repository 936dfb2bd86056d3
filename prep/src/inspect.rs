//! What an artifact directory holds, for people and for programs.

use crate::error::Result;
use np_formats::{
    CENTROIDS_NAME, Centroids, Features, Geometry, MANIFEST_NAME, Manifest, NEURONS_NAME, NeuronFile, NeuronFileHeader,
    PREDICTOR_NAME, Projection, RESIDENT_NAME, TensorFile, features_path,
};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// A description of an artifact directory, from its headers alone.
#[derive(Clone, Debug)]
pub struct Inspection {
    manifest: Manifest,
    header: NeuronFileHeader,
    resident_bytes: u64,
    /// Centroids per layer of each projection that was clustered.
    centroids: Vec<(&'static str, usize)>,
    predictor_bytes: Option<u64>,
    trace_tokens: Option<usize>,
}

/// Reads the manifest and the headers of the files in `directory`. Content is not checked, see [`crate::verify`].
pub fn inspect(directory: &Path) -> Result<Inspection> {
    let manifest = Manifest::open(directory)?;
    let header = *NeuronFile::open(&directory.join(NEURONS_NAME))?.header();
    let resident = directory.join(RESIDENT_NAME);
    TensorFile::open_made_from(&resident, manifest.fingerprint)?;
    let (geometry, parent) = (&manifest.geometry, manifest.fingerprint);
    let mut centroids = Vec::new();
    if directory.join(CENTROIDS_NAME).is_file() {
        let file = Centroids::open(directory, geometry, parent)?;
        for projection in [Projection::Joint, Projection::Separate] {
            centroids.extend(file.count(projection).ok().map(|count| (projection.name(), count)));
        }
    }
    let has_traces = features_path(directory).is_file();
    let trace_tokens = has_traces.then(|| Features::read(directory, geometry.hidden, parent)).transpose()?;
    Ok(Inspection {
        header,
        resident_bytes: fs::metadata(&resident).map_or(0, |data| data.len()),
        centroids,
        predictor_bytes: fs::metadata(directory.join(PREDICTOR_NAME)).ok().map(|data| data.len()),
        trace_tokens: trace_tokens.map(|features| features.tokens()),
        manifest,
    })
}

impl Inspection {
    /// The description as JSON.
    pub fn to_json(&self) -> Value {
        let Manifest { format_version, tool_version, fingerprint, source, geometry, dtype, .. } = &self.manifest;
        json!({
            "format_version": format_version,
            "tool_version": tool_version,
            "fingerprint": fingerprint,
            "source": source,
            "geometry": geometry,
            "dtype": dtype.name(),
            "record_bytes": self.header.layout.stride_bytes(),
            "layer_bytes": self.header.layer_bytes(),
            "neurons_bytes": self.header.file_bytes(),
            "resident_bytes": self.resident_bytes,
            "centroids": self.centroids.iter().map(|(name, count)| (name.to_string(), (*count).into()))
                .collect::<serde_json::Map<_, _>>(),
            "predictor_bytes": self.predictor_bytes,
            "trace_tokens": self.trace_tokens,
        })
    }

    /// The description as lines for people.
    pub fn to_text(&self) -> String {
        let Manifest { format_version, tool_version, fingerprint, source, dtype, .. } = &self.manifest;
        let geometry = &self.manifest.geometry;
        let Geometry { layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, context_max, .. } = geometry;
        let mebibytes = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        let revision = source.revision.as_ref().map(|revision| format!(" at {revision}")).unwrap_or_default();
        let centroids = match self.centroids.as_slice() {
            [] => "none: run `np-prep collect` and `np-prep build-centroids`".to_string(),
            some => some.iter().map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", "),
        };
        let lines = [
            ("source", format!("{}{revision}", source.name)),
            ("sha256", source.sha256.clone().unwrap_or_else(|| "unknown".into())),
            ("fingerprint", fingerprint.to_string()),
            (MANIFEST_NAME, format!("format {format_version}, written by np-prep {tool_version}")),
            ("layers", format!("{layers} of {intermediate} neurons, hidden size {hidden}, {}", dtype.name())),
            ("attention", format!("{heads} heads, {kv_heads} for keys, {head_dim} wide")),
            (
                "vocabulary",
                format!("{vocab} tokens, embedding {}", if geometry.tied_embedding { "tied" } else { "apart" }),
            ),
            ("context", format!("{context_max} tokens")),
            ("record", format!("{} bytes", self.header.layout.stride_bytes())),
            (
                NEURONS_NAME,
                format!("{}, {} a layer", mebibytes(self.header.file_bytes()), mebibytes(self.header.layer_bytes())),
            ),
            (RESIDENT_NAME, mebibytes(self.resident_bytes)),
            ("traces", self.trace_tokens.map_or("none".into(), |tokens| format!("{tokens} tokens"))),
            ("centroids", centroids),
            ("predictor", self.predictor_bytes.map_or("none: run `np-train predictor`".into(), mebibytes)),
        ];
        lines.iter().map(|(name, value)| format!("{name:<22}{value}\n")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::progress::Progress;
    use crate::provenance::source_of;
    use crate::repack::repack;
    use crate::test_checkpoint::{geometry, write_checkpoint};
    use np_formats::Dtype;

    #[test]
    fn a_fresh_directory_is_described() {
        let temporary = tempfile::tempdir().unwrap();
        let (model, directory) = (temporary.path().join("model"), temporary.path().join("out.np"));
        write_checkpoint(&model, &geometry(), Dtype::Bf16, 1);
        let checkpoint = Checkpoint::open(&model, None).unwrap();
        repack(&checkpoint, &source_of(&checkpoint, Progress::Silent).unwrap(), &directory, Progress::Silent).unwrap();
        let inspection = inspect(&directory).unwrap();
        let json = inspection.to_json();
        assert_eq!(json["geometry"]["layers"], 2);
        assert_eq!((&json["record_bytes"], &json["dtype"]), (&json!(512), &json!("BF16")));
        assert_eq!(json["predictor_bytes"], Value::Null);
        assert_eq!(json["source"]["name"], "model");
        let text = inspection.to_text();
        for words in ["2 of 96 neurons, hidden size 64, BF16", "512 bytes", "np-train predictor", "build-centroids"] {
            assert!(text.contains(words), "{text}");
        }
        fs::remove_file(directory.join(NEURONS_NAME)).unwrap();
        assert!(inspect(&directory).unwrap_err().to_string().contains(NEURONS_NAME));
    }
}
