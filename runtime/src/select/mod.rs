//! Selectors: the rules that name active sets.
//!
//! A [`Selector`] watches one token's pass and names, for layers whose MLP has not run, the neurons that will be
//! computed: exactly K of them. All rules share the engine, the read plan and the per-layer completion.

mod centroid;
mod fixed;
mod mixture;
pub mod score;
mod top_k;

pub use top_k::TopK;

use crate::{Error, Result};
use np_formats::{CENTROIDS_NAME, Centroids, Fingerprint, Geometry, Mask, PREDICTOR_NAME, PredictorWeights};
use std::path::Path;
use std::str::FromStr;

/// Where the pass stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Point {
    /// A layer's input, before its attention.
    LayerInput(u16),
    /// The input of a layer's MLP, after attention and norm.
    MlpInput(u16),
    /// A layer's output.
    LayerOutput(u16),
}

/// Whether a named set is what will be computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Certainty {
    /// It is computed, no more and no less.
    Firm,
    /// It is read ahead; a firm set for the same layer follows.
    Guess,
}

/// The sets named so far for one token, one mask per layer.
#[derive(Clone, Debug)]
pub struct ActiveSets {
    sets: Vec<Mask>,
    named: Vec<(u16, Certainty)>,
}

impl ActiveSets {
    /// Room for a set for each of `layers` layers.
    pub fn new(layers: usize, neurons: usize) -> Self {
        Self { sets: vec![Mask::new(neurons); layers], named: Vec::with_capacity(2 * layers) }
    }

    /// Forgets what was named, for the next token.
    pub fn clear(&mut self) {
        self.named.clear();
    }

    /// The mask to write a layer's set into.
    pub fn name(&mut self, layer: u16, certainty: Certainty) -> &mut Mask {
        self.named.push((layer, certainty));
        &mut self.sets[usize::from(layer)]
    }

    /// Layers named, in the order in which they were.
    pub fn named(&self) -> &[(u16, Certainty)] {
        &self.named
    }

    /// The set last named for a layer.
    pub fn set(&self, layer: u16) -> &Mask {
        &self.sets[usize::from(layer)]
    }
}

/// A rule that names active sets.
pub trait Selector: Send {
    /// Its name, as given on the command line.
    fn kind(&self) -> SelectorKind;

    /// The points that it wants to see. A backend with its own memory copies the state to the CPU only there.
    fn watches(&self, point: Point) -> bool;

    /// Sees the state at a point that it watches. `residual` (hidden) is the residual stream, not normalised; `normed`
    /// (hidden) is set at [`Point::MlpInput`]. `previous[l]` is layer l's active set of the token before, empty at a
    /// cold start. May name sets for layers whose MLP has not run.
    fn observe(
        &mut self,
        point: Point,
        residual: &[f32],
        normed: Option<&[f32]>,
        previous: &[Mask],
        out: &mut ActiveSets,
    );
}

/// Which rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SelectorKind {
    /// The K neurons of most energy over the calibration text: never changes, so nothing is read after the first token.
    Static,
    /// The paper's: one gate and one up centroid per layer, their intersection first.
    Centroid,
    /// Energy tables of joint centroids, mixed by the predictor's softmax.
    Mixture,
}

impl SelectorKind {
    /// All rules.
    pub const ALL: [Self; 3] = [Self::Static, Self::Centroid, Self::Mixture];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Centroid => "centroid",
            Self::Mixture => "mixture",
        }
    }

    /// The margin used when none is given, in nats of importance.
    pub fn default_margin(self) -> f32 {
        match self {
            Self::Static => 0.0,
            Self::Centroid | Self::Mixture => 0.25,
        }
    }
}

impl FromStr for SelectorKind {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == text);
        kind.ok_or_else(|| format!("{text:?} is not a selector; take static, centroid or mixture"))
    }
}

/// What a selector is made for.
#[derive(Clone, Copy, Debug)]
pub struct SelectorOptions {
    /// The rule.
    pub kind: SelectorKind,
    /// Active neurons of each sparse layer.
    pub k: usize,
    /// Layers before this one are dense and need no set.
    pub dense_layers: usize,
    /// Added to the score of the previous token's active neurons, in nats.
    pub margin: f32,
}

/// Bytes that a selector's files take in memory, at most: what they take on disk.
pub fn selector_bytes(directory: &Path, kind: SelectorKind) -> u64 {
    let length = |name: &str| std::fs::metadata(directory.join(name)).map_or(0, |file| file.len());
    match kind {
        SelectorKind::Static => 0,
        SelectorKind::Centroid | SelectorKind::Mixture => length(CENTROIDS_NAME) + length(PREDICTOR_NAME),
    }
}

/// Makes a selector from an artifact directory.
pub fn open_selector(
    directory: &Path,
    geometry: &Geometry,
    parent: Fingerprint,
    options: SelectorOptions,
) -> Result<Box<dyn Selector>> {
    if options.k == geometry.intermediate {
        // All neurons are active whatever the rule, so no vocabulary is needed.
        return Ok(Box::new(fixed::Static::full(geometry, options)));
    }
    let centroids = Centroids::open(directory, geometry, parent)?;
    let predictor = || PredictorWeights::read(directory, geometry.hidden, parent, centroids.checksum());
    Ok(match options.kind {
        SelectorKind::Static => Box::new(fixed::Static::new(&centroids, geometry, options)?),
        SelectorKind::Centroid => Box::new(centroid::Centroid::new(&centroids, predictor()?, geometry, options)?),
        SelectorKind::Mixture => Box::new(mixture::Mixture::new(&centroids, predictor()?, geometry, options)?),
    })
}

/// The error for a predictor that lacks the network a selector needs.
fn no_network(projection: &str) -> Error {
    Error::Selector(format!(
        "predictor.safetensors has no {projection} network; run `np-prep build-centroids --projection both` and \
         `np-train predictor` again"
    ))
}
