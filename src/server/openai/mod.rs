//! OpenAI's protocol.

pub(super) mod chat;
pub(super) mod completions;
mod logprobs;
mod messages;
pub(super) mod responses;
mod tools;
mod usage;

use std::sync::Arc;

pub(super) use self::{messages::messages, tools::tools};
use axum::{
    Json,
    extract::{Path, State},
};
use serde_json::{Value, json};

use super::{
    Server,
    answers::{Answers, Finish},
    ask::fresh_id,
    error::{ApiError, Protocol},
    fields::Fields,
    journal::unix_seconds,
    sse::Frames,
};

/// What every object of an answer begins with.
struct Head {
    id: String,
    created: u64,
    model: String,
}

impl Head {
    /// Takes the model's name, which is echoed.
    ///
    /// # Errors
    /// No name, or another than the model has where that is not allowed.
    fn take(prefix: &str, fields: &mut Fields, server: &Server) -> Result<Self, ApiError> {
        let model: String = fields.require("model")?;
        server.check_model(&model)?;
        Ok(Head { id: fresh_id(prefix), created: unix_seconds() as u64, model })
    }

    fn object(&self, object: &str) -> Value {
        json!({ "id": self.id, "object": object, "created": self.created, "model": self.model })
    }

    /// Ends a stream of such objects, with one about usage where that is wanted.
    fn close(&self, object: &str, include_usage: bool, answers: &Answers, frames: &mut Frames) {
        if include_usage {
            let mut chunk = self.object(object);
            chunk["choices"] = json!([]);
            chunk["usage"] = usage::usage(answers.taken());
            frames.data(&chunk);
        }
        frames.done();
    }
}

/// Ends a stream with an error.
fn failed(error: &ApiError, frames: &mut Frames) {
    frames.data(&error.body(Protocol::OpenAi));
    frames.done();
}

/// Whether the answer is streamed, and whether the last chunk is about usage.
fn take_stream(fields: &mut Fields) -> Result<(bool, bool), ApiError> {
    let stream: bool = fields.take("stream")?.unwrap_or_default();
    let Some(mut options) = fields.object("stream_options")? else { return Ok((stream, false)) };
    if !stream {
        return Err(ApiError::field(
            "stream_options",
            "stream_options is only for answers with \"stream\": true",
        ));
    }
    let include_usage = options.take("include_usage")?.unwrap_or_default();
    options.skip(&["include_obfuscation"]);
    options.finish()?;
    Ok((stream, include_usage))
}

fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Stop | Finish::StopString(_) => "stop",
        Finish::Length => "length",
        Finish::ToolCalls => "tool_calls",
    }
}

/// `GET /v1/models`: the one model, in a form that the clients of both protocols read.
pub(super) async fn models(State(server): State<Arc<Server>>) -> Json<Value> {
    let name = server.settings().model_name.as_str();
    let data = [card(&server)];
    Json(json!({ "object": "list", "data": data, "has_more": false, "first_id": name, "last_id": name }))
}

/// `GET /v1/models/{name}`
///
/// # Errors
/// Another name.
pub(super) async fn model(
    State(server): State<Arc<Server>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if name == server.settings().model_name { Ok(Json(card(&server))) } else { Err(server.no_such_model()) }
}

/// The model, and how much it can take as it is served.
fn card(server: &Server) -> Value {
    let context = server.running().ok().map(|service| service.context());
    let created = server.model().created();
    let created_at = jiff::Timestamp::from_second(created as i64).unwrap_or_default();
    json!({
        "id": server.settings().model_name,
        "object": "model",
        "created": created,
        "owned_by": "freetoken",
        "type": "model",
        "display_name": server.settings().model_name,
        "created_at": created_at.to_string(),
        "max_model_len": context,
        "context_length": context,
    })
}
