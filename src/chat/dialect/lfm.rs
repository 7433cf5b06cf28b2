//! LFM2.5: `<|tool_call_start|>[NAME(key='text', other=[1, 2]), ...]<|tool_call_end|>`, calls as Python writes them.

use super::{Arguments, Call, Entry, Form, Syntax, typed};
use crate::chat::{
    reader::{Miss, Peek, Unread},
    tools::Tools,
};

pub(super) static ENTRY: Entry = Entry {
    name: "lfm",
    is_of: |source| source.contains("<|tool_call_start|>"),
    tokens: &["<think>", "</think>", "<|tool_call_start|>", "<|tool_call_end|>"],
    form: Form::Tags(&SYNTAX),
};

static SYNTAX: Syntax = Syntax {
    thinking: ("<think>", "</think>"),
    openers: &["<|tool_call_start|>"],
    first_openers: &[],
    block_ends: &["]<|tool_call_end|>", "<|tool_call_end|>"],
    call,
};

/// Values within values that are read; a deeper one is passed on as it is written.
const MAX_DEPTH: usize = 64;

fn call(peek: &mut Peek<'_>, _: &Tools) -> Result<Call, Miss> {
    let first = peek.optional("<|tool_call_start|>")?;
    let separated = peek.optional(if first { "[" } else { "," })?;
    if !first && !separated {
        return Err(Miss::No);
    }
    let name = peek.word()?;
    peek.literal("(")?;
    Ok(Call { name, id: None, arguments: Box::<PythonArguments>::default() })
}

/// Keeps the arguments until their bracket closes.
#[derive(Default)]
struct PythonArguments {
    text: String,
    depth: usize,
    quote: Option<char>,
    escaped: bool,
}

impl PythonArguments {
    /// Whether the bracket closes with `c`.
    fn closes(&mut self, c: char) -> bool {
        match (self.quote, c) {
            (Some(_), _) if self.escaped => self.escaped = false,
            (Some(_), '\\') => self.escaped = true,
            (Some(open), _) if c == open => self.quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => self.quote = Some(c),
            (None, '(' | '[' | '{') => self.depth += 1,
            (None, ')' | ']' | '}') if self.depth == 0 => return true,
            (None, ')' | ']' | '}') => self.depth -= 1,
            (None, _) => {}
        }
        false
    }
}

impl Arguments for PythonArguments {
    fn read(&mut self, unread: &mut Unread, json: &mut String) -> bool {
        while let Some(c) = unread.rest().chars().next() {
            unread.take(c.len_utf8());
            if self.closes(c) {
                json.push_str(&Python { rest: &self.text }.arguments().unwrap_or_else(|| self.text.clone()));
                return true;
            }
            self.text.push(c);
        }
        if unread.ended() {
            json.push_str(&self.text);
        }
        false
    }
}

/// Reads Python literals.
struct Python<'t> {
    rest: &'t str,
}

impl Python<'_> {
    /// `key=value, ...` as a JSON object; `None` where it is something else.
    fn arguments(mut self) -> Option<String> {
        let mut json = String::from("{");
        while !self.next_is("") {
            if json.len() > 1 {
                self.skip(',')?;
                json.push_str(", ");
            }
            let (name, rest) = self.rest.split_once('=')?;
            self.rest = rest;
            json.push_str(&typed::quoted(name.trim()));
            json.push_str(": ");
            self.value(&mut json, 0)?;
        }
        json.push('}');
        Some(json)
    }

    /// Whether, behind white space, this comes next; the empty text is the end.
    fn next_is(&mut self, text: &str) -> bool {
        self.rest = self.rest.trim_start();
        if text.is_empty() { self.rest.is_empty() } else { self.rest.starts_with(text) }
    }

    fn skip(&mut self, c: char) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(c)?;
        Some(())
    }

    fn value(&mut self, json: &mut String, depth: usize) -> Option<()> {
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            _ if depth > MAX_DEPTH => return None,
            '{' => self.items('{', '}', json, depth)?,
            '[' => self.items('[', ']', json, depth)?,
            quote @ ('\'' | '"') => self.string(quote, json)?,
            _ => {
                let end = self.rest.find([',', ']', '}', ':']).unwrap_or(self.rest.len());
                let (word, rest) = self.rest.split_at(end);
                json.push_str(&typed::typed(word.trim(), None));
                self.rest = rest;
            }
        }
        Some(())
    }

    fn items(&mut self, open: char, close: char, json: &mut String, depth: usize) -> Option<()> {
        self.skip(open)?;
        json.push(open);
        let mut first = true;
        while self.skip(close).is_none() {
            if !first {
                self.skip(',')?;
                json.push_str(", ");
            }
            first = false;
            self.value(json, depth + 1)?;
            if open == '{' {
                self.skip(':')?;
                json.push_str(": ");
                self.value(json, depth + 1)?;
            }
        }
        json.push(close);
        Some(())
    }

    /// A string; a backslash means what it means in Python, where most characters behind it leave it as it is.
    fn string(&mut self, quote: char, json: &mut String) -> Option<()> {
        let mut text = String::new();
        let mut chars = self.rest[1..].char_indices();
        loop {
            let (at, c) = chars.next()?;
            match c {
                '\\' => match chars.next()?.1 {
                    c @ ('\\' | '\'' | '"') => text.push(c),
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    c => text.extend(['\\', c]),
                },
                _ if c == quote => {
                    self.rest = &self.rest[at + 2..];
                    json.push_str(&typed::quoted(&text));
                    return Some(());
                }
                _ => text.push(c),
            }
        }
    }
}
