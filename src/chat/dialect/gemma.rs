//! Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,2]}<tool_call|>`, and `<|channel>thought` for thinking.

use super::{Arguments, Call, Entry, Form, Syntax, typed};
use crate::chat::{
    reader::{Found, Miss, Peek, Unread},
    tools::Tools,
};

pub(super) static ENTRY: Entry = Entry {
    name: "gemma",
    is_of: |source| source.contains("<|tool_call>"),
    tokens: &["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", QUOTE],
    form: Form::Tags(&SYNTAX),
};

static SYNTAX: Syntax = Syntax {
    thinking: ("<|channel>thought", "<channel|>"),
    openers: &["<|tool_call>"],
    first_openers: &[],
    block_ends: &["<tool_call|>"],
    call,
};

/// Before and behind a string.
const QUOTE: &str = "<|\"|>";

fn call(peek: &mut Peek<'_>, _: &Tools) -> Result<Call, Miss> {
    peek.literal("<|tool_call>")?;
    peek.space();
    peek.literal("call:")?;
    let name = peek.word()?;
    peek.space();
    peek.clone().literal("{")?;
    Ok(Call { name, id: None, arguments: Box::new(GemmaArguments { open: Vec::new(), place: Place::Value }) })
}

/// Turns Gemma's notation into JSON.
struct GemmaArguments {
    /// The brackets that close what is open.
    open: Vec<char>,
    place: Place,
}

enum Place {
    Key,
    Value,
    Text,
    Behind,
}

impl GemmaArguments {
    /// Reads a little. Whether all is read.
    fn step(&mut self, unread: &mut Unread, json: &mut String) -> Result<bool, Miss> {
        if !matches!(self.place, Place::Text) {
            unread.skip_space();
        }
        let next = unread.rest().chars().next();
        let next = match self.place {
            Place::Behind if self.open.is_empty() => return Ok(true),
            _ => next.ok_or(Miss::More)?,
        };
        match self.place {
            Place::Key if next == '}' => self.close(unread, json),
            Place::Key => {
                let mut peek = unread.peek();
                let name = peek.until(":")?;
                let name = name.strip_prefix(QUOTE).and_then(|name| name.strip_suffix(QUOTE)).unwrap_or(name);
                json.push_str(&typed::quoted(name.trim()));
                json.push_str(": ");
                let n_bytes = peek.n_bytes();
                unread.take(n_bytes);
                self.place = Place::Value;
            }
            Place::Value => self.value(next, unread, json)?,
            Place::Text => match unread.find(&[QUOTE]) {
                Found::Nowhere { n_certain: 0 } => return Err(Miss::More),
                Found::Nowhere { n_certain: n_bytes } | Found::Marker { at: n_bytes @ 1.., .. } => {
                    typed::escape_into(unread.take(n_bytes), json);
                }
                Found::Marker { .. } => {
                    unread.take(QUOTE.len());
                    json.push('"');
                    self.place = Place::Behind;
                }
            },
            Place::Behind => match next {
                '}' | ']' => self.close(unread, json),
                ',' => {
                    unread.take(1);
                    json.push_str(", ");
                    self.place = if self.open.last() == Some(&'}') { Place::Key } else { Place::Value };
                }
                _ => return Ok(true),
            },
        }
        Ok(false)
    }

    fn value(&mut self, next: char, unread: &mut Unread, json: &mut String) -> Result<(), Miss> {
        match (next, unread.skip(QUOTE)) {
            (_, Ok(())) => {
                json.push('"');
                self.place = Place::Text;
            }
            (_, Err(Miss::More)) => return Err(Miss::More),
            ('{', _) => {
                self.open('{', '}', unread, json);
                self.place = Place::Key;
            }
            ('[', _) => self.open('[', ']', unread, json),
            (']', _) if self.open.last() == Some(&']') => self.close(unread, json),
            _ => {
                let end = unread.rest().find([',', '}', ']']);
                if end.is_none() && !unread.ended() {
                    return Err(Miss::More);
                }
                let word = unread.take(end.unwrap_or(unread.rest().len())).trim_end();
                json.push_str(&if word.is_empty() { "null".into() } else { typed::typed(word, None) });
                self.place = Place::Behind;
            }
        }
        Ok(())
    }

    fn open(&mut self, bracket: char, closes: char, unread: &mut Unread, json: &mut String) {
        unread.take(1);
        json.push(bracket);
        self.open.push(closes);
    }

    /// Closes what was opened last, whichever bracket the model wrote.
    fn close(&mut self, unread: &mut Unread, json: &mut String) {
        unread.take(1);
        json.extend(self.open.pop());
        self.place = Place::Behind;
    }
}

impl Arguments for GemmaArguments {
    fn read(&mut self, unread: &mut Unread, json: &mut String) -> bool {
        loop {
            match self.step(unread, json) {
                Ok(true) => return true,
                Ok(false) => {}
                Err(Miss::More | Miss::No) => return false,
            }
        }
    }
}
