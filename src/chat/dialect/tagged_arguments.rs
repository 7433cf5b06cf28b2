//! Arguments of which each stands between tags: the text of a value, typed by its schema or by the tag. A string is passed on
//! as it comes, any other value when it is whole.

use serde_json::Value;

use super::{Arguments, typed};
use crate::chat::{
    reader::{Found, Miss, Peek, Unread},
    tools::Parameters,
};

/// The tags of a dialect.
pub(super) struct Tags {
    /// Reads the tag in front of a value.
    pub(super) parameter: fn(&mut Peek<'_>) -> Result<Parameter, Miss>,
    /// What a parameter's tag begins with.
    pub(super) opener: &'static str,
    /// The tag behind a value, the longer of two forms first. Within a value it counts only in front of a tag that may follow.
    pub(super) closers: &'static [&'static str],
    /// The tag behind the last value.
    pub(super) end: &'static str,
    /// What else may follow a value.
    pub(super) block_end: &'static str,
    /// Whether a value begins behind one line's end.
    pub(super) own_line: bool,
    /// Whether parameters that no schema declares are strings; otherwise they are what they look like.
    pub(super) undeclared_are_strings: bool,
}

impl Tags {
    /// What may follow the head of a call or a value.
    fn followers(&self) -> [&'static str; 3] {
        [self.end, self.opener, self.block_end]
    }
}

/// The tag in front of a value.
pub(super) struct Parameter {
    pub(super) name: String,
    /// Whether the tag says that the value is a string, or that it is JSON.
    pub(super) is_string: Option<bool>,
}

/// Reads the arguments of one call.
pub(super) struct TaggedArguments {
    tags: &'static Tags,
    parameters: Parameters,
    place: Place,
    n_values: usize,
}

enum Place {
    Between,
    /// In a string; whether nothing of it was read.
    Text {
        at_start: bool,
    },
    /// In a value of which all must be there.
    Whole {
        text: String,
        schema: Option<Value>,
    },
}

impl TaggedArguments {
    /// The arguments behind the head of a call.
    ///
    /// # Errors
    /// [`Miss::No`] where something else than a tag follows: then it is no call.
    pub(super) fn behind(
        peek: &mut Peek<'_>,
        tags: &'static Tags,
        parameters: Parameters,
    ) -> Result<Box<dyn Arguments>, Miss> {
        peek.space();
        let follows = tags.followers().map(|tag| peek.clone().literal(tag));
        match follows.iter().find(|&&follows| follows != Err(Miss::No)) {
            Some(&follows) => follows?,
            None => return Err(Miss::No),
        }
        Ok(Box::new(TaggedArguments { tags, parameters, place: Place::Between, n_values: 0 }))
    }

    /// Reads the next tag; whether it was the last.
    fn between(&mut self, unread: &mut Unread, json: &mut String) -> Result<bool, Miss> {
        unread.skip_space();
        if unread.rest().is_empty() {
            return Err(Miss::More);
        }
        let end = unread.skip(self.tags.end);
        if end == Err(Miss::More) {
            return Err(Miss::More);
        }
        let mut peek = unread.peek();
        let parameter = match end {
            Ok(()) => Err(Miss::No),
            Err(_) => (self.tags.parameter)(&mut peek),
        };
        match parameter {
            Ok(parameter) => {
                let n_bytes = peek.n_bytes();
                unread.take(n_bytes);
                self.begin(parameter, json);
                Ok(false)
            }
            Err(Miss::More) => Err(Miss::More),
            Err(Miss::No) => {
                json.push_str(if self.n_values == 0 { "{}" } else { "}" });
                Ok(true)
            }
        }
    }

    fn begin(&mut self, parameter: Parameter, json: &mut String) {
        json.push_str(if self.n_values == 0 { "{" } else { ", " });
        self.n_values += 1;
        json.push_str(&typed::quoted(&parameter.name));
        json.push_str(": ");
        let schema = self.parameters.of(&parameter.name);
        let is_string = parameter.is_string.unwrap_or_else(|| match schema {
            Some(_) => typed::is_string(schema),
            None => self.tags.undeclared_are_strings,
        });
        self.place = if is_string {
            json.push('"');
            Place::Text { at_start: true }
        } else {
            // A tag that says JSON is as good as no schema.
            let schema = schema.filter(|_| parameter.is_string.is_none()).cloned();
            Place::Whole { text: String::new(), schema }
        };
    }

    /// Takes text of a value, and the tag behind it; whether the value is over.
    fn value(&mut self, unread: &mut Unread, json: &mut String) -> Result<bool, Miss> {
        let (n_bytes, over) = match unread.find(self.tags.closers) {
            Found::Nowhere { n_certain } => (n_certain, false),
            Found::Marker { at: 0, marker } => (marker.len(), self.may_follow(unread, marker.len())?),
            Found::Marker { at, .. } => (at, false),
        };
        if n_bytes == 0 {
            return Err(Miss::More);
        }
        let text = unread.take(n_bytes);
        let inside = |at_start: bool| match text.strip_prefix('\n') {
            Some(text) if at_start && self.tags.own_line => text,
            _ => text,
        };
        match &mut self.place {
            Place::Text { .. } if over => json.push('"'),
            Place::Text { at_start } => typed::escape_into(inside(std::mem::take(at_start)), json),
            Place::Whole { text, schema } if over => json.push_str(&typed::typed(text, schema.as_ref())),
            Place::Whole { text, .. } => {
                let at_start = text.is_empty();
                text.push_str(inside(at_start));
            }
            Place::Between => unreachable!("a value is read between its tags"),
        }
        Ok(over)
    }

    /// Whether a tag that closes a value may be meant: another tag follows it, or nothing does.
    fn may_follow(&self, unread: &Unread, n_bytes: usize) -> Result<bool, Miss> {
        let behind = unread.rest()[n_bytes..].trim_start();
        let tags = self.tags.followers();
        if tags.iter().any(|tag| behind.starts_with(tag)) {
            return Ok(true);
        }
        match tags.iter().any(|tag| tag.starts_with(behind)) {
            true if !unread.ended() => Err(Miss::More),
            may_follow => Ok(may_follow),
        }
    }

    fn step(&mut self, unread: &mut Unread, json: &mut String) -> Result<bool, Miss> {
        if matches!(self.place, Place::Between) {
            return self.between(unread, json);
        }
        if self.value(unread, json)? {
            self.place = Place::Between;
        }
        Ok(false)
    }
}

impl Arguments for TaggedArguments {
    fn read(&mut self, unread: &mut Unread, json: &mut String) -> bool {
        loop {
            match self.step(unread, json) {
                Ok(true) => return true,
                Ok(false) => {}
                Err(_) => break,
            }
        }
        if unread.ended() {
            match &self.place {
                // The model forgot the last tags.
                Place::Between => json.push_str(if self.n_values == 0 { "{}" } else { "}" }),
                Place::Text { .. } => {}
                Place::Whole { text, .. } => json.push_str(text),
            }
        }
        false
    }
}
