//! One answer: tokens in, text out, and where it ends.

use std::fmt;

use super::{
    detokenizer::Detokenizer,
    stop::{StopOutcome, StopStrings},
};
use crate::formats::tokenizer::{Tokenizer, TokenizerError};

/// Why an answer ended, in the words of the OpenAI API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended it, or a stop string did.
    Stop,
    /// The limit of tokens, or the end of the context.
    Length,
    /// The user stopped it.
    Cancelled,
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        })
    }
}

/// Turns drawn tokens into the text of one answer.
pub struct Answer {
    detokenizer: Detokenizer,
    stop: StopStrings,
    eos: Vec<u32>,
    max_tokens: usize,
    n_tokens: usize,
    text: String,
    finish: Option<FinishReason>,
}

impl Answer {
    /// An empty answer. `eos` are the tokens that end it; they are not part of its text.
    pub fn new(eos: &[u32], stop: StopStrings, max_tokens: usize) -> Self {
        Answer {
            detokenizer: Detokenizer::new(true),
            stop,
            eos: eos.to_vec(),
            max_tokens,
            n_tokens: 0,
            text: String::new(),
            finish: None,
        }
    }

    /// The same, where these tokens are text although they are special: those that a dialect reads.
    pub fn showing(mut self, special: Vec<u32>) -> Self {
        self.detokenizer = self.detokenizer.showing(special);
        self
    }

    /// Adds a drawn token and returns the text that is now certain.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<&str, TokenizerError> {
        let start = self.text.len();
        self.n_tokens += 1;
        if self.eos.contains(&token) {
            self.end(FinishReason::Stop);
            return Ok(&self.text[start..]);
        }
        match self.stop.push(self.detokenizer.push(tokenizer, token)?) {
            StopOutcome::Continue(text) => self.text.push_str(&text),
            StopOutcome::Stopped { text, .. } => {
                self.text.push_str(&text);
                self.finish = Some(FinishReason::Stop);
            }
        }
        if self.finish.is_none() && self.n_tokens >= self.max_tokens {
            self.end(FinishReason::Length);
        }
        Ok(&self.text[start..])
    }

    /// Ends the answer from outside and returns the text that was held back.
    pub fn cut(&mut self, reason: FinishReason) -> &str {
        let start = self.text.len();
        if self.finish.is_none() {
            self.end(reason);
        }
        &self.text[start..]
    }

    fn end(&mut self, reason: FinishReason) {
        let rest = self.detokenizer.flush().to_owned();
        match self.stop.push(&rest) {
            StopOutcome::Continue(text) => {
                self.text.push_str(&text);
                self.text.push_str(&self.stop.flush());
            }
            StopOutcome::Stopped { text, .. } => self.text.push_str(&text),
        }
        self.finish = Some(reason);
    }

    /// Why it ended; `None` while it goes on.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    /// The text so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Tokens so far, the one that ended it included.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }
}
