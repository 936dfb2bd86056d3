//! Which tensors a model has, under the names of Hugging Face checkpoints.

use np_formats::{Error, Geometry, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// A tensor that a model of some geometry has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelTensor {
    /// Its name.
    pub name: String,
    /// Its shape, outermost first.
    pub shape: Vec<usize>,
    /// Whether it belongs to an MLP, so that its rows go into the neuron file.
    pub mlp: bool,
}

/// Name of the embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the head; tied models do without.
pub const HEAD: &str = "lm_head.weight";
/// Known leftovers of older checkpoints that say nothing new.
const HARMLESS: [&str; 1] = [".rotary_emb.inv_freq"];
/// Projections stored as one tensor where our families have two or three.
const FUSED: [&str; 3] = ["gate_up_proj", "qkv_proj", "query_key_value"];

/// All tensors of a model: embedding, layers in numeric order (alphabetic within a layer), head, last norm.
pub fn model_tensors(geometry: &Geometry) -> Vec<ModelTensor> {
    let tensor = |name: String, shape: &[usize], mlp| ModelTensor { name, shape: shape.to_vec(), mlp };
    let mut tensors = vec![tensor(EMBEDDING.into(), &[geometry.vocab, geometry.hidden], false)];
    for layer in 0..geometry.layers {
        let shapes = layer_shapes(geometry);
        tensors.extend(shapes.into_iter().map(|(name, shape, mlp)| tensor(layer_tensor(layer, name), &shape, mlp)));
    }
    if !geometry.tied_embedding {
        tensors.push(tensor(HEAD.into(), &[geometry.vocab, geometry.hidden], false));
    }
    tensors.push(tensor("model.norm.weight".into(), &[geometry.hidden], false));
    tensors
}

/// Full name of a layer's tensor.
pub fn layer_tensor(layer: usize, name: &str) -> String {
    format!("model.layers.{layer}.{name}")
}

/// Checks that `shapes` (by name) are the tensors of a model of this geometry, no fewer and no more; `path` is for
/// messages.
pub fn check_tensors(path: &Path, geometry: &Geometry, shapes: &BTreeMap<String, Vec<usize>>) -> Result<()> {
    let wrong = |tensor: &str, problem: String| Error::Tensor { path: path.into(), tensor: tensor.into(), problem };
    if let Some(name) = shapes.keys().find(|name| FUSED.iter().any(|fused| name.contains(fused))) {
        let problem = "is a fused projection, which is not supported; take a checkpoint with separate ones".into();
        return Err(wrong(name, problem));
    }
    let wanted = model_tensors(geometry);
    for tensor in &wanted {
        match shapes.get(&tensor.name) {
            None => {
                return Err(wrong(
                    &tensor.name,
                    "is missing, although config.json implies it; fetch the model again".into(),
                ));
            }
            Some(shape) if *shape != tensor.shape => {
                let problem = format!("has shape {shape:?}, but config.json implies {:?}", tensor.shape);
                return Err(wrong(&tensor.name, problem));
            }
            Some(_) => {}
        }
    }
    let known = |name: &String| *name == HEAD || is_harmless(name) || wanted.iter().any(|tensor| tensor.name == *name);
    let unknown: Vec<_> = match shapes.len() > wanted.len() {
        true => shapes.keys().filter(|name| !known(name)).collect(),
        false => Vec::new(),
    };
    match unknown.first() {
        Some(name) => Err(wrong(
            name,
            format!(
                "is not known for this config ({} such tensors); ignoring it would change the result",
                unknown.len()
            ),
        )),
        None => Ok(()),
    }
}

/// Whether a tensor may be left out without a word.
pub fn is_harmless(name: &str) -> bool {
    HARMLESS.iter().any(|suffix| name.ends_with(suffix))
}

/// Names within a layer, alphabetic, with shapes and whether they are the MLP's.
fn layer_shapes(geometry: &Geometry) -> Vec<(&'static str, Vec<usize>, bool)> {
    let (hidden, neurons) = (geometry.hidden, geometry.intermediate);
    let (query, kv) = (geometry.query_width(), geometry.kv_width());
    let mut shapes = vec![
        ("input_layernorm.weight", vec![hidden], false),
        ("mlp.down_proj.weight", vec![hidden, neurons], true),
        ("mlp.gate_proj.weight", vec![neurons, hidden], true),
        ("mlp.up_proj.weight", vec![neurons, hidden], true),
        ("post_attention_layernorm.weight", vec![hidden], false),
        ("self_attn.k_proj.weight", vec![kv, hidden], false),
        ("self_attn.o_proj.weight", vec![hidden, query], false),
        ("self_attn.q_proj.weight", vec![query, hidden], false),
        ("self_attn.v_proj.weight", vec![kv, hidden], false),
    ];
    if geometry.qkv_bias {
        shapes.push(("self_attn.k_proj.bias", vec![kv], false));
        shapes.push(("self_attn.q_proj.bias", vec![query], false));
        shapes.push(("self_attn.v_proj.bias", vec![kv], false));
    }
    if geometry.qk_norm {
        shapes.push(("self_attn.k_norm.weight", vec![geometry.head_dim], false));
        shapes.push(("self_attn.q_norm.weight", vec![geometry.head_dim], false));
    }
    shapes.sort();
    shapes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_checkpoint::geometry;

    fn shapes(geometry: &Geometry) -> BTreeMap<String, Vec<usize>> {
        model_tensors(geometry).into_iter().map(|tensor| (tensor.name, tensor.shape)).collect()
    }

    #[track_caller]
    fn check_refused(shapes: &BTreeMap<String, Vec<usize>>, words: &[&str]) {
        let message = check_tensors(Path::new("m"), &geometry(), shapes).unwrap_err().to_string();
        for word in words {
            assert!(message.contains(word), "{message:?} lacks {word:?}");
        }
    }

    #[test]
    fn layers_come_in_numeric_order() {
        let tensors = model_tensors(&Geometry { layers: 12, ..geometry() });
        let at = |name: &str| tensors.iter().position(|tensor| tensor.name == name).unwrap();
        assert!(at("model.layers.2.input_layernorm.weight") < at("model.layers.10.input_layernorm.weight"));
    }

    #[test]
    fn families_differ_by_tensors() {
        let count = |geometry: Geometry| model_tensors(&geometry).len();
        let plain = Geometry { layers: 2, tied_embedding: true, ..geometry() };
        assert_eq!(count(plain.clone()), 2 + 2 * 9);
        assert_eq!(count(Geometry { tied_embedding: false, ..plain.clone() }), 3 + 2 * 9);
        assert_eq!(count(Geometry { qkv_bias: true, ..plain.clone() }), 2 + 2 * 12);
        assert_eq!(count(Geometry { qk_norm: true, ..plain }), 2 + 2 * 11);
    }

    #[test]
    fn no_fewer_and_no_more() {
        let whole = shapes(&geometry());
        check_tensors(Path::new("m"), &geometry(), &whole).unwrap();
        let with = |name: &str, shape: &[usize]| {
            let mut shapes = whole.clone();
            shapes.insert(name.into(), shape.to_vec());
            shapes
        };
        check_tensors(Path::new("m"), &geometry(), &with("model.layers.0.self_attn.rotary_emb.inv_freq", &[8]))
            .unwrap();
        check_refused(&with("model.layers.0.self_attn.q_proj.bias", &[64]), &["q_proj.bias", "not known"]);
        check_refused(&with("model.layers.1.mlp.gate_up_proj.weight", &[192, 64]), &["gate_up_proj", "fused"]);
        check_refused(&with("model.norm.weight", &[65]), &["model.norm.weight", "[65]", "[64]"]);
        let mut fewer = whole.clone();
        fewer.remove("model.layers.1.mlp.up_proj.weight");
        check_refused(&fewer, &["model.layers.1.mlp.up_proj.weight", "missing"]);
    }
}
