//! Says a response in events, each with its number.

use serde_json::{Value, json};

use super::{call_item, finish_response, message_item, reasoning_item, text_part};
use crate::server::{
    answers::{Answers, Finish, Piece},
    ask::fresh_id,
    error::ApiError,
    sse::{Frames, Voice},
};

pub(super) struct ResponseVoice {
    /// The response as it is so far.
    response: Value,
    n_events: u64,
    /// Items that are whole.
    output: Vec<Value>,
    open: Option<Open>,
    finish: Finish,
}

/// An item that goes on.
struct Open {
    id: String,
    kind: Kind,
    /// Its text, or its arguments.
    text: String,
}

enum Kind {
    Reasoning,
    Message,
    Call { id: String, name: String },
}

impl ResponseVoice {
    pub(super) fn new(response: Value) -> Self {
        ResponseVoice { response, n_events: 0, output: Vec::new(), open: None, finish: Finish::Stop }
    }

    fn say(&mut self, kind: &str, mut event: Value, frames: &mut Frames) {
        event["type"] = kind.into();
        event["sequence_number"] = self.n_events.into();
        self.n_events += 1;
        frames.event(kind, &event);
    }

    fn say_response(&mut self, kind: &str, frames: &mut Frames) {
        let event = json!({ "response": self.response });
        self.say(kind, event, frames);
    }

    /// Says something about the item that goes on.
    fn say_of_item(&mut self, kind: &str, mut event: Value, frames: &mut Frames) {
        let Some(open) = &self.open else { return };
        event["item_id"] = open.id.as_str().into();
        event["output_index"] = self.output.len().into();
        self.say(kind, event, frames);
    }

    fn begin_item(&mut self, kind: Kind, frames: &mut Frames) {
        self.end_item("completed", frames);
        let (id, item) = match &kind {
            Kind::Reasoning => {
                let id = fresh_id("rs_");
                let item = json!({ "id": id, "type": "reasoning", "summary": [], "content": [] });
                (id, item)
            }
            Kind::Message => {
                let id = fresh_id("msg_");
                let item = json!({ "id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": [] });
                (id, item)
            }
            Kind::Call { id: call, name } => {
                let id = fresh_id("fc_");
                let item = call_item(&id, call, name, "", "in_progress");
                (id, item)
            }
        };
        let is_message = matches!(kind, Kind::Message);
        self.open = Some(Open { id, kind, text: String::new() });
        let event = json!({ "output_index": self.output.len(), "item": item });
        self.say("response.output_item.added", event, frames);
        if is_message {
            let event = json!({ "content_index": 0, "part": text_part("") });
            self.say_of_item("response.content_part.added", event, frames);
        }
    }

    fn end_item(&mut self, status: &str, frames: &mut Frames) {
        let Some(Open { id, kind, text }) = &self.open else { return };
        let (item, events) = match kind {
            Kind::Reasoning => {
                let done = json!({ "content_index": 0, "text": text });
                (reasoning_item(id, text), vec![("response.reasoning_text.done", done)])
            }
            Kind::Message => {
                let done = json!({ "content_index": 0, "text": text, "logprobs": [] });
                let part = json!({ "content_index": 0, "part": text_part(text) });
                let events = vec![("response.output_text.done", done), ("response.content_part.done", part)];
                (message_item(id, text, status), events)
            }
            Kind::Call { id: call, name } => {
                let done = json!({ "name": name, "arguments": text });
                let events = vec![("response.function_call_arguments.done", done)];
                (call_item(id, call, name, text, status), events)
            }
        };
        for (kind, event) in events {
            self.say_of_item(kind, event, frames);
        }
        let event = json!({ "output_index": self.output.len(), "item": item });
        self.say("response.output_item.done", event, frames);
        self.output.push(item);
        self.open = None;
    }

    fn more(&mut self, kind: &str, mut event: Value, text: String, frames: &mut Frames) {
        event["delta"] = text.as_str().into();
        self.say_of_item(kind, event, frames);
        self.open.iter_mut().for_each(|open| open.text.push_str(&text));
    }
}

impl Voice for ResponseVoice {
    fn begin(&mut self, frames: &mut Frames) {
        self.say_response("response.created", frames);
        self.say_response("response.in_progress", frames);
    }

    fn piece(&mut self, _: usize, piece: Piece, frames: &mut Frames) {
        match piece {
            Piece::Reasoning(text) => {
                if !matches!(self.open, Some(Open { kind: Kind::Reasoning, .. })) {
                    self.begin_item(Kind::Reasoning, frames);
                }
                self.more("response.reasoning_text.delta", json!({ "content_index": 0 }), text, frames);
            }
            Piece::Content(text) => {
                if !matches!(self.open, Some(Open { kind: Kind::Message, .. })) {
                    self.begin_item(Kind::Message, frames);
                }
                let event = json!({ "content_index": 0, "logprobs": [] });
                self.more("response.output_text.delta", event, text, frames);
            }
            Piece::ToolCallBegin { id, name, .. } => self.begin_item(Kind::Call { id, name }, frames),
            Piece::ToolCallArguments { json, .. } => {
                self.more("response.function_call_arguments.delta", json!({}), json, frames);
            }
            Piece::ToolCallEnd { .. } => self.end_item("completed", frames),
        }
    }

    fn end(&mut self, _: usize, finish: Finish, _: &mut Frames) {
        self.finish = finish;
    }

    fn close(&mut self, answers: &Answers, frames: &mut Frames) {
        let incomplete = self.finish == Finish::Length;
        self.end_item(if incomplete { "incomplete" } else { "completed" }, frames);
        self.response["output"] = std::mem::take(&mut self.output).into();
        finish_response(&mut self.response, &self.finish, answers.taken());
        self.say_response(if incomplete { "response.incomplete" } else { "response.completed" }, frames);
    }

    fn failed(&mut self, error: &ApiError, frames: &mut Frames) {
        let code = error.code.unwrap_or("server_error");
        self.response["status"] = "failed".into();
        self.response["error"] = json!({ "code": code, "message": error.message });
        self.response["output"] = std::mem::take(&mut self.output).into();
        self.say_response("response.failed", frames);
    }

    fn keep_alive(&mut self, frames: &mut Frames) {
        // One client counts events and no comments as a sign of life.
        self.say_response("response.in_progress", frames);
    }
}
