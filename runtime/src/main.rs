//! np-run: runs a prepared model.

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use np_formats::Manifest;
use np_kernels::KvDtype;
use np_runtime::budget::{format_size, parse_size};
use np_runtime::chat_template::Message;
use np_runtime::eval::{EvalOptions, EvalReport, evaluate};
use np_runtime::generate::{GenerateOptions, Generation, generate};
use np_runtime::io::{DirectMode, ReaderChoice};
use np_runtime::sampler::SamplerOptions;
use np_runtime::select::SelectorKind;
use np_runtime::settings::{K_FRACTION_DEFAULT, PREFILL_TOKENS};
use np_runtime::text::Text;
use np_runtime::{Engine, EngineOptions, KChoice, Mode, TokenStats, open_neurons};
use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs a prepared model within a fixed memory, reading from the drive what memory does not hold.
#[derive(Parser)]
#[command(name = "np-run", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Continues a prompt.
    Generate(Generate),
    /// Scores a text: perplexity beside dense, rows read, recall.
    Eval(Eval),
}

/// Settings of the engine.
#[derive(Args)]
struct EngineFlags {
    /// Artifact directory, as np-prep leaves it.
    model: PathBuf,
    /// Active neurons per sparse layer.
    #[arg(long, conflicts_with = "k_fraction")]
    k: Option<usize>,
    /// Active neurons as a share of the layer [default: 0.688].
    #[arg(long)]
    k_fraction: Option<f64>,
    /// Layers kept dense [default: as many as fit the memory].
    #[arg(long)]
    dense_layers: Option<usize>,
    /// Slots per sparse layer [default: K].
    #[arg(long)]
    capacity: Option<usize>,
    /// Memory budget, like 11.9GiB [default: what is free].
    #[arg(long, value_parser = parse_size)]
    memory: Option<u64>,
    /// The rule that names active neurons: static, centroid or mixture.
    #[arg(long, default_value = "mixture")]
    selector: SelectorKind,
    /// Hysteresis in nats of importance: higher reads less [default: the selector's].
    #[arg(long)]
    margin: Option<f32>,
    /// How records are read: auto, uring or pread.
    #[arg(long, default_value = "auto")]
    reader: ReaderChoice,
    /// Read through the page cache.
    #[arg(long)]
    buffered: bool,
    /// Most bytes in flight.
    #[arg(long, value_parser = parse_size, default_value = "16MiB")]
    staging: u64,
    /// Gaps of at most this many records are read through instead of asking twice.
    #[arg(long, default_value_t = 0)]
    bridge: u32,
    /// Positions to make room for [default: the model's, at most 4096].
    #[arg(long)]
    context: Option<usize>,
    /// Type of cached keys and values: f16 or f32.
    #[arg(long, default_value = "f16", value_parser = parse_kv)]
    kv: KvDtype,
    /// Prompt tokens that go through a layer together.
    #[arg(long, default_value_t = PREFILL_TOKENS)]
    prefill_tokens: usize,
    /// Threads that compute [default: all cores].
    #[arg(long)]
    threads: Option<usize>,
    /// Check the hash of every weight that is read.
    #[arg(long)]
    verify: bool,
    /// One JSON object on standard output.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Generate {
    #[command(flatten)]
    engine: EngineFlags,
    /// Text to continue.
    #[arg(long)]
    prompt: String,
    /// Put the prompt into the model's chat template, as the user's turn.
    #[arg(long)]
    chat: bool,
    /// Most tokens to add.
    #[arg(long, default_value_t = 64)]
    max_tokens: usize,
    /// 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Keep this many of the likeliest tokens, 0 for all.
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Keep the likeliest tokens up to this probability together.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Keep tokens at least this many times as likely as the likeliest.
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Makes recent tokens less likely; 1 changes nothing.
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f32,
    /// The same seed gives the same text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print each token's rows, bytes and times to standard error.
    #[arg(long)]
    stats: bool,
    /// Write each token's active sets to this file, one JSON object per token and layer.
    #[arg(long)]
    dump_active: Option<PathBuf>,
}

#[derive(Args)]
struct Eval {
    #[command(flatten)]
    engine: EngineFlags,
    /// Text to score.
    #[arg(long)]
    text: PathBuf,
    /// Most tokens of the text to use.
    #[arg(long)]
    tokens: Option<usize>,
    /// Tokens of a window; each starts with an empty context.
    #[arg(long, default_value_t = 512)]
    window: usize,
    /// Measure recall at one token of so many; 0 leaves it out and needs no memory for all rows.
    #[arg(long, default_value_t = 8)]
    recall_every: usize,
}

fn parse_kv(text: &str) -> Result<KvDtype, String> {
    match text {
        "f16" => Ok(KvDtype::F16),
        "f32" => Ok(KvDtype::F32),
        _ => Err(format!("{text:?} is not f16 or f32")),
    }
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Generate(flags) => run_generate(&flags),
        Command::Eval(flags) => run_eval(&flags),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

impl EngineFlags {
    fn options(&self) -> EngineOptions {
        let fraction = KChoice::Fraction(self.k_fraction.unwrap_or(K_FRACTION_DEFAULT));
        EngineOptions {
            k: self.k.map_or(fraction, KChoice::Count),
            dense_layers: self.dense_layers,
            capacity: self.capacity,
            memory_bytes: self.memory,
            selector: self.selector,
            margin: self.margin,
            reader: self.reader,
            direct: if self.buffered { DirectMode::Never } else { DirectMode::Auto },
            staging_bytes: self.staging as usize,
            bridge_records: self.bridge,
            context: self.context,
            kv: self.kv,
            prefill_tokens: self.prefill_tokens,
            threads: self.threads,
            verify: self.verify,
        }
    }

    /// Opens the engine and says on standard error what was decided, if somebody is looking.
    fn open(&self, text: &Text) -> Result<Engine> {
        let bar = progress_bar(0, "layers loaded");
        let engine = Engine::open(&self.model, &self.options(), &mut |done, all| {
            bar.set_length(all as u64);
            bar.set_position(done as u64);
        });
        bar.finish_and_clear();
        let engine = engine?;
        if !self.json && std::io::stderr().is_terminal() {
            text.notes().iter().chain(engine.notes()).for_each(|note| eprintln!("note: {note}"));
            describe(&engine, self.selector);
        }
        Ok(engine)
    }
}

fn describe(engine: &Engine, selector: SelectorKind) {
    let settings = engine.settings();
    let rows = &settings.rows;
    let layers = engine.geometry().layers;
    eprint!("{} mode, {} of {layers} layers dense", settings.mode, rows.dense_layers);
    if settings.mode != Mode::Resident {
        let share = 100.0 * rows.k as f64 / engine.geometry().intermediate as f64;
        eprint!(", K = {} ({share:.1} %), {} slots, selector {}", rows.k, rows.capacity, selector.name());
    }
    let (needed, budget) = (format_size(settings.footprint.total()), format_size(settings.budget_bytes));
    eprintln!(", {needed} of {budget}, {}", engine.reader());
}

/// A bar on a terminal, nothing in a pipe.
fn progress_bar(length: u64, what: &'static str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed}").expect("a valid template");
    ProgressBar::new(length).with_style(style).with_message(what)
}

fn run_generate(flags: &Generate) -> Result<()> {
    let sampler = SamplerOptions {
        temperature: flags.temperature,
        top_k: flags.top_k,
        top_p: flags.top_p,
        min_p: flags.min_p,
        repetition_penalty: flags.repetition_penalty,
        seed: flags.seed,
    };
    if let Err(problem) = sampler.check() {
        bail!("{problem}");
    }
    let text = load_text(&flags.engine.model)?;
    let mut engine = flags.engine.open(&text)?;
    let prompt = match flags.chat {
        true => {
            let turn = Message { role: "user".into(), content: flags.prompt.clone() };
            text.encode(&text.chat(&[turn], true)?, !text.has_template())?
        }
        false => text.encode(&flags.prompt, true)?,
    };
    if prompt.is_empty() {
        bail!("the prompt is empty; give --prompt some text");
    }
    if let Some(path) = &flags.dump_active {
        dump_active(&mut engine, path)?;
    }
    let quiet = flags.engine.json;
    let options = GenerateOptions { max_tokens: flags.max_tokens, sampler };
    let mut out = std::io::stdout();
    let mut broken = None;
    let mut per_token = Vec::new();
    let made = generate(&mut engine, &text, &prompt, options, &mut |token| {
        if !quiet {
            // A closed pipe ends the program below, after the engine is in order.
            broken = broken.take().or(out.write_all(token.text.as_bytes()).and_then(|()| out.flush()).err());
        }
        per_token.extend(token.stats.copied());
    })?;
    engine.watch(None);
    if let Some(error) = broken {
        return Err(error).context("writing to standard output");
    }
    if quiet {
        print_json(&engine, flags, &made, &per_token)?;
    } else {
        println!();
        if flags.stats {
            print_token_stats(&per_token);
        }
        if flags.stats || std::io::stderr().is_terminal() {
            print_summary(&made);
        }
    }
    Ok(())
}

fn load_text(model: &Path) -> Result<Text> {
    // The manifest first: it names what kind of directory is expected.
    Manifest::open(model)?;
    Ok(Text::load(model)?)
}

fn dump_active(engine: &mut Engine, path: &Path) -> Result<()> {
    let file = File::create(path).with_context(|| format!("{}: create", path.display()))?;
    let mut file = BufWriter::new(file);
    engine.watch(Some(Box::new(move |view| {
        let active: Vec<u32> = view.active.ones().collect();
        let line = serde_json::json!({
            "position": view.position, "layer": view.layer, "computed": view.computed, "active": active,
        });
        if let Err(error) = writeln!(file, "{line}") {
            eprintln!("note: active sets are not written: {error}");
        }
    })));
    Ok(())
}

fn print_json(engine: &Engine, flags: &Generate, made: &Generation, per_token: &[TokenStats]) -> Result<()> {
    let settings = engine.settings();
    let mut report = serde_json::to_value(made)?;
    report["mode"] = serde_json::to_value(settings.mode)?;
    report["dense_layers"] = settings.rows.dense_layers.into();
    report["k"] = settings.rows.k.into();
    report["selector"] = flags.engine.selector.name().into();
    report["reader"] = engine.reader().to_string().into();
    report["footprint_bytes"] = settings.footprint.total().into();
    if flags.stats {
        report["tokens"] = serde_json::to_value(per_token)?;
    }
    println!("{report}");
    Ok(())
}

fn print_token_stats(per_token: &[TokenStats]) {
    eprintln!(
        "{:>5} {:>8} {:>9} {:>9} {:>7} {:>10} {:>8} {:>8} {:>10} {:>7}",
        "token", "active", "resident", "incoming", "ranges", "read", "wait ms", "comp ms", "predict ms", "other ms"
    );
    for (index, token) in per_token.iter().enumerate() {
        let ms = |ns: u64| ns as f64 / 1e6;
        eprintln!(
            "{:>5} {:>8} {:>9} {:>9} {:>7} {:>10} {:>8.2} {:>8.2} {:>10.2} {:>7.2}",
            index + 1,
            token.active_rows,
            token.resident_rows,
            token.incoming_rows,
            token.ranges,
            format_size(token.read_bytes),
            ms(token.io_wait_ns),
            ms(token.compute_ns),
            ms(token.predictor_ns),
            ms(token.other_ns)
        );
    }
}

fn print_summary(made: &Generation) {
    let seconds = |ns: u64| ns as f64 / 1e9;
    eprintln!(
        "prompt: {} tokens in {:.2} s, {} streamed",
        made.prefill.tokens,
        seconds(made.prefill.elapsed_ns),
        format_size(made.prefill.streamed_bytes)
    );
    let (tokens, total) = (made.decoded.max(1) as f64, &made.total);
    let ms = |ns: u64| ns as f64 / 1e6 / tokens;
    eprintln!(
        "decoded: {} tokens, {:.1} ms each (I/O wait {:.1}, compute {:.1}, predictor {:.1}, other {:.1}), \
         {:.0} of {:.0} active rows read per token in {:.0} ranges, {}",
        made.decoded,
        ms(total.elapsed_ns()),
        ms(total.io_wait_ns),
        ms(total.compute_ns),
        ms(total.predictor_ns),
        ms(total.other_ns),
        total.incoming_rows as f64 / tokens,
        total.active_rows as f64 / tokens,
        total.ranges as f64 / tokens,
        format_size((total.read_bytes as f64 / tokens) as u64)
    );
}

fn run_eval(flags: &Eval) -> Result<()> {
    if flags.window < 2 {
        bail!("--window {}: must be at least 2", flags.window);
    }
    let text = load_text(&flags.engine.model)?;
    let content = std::fs::read_to_string(&flags.text).with_context(|| format!("{}: read", flags.text.display()))?;
    let mut tokens = text.encode(&content, false)?;
    tokens.truncate(flags.tokens.unwrap_or(usize::MAX));
    if tokens.len() < 2 {
        bail!("{}: holds fewer than two tokens", flags.text.display());
    }
    let mut engine = flags.engine.open(&text)?;
    let neurons = open_neurons(&flags.engine.model, &Manifest::open(&flags.engine.model)?)?;
    let bar = progress_bar(tokens.len() as u64, "tokens scored");
    let options = EvalOptions { window: flags.window, recall_every: flags.recall_every };
    let report = evaluate(&mut engine, &neurons, &tokens, options, &mut |done| bar.set_position(done as u64));
    bar.finish_and_clear();
    let report = report?;
    if flags.engine.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print_eval(&report);
    }
    Ok(())
}

fn print_eval(report: &EvalReport) {
    println!("tokens scored        {}", report.scored);
    println!("perplexity, dense    {:.3}", report.dense_perplexity);
    println!("perplexity           {:.3}", report.perplexity);
    println!("added nats per token {:.4} +- {:.4}", report.dnll, report.dnll_stderr);
    let active = report.k * report.sparse_layers;
    println!("rows read per token  {:.0} of {active} ({:.1} %)", report.rows_per_token, 100.0 * report.delta_ratio);
    if let (Some(recall), Some(dropped)) = (report.recall, report.dropped_energy) {
        println!("recall of true top K {:.1} %", 100.0 * recall);
        println!("energy dropped       {:.1} %", 100.0 * dropped);
    }
    println!("memory               {}", format_size(report.resident_bytes));
    println!("time per token       {:.1} ms", report.decode_ms);
}
