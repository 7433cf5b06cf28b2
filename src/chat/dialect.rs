//! Dialects: how a family of models writes thinking and tool calls. One dialect a file, which holds its tags and reads the
//! head of a call; how arguments are read is shared where dialects share it. A dialect knows no API, and a reader of
//! answers ([`super::reader`]) knows no family.

mod deepseek;
mod dsml;
mod gemma;
mod glm;
mod harmony;
mod hermes;
mod json_arguments;
mod kimi;
mod lfm;
mod llama;
mod minimax_m2;
mod minimax_m3;
mod mistral;
mod qwen_xml;
mod tagged_arguments;
mod typed;

use std::fmt;

use super::{
    reader::{Miss, Peek, Unread},
    tools::Tools,
};
use crate::formats::tokenizer::Tokenizer;
pub(super) use harmony::Harmony;

/// A dialect.
#[derive(Clone, Copy)]
pub struct Dialect(&'static Entry);

/// A dialect's place in the list.
struct Entry {
    name: &'static str,
    /// Whether a chat template, by its source, teaches this dialect.
    is_of: fn(&str) -> bool,
    /// Markers that may be special tokens, which a detokenizer must not leave out.
    tokens: &'static [&'static str],
    form: Form,
}

/// The two ways in which answers are built.
#[derive(Clone, Copy)]
pub(super) enum Form {
    /// Text with tags in it.
    Tags(&'static Syntax),
    /// A sequence of messages with headers.
    Harmony,
}

/// Tags, and how a call is written.
pub(super) struct Syntax {
    /// Before and behind thinking.
    pub(super) thinking: (&'static str, &'static str),
    /// What may open a call, wherever it stands.
    pub(super) openers: &'static [&'static str],
    /// What may open a call as the first thing that is said.
    pub(super) first_openers: &'static [&'static str],
    /// What may stand behind the last of several calls.
    pub(super) block_ends: &'static [&'static str],
    /// Reads a call from its opener, which is there only in front of the first of several calls, up to its arguments.
    pub(super) call: fn(&mut Peek<'_>, &Tools) -> Result<Call, Miss>,
}

/// The head of a call.
pub(super) struct Call {
    /// The function.
    pub(super) name: String,
    /// The call's id, where the model gives one.
    pub(super) id: Option<String>,
    /// Reads what follows.
    pub(super) arguments: Box<dyn Arguments>,
}

/// Reads the arguments of a call, and what marks their end.
pub(super) trait Arguments: Send {
    /// Reads on and appends to `json` what is certain. Whether the arguments are whole. Where the text has ended all is
    /// read that belongs to them.
    fn read(&mut self, unread: &mut Unread, json: &mut String) -> bool;
}

/// All dialects; the first that a template teaches is its own.
static DIALECTS: [&Entry; 13] = [
    &harmony::ENTRY,
    &dsml::ENTRY,
    &deepseek::ENTRY,
    &minimax_m3::ENTRY,
    &minimax_m2::ENTRY,
    &kimi::ENTRY,
    &gemma::ENTRY,
    &mistral::ENTRY,
    &lfm::ENTRY,
    &glm::ENTRY,
    &qwen_xml::ENTRY,
    &llama::ENTRY,
    &hermes::ENTRY,
];

impl Dialect {
    /// The dialect that a chat template's source teaches; Hermes, the most common one, where it teaches none.
    pub fn of_template(source: &str) -> Self {
        Dialect(DIALECTS.into_iter().find(|dialect| (dialect.is_of)(source)).unwrap_or(&hermes::ENTRY))
    }

    /// The dialect of this name.
    pub fn named(name: &str) -> Option<Self> {
        DIALECTS.into_iter().find(|dialect| dialect.name == name).map(Dialect)
    }

    /// All dialects.
    pub fn all() -> impl Iterator<Item = Self> {
        DIALECTS.into_iter().map(Dialect)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Tokens that mean something to a [`super::reader::Reader`]: it must see them even if the tokenizer calls them special,
    /// and no other special token.
    pub fn tokens(self, tokenizer: &Tokenizer) -> Vec<u32> {
        self.0.tokens.iter().filter_map(|token| tokenizer.token_to_id(token)).collect()
    }

    /// What stands before and behind thinking, where tags mark it.
    pub fn thinking(self) -> Option<(&'static str, &'static str)> {
        match self.0.form {
            Form::Tags(syntax) => Some(syntax.thinking),
            Form::Harmony => None,
        }
    }

    pub(super) fn form(self) -> Form {
        self.0.form
    }
}

impl fmt::Debug for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dialect({})", self.name())
    }
}
