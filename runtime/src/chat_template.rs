//! A conversation to text, by the Jinja template that comes with a checkpoint.
//!
//! Templates are written for Python's Jinja2 as Hugging Face sets it up: blocks trimmed, Python's string methods,
//! `raise_exception`, `strftime_now`, and a `generation` tag that only training looks at.

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error as TemplateError, ErrorKind, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use np_formats::{Error, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

const DAY_SECONDS: u64 = 86_400;
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// What was said.
    pub content: String,
}

/// A template that compiles.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    path: PathBuf,
    key: &'static str,
    special_tokens: Value,
}

impl ChatTemplate {
    /// Compiles `source`, which stands in `path` under `key`. Templates see the special tokens as variables, each a
    /// name like `bos_token` and a text.
    ///
    /// # Errors
    /// Names the line that does not compile.
    pub fn compile(
        source: String,
        path: PathBuf,
        key: &'static str,
        special_tokens: Vec<(String, String)>,
    ) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().expect("the usual delimiters"),
        );
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        let special_tokens = special_tokens.into_iter().collect::<BTreeMap<_, _>>().into();
        let template = Self { environment, source: without_generation_tags(&source), path, key, special_tokens };
        template.environment.template_from_str(&template.source).map_err(|error| template.failed(&error))?;
        Ok(template)
    }

    /// The conversation's text; with `add_generation_prompt` up to where the model's answer begins.
    ///
    /// # Errors
    /// When the template refuses the messages; names its line and its words.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let turn = |message: &Message| context! { role => message.role.as_str(), content => message.content.as_str() };
        let messages: Vec<Value> = messages.iter().map(turn).collect();
        let variables = context! {
            messages, add_generation_prompt, tools => (), documents => (), ..self.special_tokens.clone()
        };
        let template = self.environment.template_from_str(&self.source).map_err(|error| self.failed(&error))?;
        template.render(variables).map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &TemplateError) -> Error {
        let line = error.line().map_or(String::new(), |line| format!("line {line}: "));
        let words = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
        let problem = format!("{line}{}", words.replace('\n', " "));
        Error::Config { path: self.path.clone(), key: self.key.into(), problem }
    }
}

/// What templates call on conversations that they can't write down.
fn raise_exception(words: String) -> std::result::Result<String, TemplateError> {
    Err(TemplateError::new(ErrorKind::InvalidOperation, words))
}

/// The date and time now, in UTC.
fn strftime_now(format: &str) -> std::result::Result<String, TemplateError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(format, now).map_err(|directive| {
        let words = format!("strftime_now: `%{directive}` is not supported");
        TemplateError::new(ErrorKind::InvalidOperation, words)
    })
}

/// `seconds` after 1970 in UTC, written as `format` says; or the first directive that is not known.
fn strftime(format: &str, seconds: u64) -> std::result::Result<String, char> {
    let (days, second) = (seconds / DAY_SECONDS, seconds % DAY_SECONDS);
    let (year, month, day) = civil(days);
    let (day_name, month_name) = (DAYS[(days % 7) as usize], MONTHS[month as usize - 1]);
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        text += &match characters.next().unwrap_or('%') {
            'Y' => year.to_string(),
            'y' => format!("{:02}", year % 100),
            'm' => format!("{month:02}"),
            'B' => month_name.into(),
            'b' => month_name[..3].into(),
            'd' => format!("{day:02}"),
            'A' => day_name.into(),
            'a' => day_name[..3].into(),
            'H' => format!("{:02}", second / 3600),
            'M' => format!("{:02}", second / 60 % 60),
            'S' => format!("{:02}", second % 60),
            '%' => "%".into(),
            directive => return Err(directive),
        };
    }
    Ok(text)
}

/// Year, month and day (both from 1) of a day counted from 1970-01-01.
fn civil(days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    let (mut year, mut day) = (1970, days);
    while day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let mut month = 1;
    loop {
        let month_days = match month {
            2 => 28 + u64::from(leap(year)),
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        };
        if day < month_days {
            return (year, month, day + 1);
        }
        day -= month_days;
        month += 1;
    }
}

/// The template with `{% generation %}` and `{% endgeneration %}` replaced by an `if` that holds, so that lines and
/// the trimming of white space stay as they are.
fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let tag = &rest[start..start + length];
        let word = tag[2..].trim_matches(|character: char| character.is_whitespace() || matches!(character, '-' | '+'));
        result += &rest[..start];
        result += &match word {
            "generation" => tag.replacen("generation", "if true", 1),
            "endgeneration" => tag.replacen("endgeneration", "endif", 1),
            _ => tag.to_owned(),
        };
        rest = &rest[start + length..];
    }
    result + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, content: &str) -> Message {
        Message { role: role.into(), content: content.into() }
    }

    fn compile(source: &str) -> Result<ChatTemplate> {
        let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let tokens = tokens.map(|(name, text)| (name.to_owned(), text.to_owned())).into();
        ChatTemplate::compile(source.into(), "dir/chat_template.jinja".into(), "chat_template", tokens)
    }

    #[track_caller]
    fn check(source: &str, expected: &str) {
        let messages = [message("system", " Be brief. "), message("user", "Hi\n")];
        assert_eq!(compile(source).unwrap().render(&messages, true).unwrap(), expected);
    }

    #[track_caller]
    fn check_error(source: &str, expected: &[&str]) {
        let messages = [message("user", "Hi")];
        let error = compile(source).and_then(|template| template.render(&messages, true)).unwrap_err().to_string();
        assert!(error.starts_with("dir/chat_template.jinja: chat_template: ") && !error.contains('\n'), "{error}");
        assert!(expected.iter().all(|expected| error.contains(expected)), "{error}");
    }

    #[test]
    fn renders_what_templates_use() {
        check(
            "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content.strip() }}{{ eos_token }}{% endfor %}",
            "<s>[system]Be brief.</s>[user]Hi</s>",
        );
        check(
            "{% for m in messages %}\n  {% if loop.first %}\n{{ m.role|upper }}\n  {% endif %}\n{% endfor %}\n",
            "SYSTEM\n",
        );
        check("{{ messages[1:]|length }}{{ messages[0]['content'].split(' ')[1] }}", "1Be");
        check("{% if add_generation_prompt and not tools and tools is none %}go{% endif %}", "go");
        check(
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}\
            {% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ messages[0].tool_calls is defined }}",
            "2False",
        );
    }

    #[test]
    fn generation_tags_change_nothing() {
        check("a {%- generation -%} b {%- endgeneration %} c", "ab c");
        check("{% generation %}{{ messages[1].content }}{% endgeneration %}", "Hi\n");
        check("{%+ generation +%}x{%endgeneration%}", "x");
        check("generation {{ 'endgeneration' }}", "generation endgeneration");
    }

    #[test]
    fn errors_name_the_line() {
        check_error("{% if %}", &["line 1"]);
        check_error("\n\n{% for m in messages %}", &["line 3"]);
        check_error("\n{{ raise_exception('roles must\nalternate') }}", &["line 2", "roles must alternate"]);
        check_error("{{ strftime_now('%Q') }}", &["%Q"]);
        check_error("{{ nothing.at_all }}", &["line 1"]);
    }

    #[test]
    fn dates() {
        check("{{ strftime_now('%%')}}", "%");
        let time = |format| strftime(format, 1_709_210_096);
        assert_eq!(
            time("%d %b %Y, %A %H:%M:%S %y-%m %B %a"),
            Ok("29 Feb 2024, Thursday 12:34:56 24-02 February Thu".into())
        );
        assert_eq!(time("%Q"), Err('Q'));
        assert_eq!(strftime("%Y-%m-%d", 0), Ok("1970-01-01".into()));
        assert_eq!(strftime("%Y-%m-%d %A", 4_102_444_799), Ok("2099-12-31 Thursday".into()));
    }
}
