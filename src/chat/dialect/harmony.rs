//! Harmony, which gpt-oss writes: a sequence of messages, each with a header that names a channel (`analysis` is thinking,
//! `commentary` and `final` are said) and a recipient for calls: `<|channel|>commentary to=functions.NAME<|message|>{...}<|call|>`.

use super::{Entry, Form};
use crate::chat::{
    reader::{Found, Pieces, Unread},
    tools::Tools,
};

pub(super) static ENTRY: Entry = Entry {
    name: "harmony",
    is_of: |source| source.contains("<|channel|>") && source.contains("<|message|>"),
    tokens: &[START, CHANNEL, MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"],
    form: Form::Harmony,
};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
/// What ends a message; a header follows the last two.
const ENDS: [&str; 5] = ["<|end|>", "<|call|>", "<|return|>", START, CHANNEL];
/// What a header, or what is left of it behind a prompt, begins with. Anything else is said without one.
const HEADS: [&str; 6] = [START, CHANNEL, MESSAGE, "<|constrain|>", "to=", "assistant"];
/// A text that has more bytes than this before its `<|message|>` has no header.
const MAX_HEADER_BYTES: usize = 512;

/// Where in an answer the reader is.
pub(in crate::chat) struct Harmony {
    place: Place,
    /// Thinking and content of earlier messages: another one of the kind is a paragraph of its own.
    thought: bool,
    said: bool,
    /// Whether a paragraph has to end first.
    paragraph: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    Header,
    Message(Kind),
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Reasoning,
    Content,
    /// A call; whether its arguments have begun.
    Call {
        begun: bool,
    },
}

impl Harmony {
    /// Behind a prompt that ends in `<|start|>assistant`, or within a message.
    pub(in crate::chat) fn new(prompt: &str) -> Self {
        let place = match prompt.rsplit_once(START).map_or(prompt, |(_, last)| last).split_once(MESSAGE) {
            Some((header, _)) if header.contains("analysis") => Place::Message(Kind::Reasoning),
            Some((header, _)) if header.contains(CHANNEL) => Place::Message(Kind::Content),
            _ => Place::Header,
        };
        Harmony { place, thought: false, said: false, paragraph: false }
    }

    pub(in crate::chat) fn read(&mut self, unread: &mut Unread, tools: Option<&Tools>, out: &mut Pieces) {
        while match self.place {
            Place::Header => self.header(unread, tools, out),
            Place::Message(kind) => self.message(kind, unread, out),
        } {}
        if unread.ended() && matches!(self.place, Place::Message(Kind::Call { .. })) {
            self.end(out);
        }
    }

    /// Reads a header; whether there is more to read.
    fn header(&mut self, unread: &mut Unread, tools: Option<&Tools>, out: &mut Pieces) -> bool {
        let rest = unread.rest();
        let words = rest.trim_start();
        if !HEADS.iter().any(|head| words.starts_with(head)) {
            let may_become = HEADS.iter().any(|head| head.starts_with(words));
            if may_become && !unread.ended() || words.is_empty() {
                return false;
            }
            return self.enter(Kind::Content);
        }
        match unread.find(&[MESSAGE]) {
            Found::Marker { at, .. } if at <= MAX_HEADER_BYTES => {
                let header = unread.take(at).to_owned();
                unread.take(MESSAGE.len());
                self.enter(kind_of(&header, tools, out))
            }
            Found::Nowhere { .. } if rest.len() < MAX_HEADER_BYTES + MESSAGE.len() => {
                if unread.ended() {
                    // Cut within a header: nothing was said.
                    let n_bytes = rest.len();
                    unread.take(n_bytes);
                }
                false
            }
            _ => self.enter(Kind::Content),
        }
    }

    fn enter(&mut self, kind: Kind) -> bool {
        self.place = Place::Message(kind);
        self.paragraph = match kind {
            Kind::Reasoning => self.thought,
            Kind::Content => self.said,
            Kind::Call { .. } => false,
        };
        true
    }

    /// Passes on text of a message.
    fn text(&mut self, kind: Kind, text: &str, out: &mut Pieces) {
        let before = if std::mem::take(&mut self.paragraph) { "\n\n" } else { "" };
        match kind {
            Kind::Reasoning => {
                self.thought = true;
                out.reasoning(before);
                out.reasoning(text);
            }
            Kind::Content => {
                self.said = true;
                out.content(before);
                out.content(text);
            }
            Kind::Call { .. } => {
                out.arguments(text);
                self.place = Place::Message(Kind::Call { begun: true });
            }
        }
    }

    fn message(&mut self, kind: Kind, unread: &mut Unread, out: &mut Pieces) -> bool {
        match unread.find(&ENDS) {
            Found::Nowhere { n_certain: 0 } => false,
            Found::Nowhere { n_certain: n_bytes } | Found::Marker { at: n_bytes @ 1.., .. } => {
                self.text(kind, unread.take(n_bytes), out);
                true
            }
            Found::Marker { marker, .. } => {
                if marker != CHANNEL {
                    unread.take(marker.len());
                }
                self.end(out);
                true
            }
        }
    }

    /// Ends a message.
    fn end(&mut self, out: &mut Pieces) {
        if let Place::Message(Kind::Call { begun }) = self.place {
            if !begun {
                out.arguments("{}");
            }
            out.end_call();
        }
        self.place = Place::Header;
    }
}

/// What a header opens. A call begins with it.
fn kind_of(header: &str, tools: Option<&Tools>, out: &mut Pieces) -> Kind {
    let recipient = header
        .split_once("to=")
        .map(|(_, to)| to.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default());
    // Models forget the namespace.
    let offered = |to: &&str| tools.is_some_and(|tools| tools.contains(to));
    let function = recipient.and_then(|to| to.strip_prefix("functions.").or(Some(to).filter(offered)));
    let function = function.filter(|name| !name.is_empty());
    let channel = header.rsplit_once(CHANNEL).map_or("", |(_, channel)| channel.trim_start());
    match function {
        Some(name) if tools.is_some() => {
            out.begin_call(name.into(), None);
            Kind::Call { begun: false }
        }
        _ if channel.starts_with("analysis") => Kind::Reasoning,
        _ => Kind::Content,
    }
}
