//! [`Piece`]: what an answer consists of, as it comes; and [`Answered`], all pieces put together.

/// A part of an answer. The pieces of a call follow each other: one `ToolCallBegin`, any number of `ToolCallArguments`, one
/// `ToolCallEnd`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// More of what the model thinks.
    Reasoning(String),
    /// More of what it says.
    Content(String),
    /// It calls a tool.
    ToolCallBegin {
        /// Calls of this answer before this one.
        index: usize,
        /// Unique within the conversation.
        id: String,
        /// The function, which may be none of those that were offered.
        name: String,
    },
    /// More of the call's arguments.
    ToolCallArguments {
        /// As in `ToolCallBegin`.
        index: usize,
        /// Together they are the text of a JSON object, unless the model wrote something else.
        json: String,
    },
    /// The call is over.
    ToolCallEnd {
        /// As in `ToolCallBegin`.
        index: usize,
    },
}

/// A whole call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// Unique within the conversation.
    pub id: String,
    /// The function.
    pub name: String,
    /// The text of a JSON object, unless the model wrote something else.
    pub arguments: String,
}

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answered {
    /// What the model thought.
    pub reasoning: String,
    /// What it said.
    pub content: String,
    /// What it called, in order.
    pub tool_calls: Vec<ToolCall>,
}

impl Answered {
    /// Adds what came.
    pub fn extend(&mut self, pieces: impl IntoIterator<Item = Piece>) {
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => self.reasoning.push_str(&text),
                Piece::Content(text) => self.content.push_str(&text),
                Piece::ToolCallBegin { id, name, .. } => {
                    self.tool_calls.push(ToolCall { id, name, arguments: String::new() });
                }
                Piece::ToolCallArguments { index, json } => self.tool_calls[index].arguments.push_str(&json),
                Piece::ToolCallEnd { .. } => {}
            }
        }
    }
}

/// Pieces that wait to be taken; neighbours of one kind are one piece.
pub(in crate::chat) struct Pieces {
    request: String,
    n_calls: usize,
    waiting: Vec<Piece>,
}

impl Pieces {
    pub(super) fn new(request: &str) -> Self {
        Pieces { request: request.into(), n_calls: 0, waiting: Vec::new() }
    }

    pub(super) fn take(&mut self) -> Vec<Piece> {
        std::mem::take(&mut self.waiting)
    }

    pub(in crate::chat) fn reasoning(&mut self, text: &str) {
        match self.waiting.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Reasoning(last)) => last.push_str(text),
            _ => self.waiting.push(Piece::Reasoning(text.into())),
        }
    }

    pub(in crate::chat) fn content(&mut self, text: &str) {
        match self.waiting.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Content(last)) => last.push_str(text),
            _ => self.waiting.push(Piece::Content(text.into())),
        }
    }

    pub(in crate::chat) fn begin_call(&mut self, name: String, id: Option<String>) {
        let index = self.n_calls;
        let id = id.unwrap_or_else(|| format!("call_{}_{index}", self.request));
        self.waiting.push(Piece::ToolCallBegin { index, id, name });
        self.n_calls += 1;
    }

    /// More arguments of the call that began last.
    pub(in crate::chat) fn arguments(&mut self, text: &str) {
        match self.waiting.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::ToolCallArguments { json, .. }) => json.push_str(text),
            _ => {
                let index = self.n_calls - 1;
                self.waiting.push(Piece::ToolCallArguments { index, json: text.into() });
            }
        }
    }

    pub(in crate::chat) fn end_call(&mut self) {
        self.waiting.push(Piece::ToolCallEnd { index: self.n_calls - 1 });
    }
}
