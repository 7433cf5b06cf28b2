//! A checkpoint's chat template: messages and tools in, prompt text out, as Hugging Face `apply_chat_template` has it.
//!
//! The engine is minijinja; the sub-modules hold what Hugging Face adds to Jinja or what Python prints differently. A
//! template comes with the weights and is not trusted: source, instructions, recursion and output are bounded. What the
//! engine gives no hold on is the size of a value in between: a template that doubles a text often enough eats the memory.
//! This file knows neither token ids nor the API that the messages came from.

mod bounded;
mod checkpoint;
mod expectations;
mod generation;
mod messages;
mod python;
mod stack;
mod tojson;

pub use checkpoint::{CheckpointTemplate, checkpoint_template};

use super::dialect::Dialect;
use bounded::BoundedText;
use expectations::Expectations;
use jiff::civil::DateTime;
use minijinja::{Environment, Error, ErrorKind, Template, Value};
use stack::on_deep_stack;
use std::{error::Error as _, sync::OnceLock};

/// The name under which the engine's messages know the template; without an extension, so that nothing is escaped.
const NAME: &str = "chat_template";
/// The longest source; the longest that models come with has 17 KB.
const MAX_SOURCE_BYTES: usize = 64 << 10;
/// Engine instructions of one rendering, some seconds. Some templates scan all messages for each message: two thousand
/// messages with tool calls cost DeepSeek V3.2's about half of it.
const MAX_INSTRUCTIONS: u64 = 50_000_000;
/// Nested calls of macros (which cost four each), loops and blocks; JSON schemas are rendered by recursive macros.
const MAX_RECURSION: usize = 300;

/// A chat template that parsed, with the special tokens it may print.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos_token: Option<String>,
    eos_token: Option<String>,
    expectations: OnceLock<Expectations>,
}

/// What one rendering shows to the template.
pub struct Prompt<'a> {
    /// Messages in the form of the OpenAI API, oldest first: objects with `role`, `content`, `tool_calls`, ...
    pub messages: &'a [serde_json::Value],
    /// Tool definitions; `None` reaches the template as `none`.
    pub tools: Option<&'a [serde_json::Value]>,
    /// Whether the text ends where the assistant begins to write.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`; they may replace `bos_token` and `eos_token`.
    pub kwargs: &'a serde_json::Map<String, serde_json::Value>,
    /// What `strftime_now` prints.
    pub now: DateTime,
}

/// Why a template gave no prompt.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The source is no Jinja template.
    #[error("chat template, line {line}: {message}; correct it or give another chat_template.jinja")]
    Syntax {
        /// The first line that does not parse, from 1.
        line: usize,
        /// What the engine expected.
        message: String,
    },
    /// The template called `raise_exception`: it refuses this conversation.
    #[error("the chat template refuses these messages: {message}")]
    Raised {
        /// The template's own words.
        message: String,
    },
    /// The template parsed and failed on this conversation, or reached a bound.
    #[error("the chat template failed: {message}; change the messages or give another chat_template.jinja")]
    Engine {
        /// What failed, with its line where the engine knows it.
        message: String,
    },
}

/// The text of the template's own `raise_exception`, kept apart from the engine's failures.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// Parses `source`, a Jinja template of the dialect that Hugging Face renders.
    ///
    /// A special token that is `None` is undefined in the template.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] where the source does not parse, [`TemplateError::Engine`] where it is too long.
    /// Unknown filters and tests show up when rendering.
    pub fn new(
        source: &str,
        bos_token: Option<&str>,
        eos_token: Option<&str>,
    ) -> Result<Self, TemplateError> {
        if source.len() > MAX_SOURCE_BYTES {
            let message = format!("its source has {} bytes, of {MAX_SOURCE_BYTES} allowed", source.len());
            return Err(TemplateError::Engine { message });
        }
        let template = Self {
            environment: environment(),
            source: generation::as_with_blocks(source),
            bos_token: bos_token.map(String::from),
            eos_token: eos_token.map(String::from),
            expectations: OnceLock::new(),
        };
        on_deep_stack(|| template.parsed().map(drop).map_err(|error| syntax_error(&error)))?;
        Ok(template)
    }

    /// How the model of this template writes thinking and tool calls.
    pub fn dialect(&self) -> Dialect {
        Dialect::of_template(&self.source)
    }

    /// Messages of the OpenAI API as this template wants them: content and arguments in the form that it prints, calls one by
    /// one and system messages at the beginning where it takes no others.
    pub fn adapted(&self, messages: &[serde_json::Value]) -> Vec<serde_json::Value> {
        self.expectations.get_or_init(|| Expectations::of(self)).meet(messages)
    }

    /// Renders `prompt`; the messages are first prepared as `apply_chat_template` prepares them.
    ///
    /// # Errors
    /// [`TemplateError::Raised`] where the template refuses the messages, [`TemplateError::Engine`] where it fails on
    /// them or exceeds a bound.
    pub fn render(&self, prompt: &Prompt<'_>) -> Result<String, TemplateError> {
        on_deep_stack(|| {
            BoundedText::written_by(|output| {
                self.parsed()?.render_captured_to(self.variables(prompt), output).map(drop)
            })
            .map_err(|error| render_error(&error))
        })
    }

    /// Parses the source, which takes less than a millisecond: the engine has no compiled form that owns its source.
    fn parsed(&self) -> Result<Template<'_, '_>, Error> {
        self.environment.template_from_named_str(NAME, &self.source)
    }

    fn variables(&self, prompt: &Prompt<'_>) -> Value {
        let now = prompt.now;
        let tokens = [("bos_token", &self.bos_token), ("eos_token", &self.eos_token)];
        let tokens =
            tokens.into_iter().filter_map(|(name, token)| Some((name, Value::from(token.as_ref()?))));
        let kwargs = prompt.kwargs.iter().map(|(name, value)| (name.as_str(), Value::from_serialize(value)));
        let named = [
            ("messages", Value::from_serialize(messages::prepared(prompt.messages))),
            ("tools", Value::from_serialize(prompt.tools)),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(prompt.add_generation_prompt)),
            ("strftime_now", Value::from_function(move |format: &str| strftime(now, format))),
        ];
        tokens.chain(kwargs).chain(named).collect()
    }
}

/// The Jinja dialect of Hugging Face, without a template in it.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(MAX_INSTRUCTIONS));
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_formatter(|output, _, value| python::write_str(output, value));
    environment.set_unknown_method_callback(python::call_method);
    environment.add_filter("string", python::string);
    environment.add_filter("tojson", tojson::tojson);
    environment.add_test("iterable", python::is_iterable);
    environment.add_test("sequence", python::is_sequence);
    environment.add_function("raise_exception", raise_exception);
    environment
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let message = python::to_str(message)?;
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn strftime(now: DateTime, format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, now).map_err(|error| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?})")).with_source(error)
    })
}

fn syntax_error(error: &Error) -> TemplateError {
    TemplateError::Syntax { line: error.line().unwrap_or(1), message: describe(error) }
}

/// The template's own words where it raised them, however deep the engine wrapped them.
fn render_error(error: &Error) -> TemplateError {
    match causes(error).find_map(|cause| cause.downcast_ref::<Raised>()) {
        Some(Raised(message)) => TemplateError::Raised { message: message.clone() },
        None => {
            let place = error.line().map(|line| format!("line {line}: ")).unwrap_or_default();
            TemplateError::Engine { message: place + &describe(error) }
        }
    }
}

/// Kind, detail and causes of `error` in one line, without the template's name.
fn describe(error: &Error) -> String {
    let mut text = error.kind().to_string();
    for part in error.detail().map(String::from).into_iter().chain(causes(error).map(ToString::to_string)) {
        text.push_str(": ");
        text.push_str(&part);
    }
    text
}

fn causes(error: &Error) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(error.source(), |&cause| cause.source())
}
