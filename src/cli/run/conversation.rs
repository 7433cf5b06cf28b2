//! What was said so far, and the tokens that a model sees of it. It knows no engine and no context.

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};

use crate::{
    chat::{
        dialect::Dialect,
        template::{ChatTemplate, Prompt},
    },
    formats::tokenizer::Tokenizer,
    model_files::ModelFiles,
};

/// Messages for a model with a chat template; for one without, a text that stands alone.
pub(in crate::cli) struct Conversation<'m> {
    tokenizer: &'m Tokenizer,
    template: Option<&'m ChatTemplate>,
    /// The system message, where there is one, then user and assistant in turn.
    messages: Vec<Value>,
    n_system: usize,
}

impl<'m> Conversation<'m> {
    /// One in which nothing was said, except what the model is told by the system message.
    pub(in crate::cli) fn new(files: &'m ModelFiles, system: Option<&str>, raw: bool) -> Result<Self> {
        let template = files.template().filter(|_| !raw);
        ensure!(
            system.is_none() || template.is_some(),
            "{} has no chat template, so it cannot be told a system message: put the text into the prompt",
            files.name()
        );
        let messages: Vec<Value> = system.map(|text| message("system", text)).into_iter().collect();
        Ok(Conversation { tokenizer: files.tokenizer()?, template, n_system: messages.len(), messages })
    }

    /// Whether the model sees more than the last text.
    pub(super) fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// How the model writes what it thinks, where the template says so.
    pub(super) fn dialect(&self) -> Option<Dialect> {
        self.template.map(ChatTemplate::dialect)
    }

    /// Adds what the user says, and without a template forgets the rest.
    pub(in crate::cli) fn ask(&mut self, text: &str) {
        if self.template.is_none() {
            self.messages.clear();
        }
        self.messages.push(message("user", text));
    }

    /// Adds what the model answered, and what it thought before; the template knows what of that to show it again.
    pub(super) fn answered(&mut self, text: &str, reasoning: &str) {
        let mut answer = message("assistant", text);
        if !reasoning.is_empty() {
            answer["reasoning_content"] = json!(reasoning);
        }
        self.messages.push(answer);
    }

    /// Takes the last message back.
    pub(super) fn unsay(&mut self) {
        self.messages.pop();
    }

    /// Questions that have an answer.
    pub(super) fn n_turns(&self) -> usize {
        (self.messages.len() - self.n_system) / 2
    }

    /// Forgets the oldest `n_turns` questions and their answers.
    pub(super) fn forget(&mut self, n_turns: usize) {
        self.messages.drain(self.n_system..self.n_system + 2 * n_turns);
    }

    /// Forgets all but the system message.
    pub(super) fn clear(&mut self) {
        self.messages.truncate(self.n_system);
    }

    /// The tokens in front of the model's next words, as if the oldest `n_left_out` turns had not been.
    pub(in crate::cli) fn tokens(&self, n_left_out: usize) -> Result<Vec<u32>> {
        let Some(template) = self.template else {
            let last = self.messages.last().and_then(|message| message["content"].as_str());
            return Ok(self.tokenizer.encode(last.unwrap_or_default(), true)?);
        };
        let (system, turns) = self.messages.split_at(self.n_system);
        let text = template.render(&Prompt {
            messages: &template.adapted(&[system, &turns[2 * n_left_out..]].concat()),
            tools: None,
            add_generation_prompt: true,
            kwargs: &Map::new(),
            now: jiff::Zoned::now().datetime(),
        })?;
        Ok(self.tokenizer.encode(&text, false)?)
    }
}

fn message(role: &str, text: &str) -> Value {
    json!({ "role": role, "content": text })
}
