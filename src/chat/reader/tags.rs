//! [`Tags`]: answers in which tags set off thinking and calls from what is said. White space beside a tag belongs to it.
//!
//! What the tags are and how a call is written is the dialect's [`Syntax`].

use super::{Miss, Peek, Pieces, Unread, unread::Found};
use crate::chat::{
    dialect::{Arguments, Call, Syntax},
    tools::Tools,
};

/// The longest head of a call; one that is longer is text. Some dialects name the function behind the arguments.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Where in an answer the reader is.
pub(super) struct Tags {
    syntax: &'static Syntax,
    place: Place,
    thinking: bool,
    /// A tag was read last.
    beside_tag: bool,
    /// Content was read.
    said: bool,
    /// White space that belongs to the text, unless a tag follows.
    space: String,
}

enum Place {
    Text,
    Call(Box<dyn Arguments>),
    /// Behind a call: another may follow in the same block.
    Block,
}

/// Whether there is more to read, or more text must come.
#[derive(PartialEq)]
enum Step {
    On,
    Wait,
}

impl Tags {
    pub(super) fn new(syntax: &'static Syntax, prompt: &str) -> Self {
        let (open, close) = syntax.thinking;
        let prompt = prompt.trim_end();
        let thinking = prompt.ends_with(open);
        Tags {
            syntax,
            place: Place::Text,
            thinking,
            beside_tag: thinking || prompt.ends_with(close),
            said: false,
            space: String::new(),
        }
    }

    pub(super) fn read(&mut self, unread: &mut Unread, tools: Option<&Tools>, out: &mut Pieces) {
        loop {
            let step = match &mut self.place {
                Place::Text => self.text(unread, tools, out),
                Place::Block => self.block(unread, tools, out),
                Place::Call(arguments) => {
                    let mut json = String::new();
                    let whole = arguments.read(unread, &mut json);
                    out.arguments(&json);
                    if whole || unread.ended() {
                        out.end_call();
                        self.place = Place::Block;
                        Step::On
                    } else {
                        Step::Wait
                    }
                }
            };
            if step == Step::Wait {
                break;
            }
        }
        if unread.ended() && !self.beside_tag {
            let space = std::mem::take(&mut self.space);
            self.emit(&space, out);
        }
    }

    fn text(&mut self, unread: &mut Unread, tools: Option<&Tools>, out: &mut Pieces) -> Step {
        if unread.rest().is_empty() {
            return Step::Wait;
        }
        let (open, close) = self.syntax.thinking;
        let mut markers: Vec<&'static str> = Vec::new();
        match (self.thinking, self.said) {
            (true, _) => markers.push(close),
            (false, false) => markers.extend([open, close]),
            (false, true) => {}
        }
        if tools.is_some() {
            markers.extend(self.syntax.openers);
            if !self.thinking && !self.said {
                markers.extend(self.syntax.first_openers);
            }
        }
        match unread.find(&markers) {
            Found::Nowhere { n_certain: 0 } => Step::Wait,
            // The markers may be others once this is said.
            Found::Nowhere { n_certain: n_bytes } | Found::Marker { at: n_bytes @ 1.., .. } => {
                self.say(unread.take(n_bytes), out);
                Step::On
            }
            Found::Marker { marker, .. } if marker == open || marker == close => {
                unread.take(marker.len());
                self.thinking = marker == open;
                self.tag();
                Step::On
            }
            Found::Marker { marker, .. } => {
                let tools = tools.expect("openers are markers only where there are tools");
                match self.call(unread, tools, out) {
                    Ok(()) => Step::On,
                    Err(Miss::More) => Step::Wait,
                    Err(Miss::No) => {
                        self.say(unread.take(marker.len()), out);
                        Step::On
                    }
                }
            }
        }
    }

    /// Reads the head of a call.
    fn call(&mut self, unread: &mut Unread, tools: &Tools, out: &mut Pieces) -> Result<(), Miss> {
        let mut peek: Peek<'_> = unread.peek().within(MAX_HEAD_BYTES);
        let Call { name, id, arguments } = (self.syntax.call)(&mut peek, tools)?;
        // A model that thinks about calls may quote one; what it means to call exists.
        if self.thinking && !tools.contains(&name) {
            return Err(Miss::No);
        }
        let n_bytes = peek.n_bytes();
        unread.take(n_bytes);
        self.tag();
        out.begin_call(name, id);
        self.place = Place::Call(arguments);
        Ok(())
    }

    fn block(&mut self, unread: &mut Unread, tools: Option<&Tools>, out: &mut Pieces) -> Step {
        unread.skip_space();
        if unread.rest().is_empty() {
            return Step::Wait;
        }
        for &end in self.syntax.block_ends {
            match unread.skip(end) {
                Ok(()) => {
                    self.place = Place::Text;
                    return Step::On;
                }
                Err(Miss::More) => return Step::Wait,
                Err(Miss::No) => {}
            }
        }
        match tools.map_or(Err(Miss::No), |tools| self.call(unread, tools, out)) {
            Ok(()) => Step::On,
            Err(Miss::More) => Step::Wait,
            Err(Miss::No) => {
                self.place = Place::Text;
                Step::On
            }
        }
    }

    fn tag(&mut self) {
        self.beside_tag = true;
        self.space.clear();
    }

    fn say(&mut self, text: &str, out: &mut Pieces) {
        let text = if self.beside_tag { text.trim_start() } else { text };
        if text.is_empty() {
            return;
        }
        self.beside_tag = false;
        let (words, space) = text.split_at(text.trim_end().len());
        if !words.is_empty() {
            self.said |= !self.thinking;
            let before = std::mem::take(&mut self.space);
            self.emit(&before, out);
            self.emit(words, out);
        }
        self.space.push_str(space);
    }

    fn emit(&self, text: &str, out: &mut Pieces) {
        if self.thinking { out.reasoning(text) } else { out.content(text) }
    }
}
