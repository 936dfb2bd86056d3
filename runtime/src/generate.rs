//! From a prompt to text.

use crate::sampler::{Sampler, SamplerOptions};
use crate::stats::{PrefillStats, TokenStats};
use crate::text::Text;
use crate::{Engine, Result};
use serde::Serialize;

/// Tokens that a repetition penalty looks back on.
const RECENT_TOKENS: usize = 64;

/// How to go on from a prompt.
#[derive(Clone, Copy, Debug)]
pub struct GenerateOptions {
    /// Most tokens to add.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
}

/// Why generation ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended its text.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
}

/// A token, as soon as it is known.
pub struct NewToken<'a> {
    /// Its id.
    pub id: u32,
    /// The text that it completes, often empty within a character.
    pub text: &'a str,
    /// What computing the logits behind it cost; `None` for the first, whose logits came with the prompt.
    pub stats: Option<&'a TokenStats>,
}

/// What was generated.
#[derive(Clone, Debug, Serialize)]
pub struct Generation {
    /// The prompt's tokens.
    pub prompt_ids: Vec<u32>,
    /// The new tokens, without one that ended the text.
    pub ids: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// What the prompt cost.
    pub prefill: PrefillStats,
    /// Tokens that were decoded.
    pub decoded: usize,
    /// What these cost together.
    pub total: TokenStats,
}

/// Starts a new sequence with `prompt` and adds tokens until the model or an option says stop. `heard` is given each
/// token at once.
pub fn generate(
    engine: &mut Engine,
    text: &Text,
    prompt: &[u32],
    options: GenerateOptions,
    heard: &mut dyn FnMut(NewToken<'_>),
) -> Result<Generation> {
    let vocab = engine.geometry().vocab;
    let mut sampler = Sampler::new(options.sampler, vocab);
    let mut decoder = text.decoder();
    engine.restart();
    let mut logits = engine.prefill(prompt)?.to_vec();
    let mut seen = prompt.to_vec();
    let mut made = Generation {
        prompt_ids: prompt.to_vec(),
        ids: Vec::new(),
        text: String::new(),
        finish: Finish::Length,
        prefill: *engine.prefill_stats(),
        decoded: 0,
        total: TokenStats::default(),
    };
    let mut stats: Option<TokenStats> = None;
    while made.ids.len() < options.max_tokens {
        let id = sampler.sample(&mut logits, &seen[seen.len().saturating_sub(RECENT_TOKENS)..]);
        if text.is_eos(id) {
            made.finish = Finish::Stop;
            break;
        }
        let piece = decoder.push(id)?;
        heard(NewToken { id, text: &piece, stats: stats.as_ref() });
        made.ids.push(id);
        made.text.push_str(&piece);
        seen.push(id);
        if made.ids.len() == options.max_tokens {
            break;
        }
        if engine.position() == engine.settings().context {
            made.finish = Finish::Context;
            break;
        }
        logits.copy_from_slice(engine.decode(id)?);
        stats = Some(*engine.token_stats());
        made.total += *engine.token_stats();
        made.decoded += 1;
    }
    let rest = decoder.finish()?;
    if !rest.is_empty() {
        made.text.push_str(&rest);
        heard(NewToken { id: *seen.last().expect("the prompt is not empty"), text: &rest, stats: None });
    }
    Ok(made)
}
