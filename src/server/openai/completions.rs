//! `POST /v1/completions`: texts or tokens that go on as they are, without a chat template.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{Head, failed, finish_reason, logprobs, take_stream, usage::usage};
use crate::server::{
    Server,
    answers::{Answers, Finish, Piece, TokenLogprob},
    ask::{Ask, Drawing, MOST_CHOICES, Prompt},
    blocking,
    body::Body,
    error::ApiError,
    fields::{Fields, shown, wrong},
    journal::Ticket,
    sse::{self, Frames, Voice},
};

/// Tokens beside the drawn one whose log-probabilities a client may have.
const MOST_LOGPROBS: u64 = 20;

/// What one may be continued from.
enum Source {
    Text(String),
    Tokens(Vec<u32>),
}

/// Continues prompts.
///
/// # Errors
/// The first field that cannot be honoured, or what the service refuses.
pub(in crate::server) async fn answer(
    State(server): State<Arc<Server>>,
    Extension(ticket): Extension<Arc<Ticket>>,
    Body(mut fields): Body,
) -> Result<Response, ApiError> {
    let head = Head::take("cmpl-", &mut fields, &server)?;
    let (stream, include_usage) = take_stream(&mut fields)?;
    let vocab = server.model().tokenizer().vocab_size();
    let sources = sources(&mut fields, vocab)?;
    let mut drawing = Drawing::take(&mut fields, server.model().generation(), &["max_tokens"], "stop")?;
    drawing.take_n(&mut fields)?;
    drawing.take_logit_bias(&mut fields, vocab)?;
    if sources.len() * drawing.n > MOST_CHOICES {
        let message = format!(
            "prompt has {} entries with n = {}: {MOST_CHOICES} answers at most",
            sources.len(),
            drawing.n
        );
        return Err(ApiError::field("prompt", message));
    }
    drawing.logprobs = match fields.take::<u64>("logprobs")? {
        Some(n) if n > MOST_LOGPROBS => {
            return Err(wrong("logprobs", &n.to_string(), &format!("from 0 to {MOST_LOGPROBS}")));
        }
        n => n.map(|n| n as usize),
    };
    fields.refuse("echo", &[json!(false)], "the prompt is not sent back: put it in front of the answer")?;
    fields.refuse("suffix", &[json!("")], "this server continues texts, and fills no gaps")?;
    fields.refuse("best_of", &[json!(1), json!(drawing.n)], "answers are not compared: use n")?;
    fields.refuse("response_format", &[json!({ "type": "text" })], "it is for /v1/chat/completions")?;
    fields.skip(&["user", "metadata"]);
    fields.finish()?;
    let asked = server.clone();
    let prompts = blocking(move || {
        let prompts = sources.into_iter().map(|source| {
            let tokens = match source {
                Source::Text(text) => asked.model().encode(&text, true, "prompt")?,
                Source::Tokens(tokens) => tokens,
            };
            Ok(Prompt { tokens, anchors: Vec::new() })
        });
        prompts.collect::<Result<Vec<_>, ApiError>>()
    })
    .await?;
    let mut answers =
        Ask { prompts, drawing, reading: None, constraint: None }.submit(&server, ticket.clone())?;
    if stream {
        ticket.streams();
        let choices = (0..answers.n_choices()).map(|_| Pending::default()).collect();
        let voice = CompletionVoice { head, include_usage, choices };
        return Ok(sse::response(answers, voice, server.settings().keep_alive));
    }
    let choices = answers.whole().await?.into_iter().enumerate().map(|(index, whole)| {
        let logprobs = whole.logprobs.map(|tokens| logprobs::completion(&tokens, 0));
        let (text, reason) = (whole.answered.content, finish_reason(&whole.finish));
        json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": reason })
    });
    let mut body = head.object("text_completion");
    body["choices"] = choices.collect();
    body["usage"] = usage(answers.taken());
    Ok(Json(body).into_response())
}

/// One text, several, the tokens of one, or of several.
fn sources(fields: &mut Fields, vocab: usize) -> Result<Vec<Source>, ApiError> {
    let words = "a text, tokens, or an array of one of them";
    let refused = |found: &Value| wrong("prompt", &shown(found), words);
    let tokens = |ids: &[Value]| -> Result<Source, ApiError> {
        let ids = ids.iter().map(|id| {
            let token = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < vocab);
            token.ok_or_else(|| {
                wrong("prompt", &format!("with {}", shown(id)), &format!("of token ids below {vocab}"))
            })
        });
        ids.collect::<Result<_, _>>().map(Source::Tokens)
    };
    match fields.require::<Value>("prompt")? {
        Value::String(text) => Ok(vec![Source::Text(text)]),
        Value::Array(items) => match items.first() {
            None => Err(ApiError::field("prompt", "prompt is empty: give a text")),
            Some(Value::Number(_)) => Ok(vec![tokens(&items)?]),
            Some(_) => {
                let sources = items.iter().map(|item| match item {
                    Value::String(text) => Ok(Source::Text(text.clone())),
                    Value::Array(ids) => tokens(ids),
                    other => Err(refused(other)),
                });
                sources.collect()
            }
        },
        other => Err(refused(&other)),
    }
}

/// What the next chunk of a choice takes along.
#[derive(Default)]
struct Pending {
    logprobs: Vec<TokenLogprob>,
    /// Characters of the text so far.
    offset: usize,
}

struct CompletionVoice {
    head: Head,
    include_usage: bool,
    choices: Vec<Pending>,
}

impl CompletionVoice {
    fn chunk(&mut self, index: usize, text: &str, finish: Option<&Finish>, frames: &mut Frames) {
        let pending = &mut self.choices[index];
        let tokens = std::mem::take(&mut pending.logprobs);
        let logprobs = (!tokens.is_empty()).then(|| logprobs::completion(&tokens, pending.offset));
        pending.offset += text.chars().count();
        let mut chunk = self.head.object("text_completion");
        let reason = finish.map(finish_reason);
        chunk["choices"] =
            json!([{ "index": index, "text": text, "logprobs": logprobs, "finish_reason": reason }]);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        frames.data(&chunk);
    }
}

impl Voice for CompletionVoice {
    fn begin(&mut self, frames: &mut Frames) {
        frames.comment("begins");
    }

    fn logprob(&mut self, choice: usize, logprob: TokenLogprob) {
        self.choices[choice].logprobs.push(logprob);
    }

    fn piece(&mut self, choice: usize, piece: Piece, frames: &mut Frames) {
        if let Piece::Content(text) = piece {
            self.chunk(choice, &text, None, frames);
        }
    }

    fn end(&mut self, choice: usize, finish: Finish, frames: &mut Frames) {
        self.chunk(choice, "", Some(&finish), frames);
    }

    fn close(&mut self, answers: &Answers, frames: &mut Frames) {
        self.head.close("text_completion", self.include_usage, answers, frames);
    }

    fn failed(&mut self, error: &ApiError, frames: &mut Frames) {
        failed(error, frames);
    }

    fn keep_alive(&mut self, frames: &mut Frames) {
        frames.comment("keep-alive");
    }
}
