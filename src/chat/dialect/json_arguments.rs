//! Arguments that the model writes as JSON: they are passed on as written. Also calls that are JSON as a whole.

use serde_json::{Map, Value};

use super::{Arguments, Call, typed};
use crate::chat::reader::{Miss, Peek, Unread};

/// The names under which models put the arguments into a call.
const ARGUMENTS: [&str; 3] = ["arguments", "parameters", "args"];

/// What an object that is a call may begin with.
const FIELDS: [&str; 6] = ["name", "arguments", "parameters", "args", "id", "type"];

/// Reads one JSON value and the markers behind it.
pub(super) struct JsonArguments {
    place: Place,
    /// Markers that may follow, in this order, with or without white space between them.
    ends: &'static [&'static str],
    brackets: Brackets,
}

enum Place {
    Start,
    /// In an object, which is passed on as it comes.
    Object,
    /// In something else, which is kept until it ends.
    Other(String),
    Ends,
}

impl JsonArguments {
    pub(super) fn boxed(ends: &'static [&'static str]) -> Box<dyn Arguments> {
        Box::new(JsonArguments { place: Place::Start, ends, brackets: Brackets::default() })
    }
}

impl Arguments for JsonArguments {
    fn read(&mut self, unread: &mut Unread, json: &mut String) -> bool {
        loop {
            match &mut self.place {
                Place::Start => {
                    unread.skip_space();
                    self.place = match unread.rest().chars().next() {
                        None => return false,
                        Some('{') => Place::Object,
                        Some(_) => Place::Other(String::new()),
                    };
                }
                Place::Object => {
                    let (n_bytes, over) = self.brackets.scan(unread.rest(), json);
                    unread.take(n_bytes);
                    if !over {
                        return false;
                    }
                    self.place = Place::Ends;
                }
                Place::Other(text) => {
                    let (n_bytes, over) = self.brackets.scan(unread.rest(), text);
                    unread.take(n_bytes);
                    if !over && !unread.ended() {
                        return false;
                    }
                    json.push_str(&other(text));
                    self.place = Place::Ends;
                }
                Place::Ends => {
                    unread.skip_space();
                    let Some((end, ends)) = self.ends.split_first() else { return true };
                    if unread.rest().is_empty() && !unread.ended() || unread.skip(end) == Err(Miss::More) {
                        return false;
                    }
                    self.ends = ends;
                }
            }
        }
    }
}

/// Arguments that are not an object: nothing, or an object within a string, or what the model wrote.
fn other(text: &str) -> String {
    match serde_json::from_str::<Value>(text) {
        Ok(Value::Null) => "{}".into(),
        Ok(Value::String(inner)) if inner.starts_with('{') && typed::is_json(&inner) => inner,
        _ => text.trim_end().into(),
    }
}

/// Follows a JSON value to its end without asking whether all in it is right.
#[derive(Default)]
struct Brackets {
    depth: usize,
    in_string: bool,
    escaped: bool,
    begun: bool,
}

impl Brackets {
    /// How many bytes of `text` belong to the value, and whether it ends behind them. They are appended to `json`, line ends
    /// and the like within strings as JSON wants them: models forget that.
    fn scan(&mut self, text: &str, json: &mut String) -> (usize, bool) {
        for (at, c) in text.char_indices() {
            let ends_before = !self.in_string
                && match c {
                    '}' | ']' | ',' => self.depth == 0,
                    _ if c.is_whitespace() => self.depth == 0 && self.begun,
                    // JSON has none of these outside of strings: a marker begins where the value should have ended.
                    _ => matches!(c, '<' | '>' | '|'),
                };
            if ends_before {
                return (at, true);
            }
            if self.in_string && c.is_ascii_control() {
                typed::escape_into(c.encode_utf8(&mut [0; 4]), json);
            } else {
                json.push(c);
            }
            self.begun = true;
            self.step(c);
            if !self.in_string && self.depth == 0 && matches!(c, '"' | '}' | ']') {
                return (at + c.len_utf8(), true);
            }
        }
        (text.len(), false)
    }

    fn step(&mut self, c: char) {
        if self.in_string {
            self.in_string = c != '"' || self.escaped;
            self.escaped = c == '\\' && !self.escaped;
            return;
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => self.depth -= 1,
            _ => {}
        }
    }
}

/// Arguments that are known with the head.
struct Known(String);

impl Arguments for Known {
    fn read(&mut self, _: &mut Unread, json: &mut String) -> bool {
        json.push_str(&self.0);
        true
    }
}

/// A call that is an object: `{"name": ..., "arguments": {...}}`. Any other order of fields is read when the object is whole.
pub(super) fn object_call(peek: &mut Peek<'_>) -> Result<Call, Miss> {
    match named_first(&mut peek.clone()) {
        Ok(_) => named_first(peek),
        Err(Miss::More) => Err(Miss::More),
        Err(Miss::No) => whole(peek),
    }
}

fn named_first(peek: &mut Peek<'_>) -> Result<Call, Miss> {
    peek.literal("{")?;
    peek.space();
    if peek.json_string()? != "name" {
        return Err(Miss::No);
    }
    peek.space();
    peek.literal(":")?;
    peek.space();
    let name = peek.json_string()?;
    peek.space();
    if name.is_empty() {
        return Err(Miss::No);
    }
    if peek.optional("}")? {
        return Ok(Call { name, id: None, arguments: Box::new(Known("{}".into())) });
    }
    peek.literal(",")?;
    peek.space();
    if !ARGUMENTS.contains(&peek.json_string()?.as_str()) {
        return Err(Miss::No);
    }
    peek.space();
    peek.literal(":")?;
    Ok(Call { name, id: None, arguments: JsonArguments::boxed(&["}"]) })
}

fn whole(peek: &mut Peek<'_>) -> Result<Call, Miss> {
    let mut first = peek.clone();
    first.literal("{")?;
    first.space();
    // Any other object is what the model says, and shall not wait for its end.
    if !FIELDS.contains(&first.json_string()?.as_str()) {
        return Err(Miss::No);
    }
    let mut text = String::new();
    let (n_bytes, over) = Brackets::default().scan(peek.rest(), &mut text);
    if !over {
        return Err(peek.more());
    }
    let mut object: Map<String, Value> = serde_json::from_str(&text).map_err(|_| Miss::No)?;
    let text = |field: &str| object.get(field).and_then(Value::as_str).filter(|text| !text.is_empty());
    let (name, id) = (text("name").ok_or(Miss::No)?.to_owned(), text("id").map(String::from));
    let arguments = ARGUMENTS.iter().find_map(|&field| object.shift_remove(field));
    let arguments = arguments.map_or("{}".into(), |arguments| other(&arguments.to_string()));
    peek.advance(n_bytes);
    Ok(Call { name, id, arguments: Box::new(Known(arguments)) })
}
