//! [`Reader`]: the text of an answer, in pieces of any length, becomes thinking, content and tool calls.
//!
//! What was said in which piece of text makes no difference: only what may become a marker is held back. A call that
//! does not begin as its dialect wants is text. It knows neither tokens nor the API that the pieces go to.

mod pieces;
mod tags;
mod unread;

use serde_json::Value;

use super::{
    dialect::{Dialect, Form, Harmony},
    tools::Tools,
};
pub(super) use pieces::Pieces;
pub use pieces::{Answered, Piece, ToolCall};
use tags::Tags;
pub(super) use unread::{Found, Miss, Peek, Unread};

/// Reads one answer.
pub struct Reader {
    form: FormReader,
    unread: Unread,
    pieces: Pieces,
    tools: Option<Tools>,
}

/// The two ways in which answers are built.
enum FormReader {
    Tags(Tags),
    Harmony(Harmony),
}

impl Reader {
    /// A reader of what a model writes behind `prompt`, the rendered text, which may end inside of thinking.
    ///
    /// `tools` are the definitions that the model may call (in the form of the OpenAI API); without any, or where the
    /// request forbids calls, `None`: then what looks like a call is content. `request` makes the calls' ids unique where
    /// the model gives none: they are `call_REQUEST_INDEX`.
    pub fn new(dialect: Dialect, prompt: &str, tools: Option<&[Value]>, request: &str) -> Self {
        let form = match dialect.form() {
            Form::Tags(syntax) => FormReader::Tags(Tags::new(syntax, prompt)),
            Form::Harmony => FormReader::Harmony(Harmony::new(prompt)),
        };
        Reader {
            form,
            unread: Unread::default(),
            pieces: Pieces::new(request),
            tools: tools.filter(|tools| !tools.is_empty()).map(Tools::new),
        }
    }

    /// Takes more of the answer, and returns what is now certain.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.unread.push(text);
        self.read();
        self.pieces.take()
    }

    /// Ends the answer, and returns what was held back. A call that is not whole ends where the answer does: its
    /// arguments are then no valid JSON.
    pub fn finish(&mut self) -> Vec<Piece> {
        self.unread.end();
        self.read();
        self.pieces.take()
    }

    fn read(&mut self) {
        match &mut self.form {
            FormReader::Tags(tags) => tags.read(&mut self.unread, self.tools.as_ref(), &mut self.pieces),
            FormReader::Harmony(form) => form.read(&mut self.unread, self.tools.as_ref(), &mut self.pieces),
        }
    }
}

#[cfg(test)]
mod tests;
