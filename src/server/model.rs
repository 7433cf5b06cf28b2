//! [`ServedModel`]: the text side of the model that is served: from messages to tokens. It knows no weights.

use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value};

use super::{
    error::{ApiError, Kind},
    grammar::Grammars,
    journal::unix_seconds,
};
use crate::{
    chat::{
        dialect::Dialect,
        template::{ChatTemplate, Prompt, TemplateError},
    },
    formats::{generation_config::GenerationConfig, tokenizer::Tokenizer},
    model_files::{ModelFiles, ModelFilesError},
};

/// A model's tokenizer, template and generation defaults.
pub struct ServedModel {
    files: Arc<ModelFiles>,
    created: u64,
    /// Made when the first request needs one.
    grammars: OnceLock<Result<Grammars, ApiError>>,
}

impl ServedModel {
    /// The text side of a model.
    ///
    /// # Errors
    /// Where it has no tokenizer.
    pub fn new(files: Arc<ModelFiles>) -> Result<Self, ModelFilesError> {
        files.tokenizer()?;
        Ok(ServedModel { files, created: unix_seconds() as u64, grammars: OnceLock::new() })
    }

    /// Seconds since 1970 when it began to be served.
    pub(super) fn created(&self) -> u64 {
        self.created
    }

    /// Bytes of the weights.
    pub(super) fn total_bytes(&self) -> u64 {
        self.files.checkpoint().total_bytes()
    }

    /// Text to tokens and back.
    pub(super) fn tokenizer(&self) -> &Tokenizer {
        self.files.tokenizer().expect("a served model has one")
    }

    /// What the checkpoint says about how to generate.
    pub(super) fn generation(&self) -> &GenerationConfig {
        self.files.generation()
    }

    fn template(&self) -> Result<&ChatTemplate, ApiError> {
        self.files.template().ok_or_else(|| {
            ApiError::new(Kind::Invalid, "this model has no chat template: use /v1/completions")
        })
    }

    /// How the model writes thinking and calls.
    ///
    /// # Errors
    /// A model without a template.
    pub(super) fn dialect(&self) -> Result<Dialect, ApiError> {
        self.template().map(ChatTemplate::dialect)
    }

    /// The text in front of the assistant's next words. `messages` and `tools` have the form of OpenAI's API, `kwargs` are
    /// further variables of the template.
    ///
    /// # Errors
    /// Messages that the template refuses.
    pub(super) fn render(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        kwargs: &Map<String, Value>,
    ) -> Result<String, ApiError> {
        let now = jiff::Zoned::now().datetime();
        let prompt = Prompt { messages, tools, add_generation_prompt: true, kwargs, now };
        let rendered = self.template()?.render(&prompt);
        rendered.map_err(|error: TemplateError| ApiError::field("messages", error.to_string()))
    }

    /// Whether the template makes another prompt of the one set of variables than of the other.
    pub(super) fn tells_apart(&self, a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
        let messages = [serde_json::json!({ "role": "user", "content": "hi" })];
        self.render(&messages, None, a) != self.render(&messages, None, b)
    }

    /// Grammars over the model's tokens.
    pub(super) fn grammars(&self) -> Result<&Grammars, ApiError> {
        let made =
            self.grammars.get_or_init(|| Grammars::new(self.tokenizer(), &self.generation().eos_token_ids));
        made.as_ref().map_err(Clone::clone)
    }

    /// The tokens of a text. `param` is the field that it came from.
    ///
    /// # Errors
    /// A text without an encoding.
    pub(super) fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        param: &str,
    ) -> Result<Vec<u32>, ApiError> {
        self.tokenizer()
            .encode(text, add_special_tokens)
            .map_err(|error| ApiError::field(param, error.to_string()))
    }
}
