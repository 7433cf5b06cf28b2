//! [`ServedModel`]: the text side of the model that is served: from messages to tokens. It knows no weights.

use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value};

use super::{
    ask::Prompt,
    error::{ApiError, Kind},
    grammar::Grammars,
    journal::unix_seconds,
};
use crate::{
    chat::{
        boundaries::{in_tokens, message_ends},
        dialect::Dialect,
        template::{ChatTemplate, Prompt as Rendering, TemplateError},
    },
    formats::{generation_config::GenerationConfig, tokenizer::Tokenizer},
    model_files::{ModelFiles, ModelFilesError},
};

/// Messages at the end of a conversation behind which another may go on otherwise.
const ANCHORED_MESSAGES: usize = 3;

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

    /// The prompt in front of the assistant's next words, in tokens and as text. `messages` and `tools` have the form of
    /// OpenAI's API, `kwargs` are further variables of the template. This may take long.
    ///
    /// # Errors
    /// Messages that the template refuses.
    pub(super) fn prompt(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        kwargs: &Map<String, Value>,
    ) -> Result<(Prompt, String), ApiError> {
        let template = self.template()?;
        let messages = &template.adapted(messages);
        let now = jiff::Zoned::now().datetime();
        let rendering = Rendering { messages, tools, add_generation_prompt: true, kwargs, now };
        let text = template.render(&rendering).map_err(|error| refused(&error))?;
        let tokens = self.encode(&text, false, "messages")?;
        let ends = message_ends(template, &rendering, &text, ANCHORED_MESSAGES);
        let anchors = in_tokens(self.tokenizer(), &text, &tokens, &ends)
            .map_err(|error| ApiError::field("messages", error.to_string()))?;
        Ok((Prompt { tokens, anchors }, text))
    }

    /// Whether the template makes another prompt of the one set of variables than of the other.
    pub(super) fn tells_apart(&self, a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
        let messages = &[serde_json::json!({ "role": "user", "content": "hi" })];
        let now = jiff::civil::DateTime::default();
        let [a, b] = [a, b].map(|kwargs| {
            let rendering = Rendering { messages, tools: None, add_generation_prompt: true, kwargs, now };
            self.template()?.render(&rendering).map_err(|error| refused(&error))
        });
        a != b
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

fn refused(error: &TemplateError) -> ApiError {
    ApiError::field("messages", error.to_string())
}
