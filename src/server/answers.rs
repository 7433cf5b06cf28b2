//! [`Answers`]: the events of one request, or of the `n` requests that a client wants from one prompt, as pieces of text with
//! an end. It knows no protocol. Dropping it cancels what is not finished.

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

use super::{
    Server,
    error::{ApiError, Kind, Protocol},
    journal::Ticket,
};
use crate::{
    chat::{
        detokenizer::Detokenizer,
        reader::Reader,
        stop::{StopOutcome, StopStrings},
    },
    formats::tokenizer::{Tokenizer, TokenizerError},
    scheduler::{Event, Events, Logprob, Stop, Token, Usage},
};

pub(super) use crate::chat::reader::{Answered, Piece};

/// Why a choice ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Finish {
    /// The model ended it.
    Stop,
    /// A stop string did.
    StopString(String),
    /// The limit of tokens, or the end of the context.
    Length,
    /// The model waits for the results of its calls.
    ToolCalls,
}

/// A token with what was asked for beside it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TokenLogprob {
    /// The bytes of the token, which may be a part of a character.
    pub(super) bytes: Vec<u8>,
    /// At most 0.
    pub(super) logprob: f32,
    /// The likeliest tokens of its place, best first.
    pub(super) top: Vec<(Vec<u8>, f32)>,
}

/// What happens, in order.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Heard {
    /// A token was drawn; only where log-probabilities were asked for.
    Logprob(usize, TokenLogprob),
    /// A choice goes on.
    Piece(usize, Piece),
    /// A choice ended.
    End(usize, Finish),
    /// Nothing more comes.
    Failed(ApiError),
}

/// A whole choice.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Whole {
    /// Thinking, content and calls.
    pub(super) answered: Answered,
    /// Of every token but the one that ended it; `None` where they were not asked for.
    pub(super) logprobs: Option<Vec<TokenLogprob>>,
    /// Why it ended.
    pub(super) finish: Finish,
}

/// Tokens that answers took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Taken {
    /// As a service counts them, the prompt once and the tokens of all choices.
    pub(super) usage: Usage,
    /// Tokens of thinking.
    pub(super) reasoning_tokens: usize,
}

/// How the tokens of a choice become text.
pub(super) struct Reading {
    /// Tokens of the prompt.
    pub(super) prompt_tokens: usize,
    /// Whether this is the first choice of a prompt, with which the prompt is counted.
    pub(super) is_first: bool,
    /// Divides the text into pieces; `None` takes all of it as content.
    pub(super) reader: Option<Reader>,
    /// Tokens that the reader must see although they may be special.
    pub(super) markers: Vec<u32>,
    /// Whether the first call ends it.
    pub(super) one_call: bool,
    /// Texts of the content that end it.
    pub(super) stop: StopStrings,
    /// Tokens that end it and are no text.
    pub(super) eos: Vec<u32>,
}

/// All choices of a request.
pub(super) struct Answers {
    server: Arc<Server>,
    choices: Vec<Choice>,
    heard: VecDeque<Heard>,
    ticket: Arc<Ticket>,
}

struct Choice {
    events: Events,
    reading: Reading,
    detokenizer: Detokenizer,
    last_token: Option<u32>,
    has_calls: bool,
    taken: Taken,
    /// Tokens of which no piece came yet.
    n_unread: usize,
    finish: Option<Finish>,
}

impl Answers {
    /// Answers of which nothing was heard yet.
    pub(super) fn new(server: Arc<Server>, choices: Vec<(Events, Reading)>, ticket: Arc<Ticket>) -> Self {
        let choices = choices.into_iter().map(|(events, reading)| Choice {
            detokenizer: Detokenizer::new(true).showing(reading.markers.clone()),
            events,
            last_token: None,
            has_calls: false,
            taken: Taken {
                usage: Usage { prompt_tokens: reading.prompt_tokens, ..Usage::default() },
                reasoning_tokens: 0,
            },
            n_unread: 0,
            finish: None,
            reading,
        });
        Answers { server, choices: choices.collect(), heard: VecDeque::new(), ticket }
    }

    /// What happens next; `None` when all choices have ended. Nothing is lost where the future is dropped.
    pub(super) async fn next(&mut self) -> Option<Heard> {
        poll_fn(|context| self.poll(context)).await
    }

    /// All of it.
    ///
    /// # Errors
    /// Where a choice failed.
    pub(super) async fn whole(&mut self) -> Result<Vec<Whole>, ApiError> {
        let empty = || Whole { answered: Answered::default(), logprobs: None, finish: Finish::Stop };
        let mut choices: Vec<Whole> = self.choices.iter().map(|_| empty()).collect();
        while let Some(heard) = self.next().await {
            match heard {
                Heard::Logprob(choice, logprob) => {
                    choices[choice].logprobs.get_or_insert_default().push(logprob)
                }
                Heard::Piece(choice, piece) => choices[choice].answered.extend([piece]),
                Heard::End(choice, finish) => choices[choice].finish = finish,
                Heard::Failed(error) => return Err(error),
            }
        }
        Ok(choices)
    }

    /// Choices of the request.
    pub(super) fn n_choices(&self) -> usize {
        self.choices.len()
    }

    /// What it took so far.
    pub(super) fn taken(&self) -> Taken {
        let mut all = Taken::default();
        for Choice { taken, reading, .. } in &self.choices {
            if reading.is_first {
                all.usage.prompt_tokens += taken.usage.prompt_tokens;
                all.usage.cached_tokens += taken.usage.cached_tokens;
            }
            all.usage.completion_tokens += taken.usage.completion_tokens;
            all.reasoning_tokens += taken.reasoning_tokens;
        }
        all
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Heard>> {
        loop {
            if let Some(heard) = self.heard.pop_front() {
                return Poll::Ready(Some(heard));
            }
            if self.choices.iter().all(|choice| choice.finish.is_some()) {
                self.ticket.ended();
                return Poll::Ready(None);
            }
            let mut something_came = false;
            for index in 0..self.choices.len() {
                if self.choices[index].finish.is_none()
                    && let Poll::Ready(event) = self.choices[index].events.poll_recv(context)
                {
                    something_came = true;
                    if let Err(error) = self.take(index, event) {
                        return Poll::Ready(Some(self.fail(error)));
                    }
                }
            }
            if !something_came {
                return Poll::Pending;
            }
        }
    }

    fn take(&mut self, index: usize, event: Option<Event>) -> Result<(), ApiError> {
        let failed = |message: String| ApiError::new(Kind::Internal, message);
        let choice = &mut self.choices[index];
        match event {
            Some(Event::Prefill { n_cached, .. }) => choice.taken.usage.cached_tokens = n_cached,
            Some(Event::Token(token)) => {
                self.ticket.token();
                choice
                    .token(index, token, self.server.model().tokenizer(), &mut self.heard)
                    .map_err(|error| failed(error.to_string()))?;
            }
            Some(Event::Ended(ended)) => {
                choice.taken.usage = ended.usage;
                let finish = match ended.stop {
                    Stop::Eos => Finish::Stop,
                    Stop::Length => Finish::Length,
                    Stop::Shutdown => {
                        let message = "the server was shut down before the answer was whole";
                        return Err(ApiError::new(Kind::Unavailable, message));
                    }
                };
                choice.end(index, finish, &mut self.heard);
            }
            Some(Event::Failed(message)) => return Err(failed(message)),
            None => {
                return Err(failed(
                    "the engine ended in the middle of the answer: see the server's log".into(),
                ));
            }
        }
        self.ticket.usage(self.taken().usage);
        Ok(())
    }

    /// Cancels what still runs.
    fn fail(&mut self, error: ApiError) -> Heard {
        self.ticket.failed(error.status(Protocol::OpenAi).as_u16(), &error);
        self.heard.clear();
        for choice in &mut self.choices {
            choice.events.close();
            choice.finish = Some(Finish::Stop);
        }
        Heard::Failed(error)
    }
}

impl Choice {
    fn token(
        &mut self,
        index: usize,
        token: Token,
        tokenizer: &Tokenizer,
        heard: &mut VecDeque<Heard>,
    ) -> Result<(), TokenizerError> {
        self.taken.usage.completion_tokens += 1;
        if self.reading.eos.contains(&token.id) {
            return Ok(());
        }
        if let Some(logprob) = token.logprob {
            let bytes = |id| tokenizer.bytes_after(self.last_token, id);
            let top = token.top.iter().map(|&Logprob { id, logprob }| Ok((bytes(id)?, logprob)));
            let top = top.collect::<Result<Vec<_>, TokenizerError>>()?;
            heard.push_back(Heard::Logprob(index, TokenLogprob { bytes: bytes(token.id)?, logprob, top }));
        }
        self.last_token = Some(token.id);
        self.n_unread += 1;
        let text = self.detokenizer.push(tokenizer, token.id)?.to_owned();
        self.text(index, text, heard);
        Ok(())
    }

    /// The service ended it: what was held back is text.
    fn end(&mut self, index: usize, finish: Finish, heard: &mut VecDeque<Heard>) {
        let rest = self.detokenizer.flush().to_owned();
        self.text(index, rest, heard);
        let last = self.reading.reader.as_mut().map(Reader::finish).unwrap_or_default();
        self.pieces(index, last, heard);
        self.release(index, heard);
        if self.finish.is_none() {
            let calls = finish == Finish::Stop && self.has_calls;
            self.over(index, if calls { Finish::ToolCalls } else { finish }, heard);
        }
    }

    fn text(&mut self, index: usize, text: String, heard: &mut VecDeque<Heard>) {
        let pieces = match &mut self.reading.reader {
            Some(reader) => reader.push(&text),
            None => vec![Piece::Content(text)],
        };
        self.pieces(index, pieces, heard);
    }

    /// Passes pieces on, of content only what a stop string lets through.
    fn pieces(&mut self, index: usize, pieces: Vec<Piece>, heard: &mut VecDeque<Heard>) {
        for piece in pieces {
            if self.finish.is_some() {
                return;
            }
            match piece {
                Piece::Content(text) => match self.reading.stop.push(&text) {
                    StopOutcome::Continue(text) => self.piece(index, Piece::Content(text), heard),
                    StopOutcome::Stopped { text, stop } => {
                        self.piece(index, Piece::Content(text), heard);
                        self.over(index, Finish::StopString(stop), heard);
                    }
                },
                piece => {
                    self.release(index, heard);
                    let ends = self.reading.one_call && matches!(piece, Piece::ToolCallEnd { .. });
                    self.piece(index, piece, heard);
                    if ends {
                        self.over(index, Finish::ToolCalls, heard);
                    }
                }
            }
        }
    }

    /// Passes on what was held back as the possible beginning of a stop string.
    fn release(&mut self, index: usize, heard: &mut VecDeque<Heard>) {
        if self.finish.is_none() {
            let held = self.reading.stop.flush();
            self.piece(index, Piece::Content(held), heard);
        }
    }

    fn piece(&mut self, index: usize, piece: Piece, heard: &mut VecDeque<Heard>) {
        if piece == Piece::Content(String::new()) {
            return;
        }
        self.has_calls |= matches!(piece, Piece::ToolCallBegin { .. });
        let n_read = std::mem::take(&mut self.n_unread);
        if matches!(piece, Piece::Reasoning(_)) {
            self.taken.reasoning_tokens += n_read;
        }
        heard.push_back(Heard::Piece(index, piece));
    }

    /// Nothing more is wanted.
    fn over(&mut self, index: usize, finish: Finish, heard: &mut VecDeque<Heard>) {
        self.events.close();
        self.finish = Some(finish.clone());
        heard.push_back(Heard::End(index, finish));
    }
}
