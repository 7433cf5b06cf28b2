//! A streamed answer: server-sent events, made from pieces by the voice of a protocol, with a sign of life where the model is
//! silent. A client that leaves drops the stream, and with it the request.

use std::{convert::Infallible, fmt::Write as _, time::Duration};

use axum::{
    body::Body,
    http::{HeaderValue, header},
    response::Response,
};
use futures_util::stream;
use serde_json::Value;
use tokio::time::timeout;

use super::{
    answers::{Answers, Finish, Heard, Piece, TokenLogprob},
    error::ApiError,
};

/// Events that are sent together.
#[derive(Debug, Default)]
pub(super) struct Frames(String);

impl Frames {
    /// An event without a name.
    pub(super) fn data(&mut self, value: &Value) {
        self.write(format_args!("data: {value}\n\n"));
    }

    /// An event with a name.
    pub(super) fn event(&mut self, name: &str, value: &Value) {
        self.write(format_args!("event: {name}\ndata: {value}\n\n"));
    }

    /// The last event of OpenAI's streams.
    pub(super) fn done(&mut self) {
        self.write(format_args!("data: [DONE]\n\n"));
    }

    /// A line that clients skip.
    pub(super) fn comment(&mut self, text: &str) {
        self.write(format_args!(": {text}\n\n"));
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        self.0.write_fmt(text).expect("a string takes all");
    }
}

/// How a protocol says what happens.
pub(super) trait Voice: Send + 'static {
    /// What comes before the first token.
    fn begin(&mut self, frames: &mut Frames);

    /// A token's log-probabilities, in front of its pieces.
    fn logprob(&mut self, _choice: usize, _logprob: TokenLogprob) {}

    /// A piece of a choice.
    fn piece(&mut self, choice: usize, piece: Piece, frames: &mut Frames);

    /// The end of a choice.
    fn end(&mut self, choice: usize, finish: Finish, frames: &mut Frames);

    /// The end of all choices.
    fn close(&mut self, answers: &Answers, frames: &mut Frames);

    /// The end, where something failed.
    fn failed(&mut self, error: &ApiError, frames: &mut Frames);

    /// A sign of life.
    fn keep_alive(&mut self, frames: &mut Frames);
}

struct Speech<V> {
    answers: Answers,
    voice: V,
    keep_alive: Duration,
    state: State,
}

#[derive(PartialEq)]
enum State {
    Fresh,
    Speaking,
    Over,
}

/// Speaks answers in a protocol's voice.
pub(super) fn response(answers: Answers, voice: impl Voice, keep_alive: Duration) -> Response {
    let speech = Speech { answers, voice, keep_alive, state: State::Fresh };
    let frames = stream::unfold(speech, |mut speech| async {
        let frames = speech.next().await?;
        Some((Ok::<_, Infallible>(frames.0), speech))
    });
    let mut response = Response::new(Body::from_stream(frames));
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // Asks a proxy not to wait for more.
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    response.headers_mut().extend(headers);
    response
}

impl<V: Voice> Speech<V> {
    /// What is to be sent next, `None` behind the end.
    async fn next(&mut self) -> Option<Frames> {
        let mut frames = Frames::default();
        if self.state == State::Fresh {
            self.state = State::Speaking;
            self.voice.begin(&mut frames);
        }
        while frames.0.is_empty() {
            if self.state == State::Over {
                return None;
            }
            match timeout(self.keep_alive, self.answers.next()).await {
                Err(_) => self.voice.keep_alive(&mut frames),
                Ok(Some(Heard::Logprob(choice, logprob))) => self.voice.logprob(choice, logprob),
                Ok(Some(Heard::Piece(choice, piece))) => self.voice.piece(choice, piece, &mut frames),
                Ok(Some(Heard::End(choice, finish))) => self.voice.end(choice, finish, &mut frames),
                Ok(Some(Heard::Failed(error))) => {
                    self.state = State::Over;
                    self.voice.failed(&error, &mut frames);
                }
                Ok(None) => {
                    self.state = State::Over;
                    self.voice.close(&self.answers, &mut frames);
                }
            }
        }
        Some(frames)
    }
}
