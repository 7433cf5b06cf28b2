//! [`Unread`]: text that came and was not read yet; and [`Peek`], which reads ahead in it without taking it.
//!
//! What both say depends on the text alone, not on how much of it is there: where more text could change the answer, they
//! ask for more.

/// Text that waits to be read.
#[derive(Default)]
pub(in crate::chat) struct Unread {
    text: String,
    n_read: usize,
    ended: bool,
}

/// Where a marker is.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::chat) enum Found {
    /// There, behind `at` bytes.
    Marker { at: usize, marker: &'static str },
    /// Not in the first `n_certain` bytes; what follows them may become one.
    Nowhere { n_certain: usize },
}

impl Unread {
    pub(super) fn push(&mut self, text: &str) {
        if self.n_read == self.text.len() {
            self.text.clear();
            self.n_read = 0;
        }
        self.text.push_str(text);
    }

    pub(super) fn end(&mut self) {
        self.ended = true;
    }

    /// Whether no more text will come.
    pub(in crate::chat) fn ended(&self) -> bool {
        self.ended
    }

    /// All that is there.
    pub(in crate::chat) fn rest(&self) -> &str {
        &self.text[self.n_read..]
    }

    /// Takes the next `n_bytes`, which end at a character's end.
    pub(in crate::chat) fn take(&mut self, n_bytes: usize) -> &str {
        let start = self.n_read;
        self.n_read += n_bytes;
        &self.text[start..self.n_read]
    }

    /// Takes white space.
    pub(in crate::chat) fn skip_space(&mut self) {
        let rest = self.rest();
        self.n_read += rest.len() - rest.trim_start().len();
    }

    /// Takes `literal` if it comes next.
    ///
    /// # Errors
    /// [`Miss`], and nothing is taken.
    pub(in crate::chat) fn skip(&mut self, literal: &str) -> Result<(), Miss> {
        let mut peek = self.peek();
        peek.literal(literal)?;
        self.n_read += literal.len();
        Ok(())
    }

    /// The first of `markers`, none of which is the beginning of another.
    pub(in crate::chat) fn find(&self, markers: &[&'static str]) -> Found {
        let rest = self.rest();
        for (at, _) in rest.char_indices() {
            let tail = &rest[at..];
            if let Some(&marker) = markers.iter().find(|&&marker| tail.starts_with(marker)) {
                return Found::Marker { at, marker };
            }
            if !self.ended && markers.iter().any(|marker| marker.starts_with(tail)) {
                return Found::Nowhere { n_certain: at };
            }
        }
        Found::Nowhere { n_certain: rest.len() }
    }

    /// Looks ahead.
    pub(in crate::chat) fn peek(&self) -> Peek<'_> {
        Peek { text: self.rest(), at: 0, ended: self.ended }
    }
}

/// Why something was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::chat) enum Miss {
    /// It is not there.
    No,
    /// More text will tell.
    More,
}

/// A place in the unread text.
#[derive(Clone)]
pub(in crate::chat) struct Peek<'t> {
    text: &'t str,
    at: usize,
    ended: bool,
}

impl<'t> Peek<'t> {
    /// The same, which sees at most `n_bytes`, and behind them nothing that could come.
    pub(in crate::chat) fn within(mut self, n_bytes: usize) -> Self {
        if self.text.len() >= n_bytes {
            self.text = &self.text[..self.text.floor_char_boundary(n_bytes)];
            self.ended = true;
        }
        self
    }

    /// Bytes read so far.
    pub(in crate::chat) fn n_bytes(&self) -> usize {
        self.at
    }

    /// What is not read yet.
    pub(in crate::chat) fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    /// Reads `n_bytes`, which end at a character's end.
    pub(in crate::chat) fn advance(&mut self, n_bytes: usize) {
        self.at += n_bytes;
    }

    /// What a miss means where the text ends.
    pub(in crate::chat) fn more(&self) -> Miss {
        if self.ended { Miss::No } else { Miss::More }
    }

    /// Reads white space, if there is any.
    pub(in crate::chat) fn space(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
    }

    /// Reads exactly this.
    pub(in crate::chat) fn literal(&mut self, literal: &str) -> Result<(), Miss> {
        let rest = self.rest();
        if rest.starts_with(literal) {
            self.at += literal.len();
            return Ok(());
        }
        Err(if literal.starts_with(rest) { self.more() } else { Miss::No })
    }

    /// Reads this if it is there, and the white space behind it.
    pub(in crate::chat) fn optional(&mut self, literal: &str) -> Result<bool, Miss> {
        match self.literal(literal) {
            Ok(()) => {
                self.space();
                Ok(true)
            }
            Err(Miss::No) => Ok(false),
            Err(Miss::More) => Err(Miss::More),
        }
    }

    /// Reads up to and with `delimiter`; the text before it is returned.
    pub(in crate::chat) fn until(&mut self, delimiter: &str) -> Result<&'t str, Miss> {
        let rest = self.rest();
        let n_bytes = rest.find(delimiter).ok_or(self.more())?;
        self.at += n_bytes + delimiter.len();
        Ok(&rest[..n_bytes])
    }

    /// Reads a name of a function or a parameter up to and with `delimiter`: one line without tags or quotes.
    pub(in crate::chat) fn name_until(&mut self, delimiter: &str) -> Result<String, Miss> {
        let rest = self.rest();
        let n_bytes = rest.find(delimiter);
        let name = &rest[..n_bytes.unwrap_or(rest.len())];
        let ends_with = |&n: &usize| name.as_bytes().ends_with(&delimiter.as_bytes()[..n]);
        let n_delimiter = (0..delimiter.len()).rev().find(ends_with).unwrap_or(0);
        let own = if n_bytes.is_some() { name } else { &name[..name.len() - n_delimiter] };
        if own.contains(['<', '>', '"', '\n']) {
            return Err(Miss::No);
        }
        let n_bytes = n_bytes.ok_or(self.more())?;
        let name = name.trim();
        if name.is_empty() {
            return Err(Miss::No);
        }
        self.at += n_bytes + delimiter.len();
        Ok(name.into())
    }

    /// Reads a word: letters, digits and what names of functions have between them. The character behind it must be there.
    pub(in crate::chat) fn word(&mut self) -> Result<String, Miss> {
        let rest = self.rest();
        let n_bytes = rest
            .find(|c: char| !c.is_alphanumeric() && !matches!(c, '_' | '-' | '.' | ':' | '/'))
            .ok_or(self.more())?;
        if n_bytes == 0 {
            return Err(Miss::No);
        }
        self.at += n_bytes;
        Ok(rest[..n_bytes].into())
    }

    /// Reads a JSON string.
    pub(in crate::chat) fn json_string(&mut self) -> Result<String, Miss> {
        let rest = self.rest();
        self.clone().literal("\"")?;
        let mut escaped = false;
        let close = rest.bytes().enumerate().skip(1).find(|&(_, byte)| {
            let closes = byte == b'"' && !escaped;
            escaped = byte == b'\\' && !escaped;
            closes
        });
        let (close, _) = close.ok_or(self.more())?;
        let text = serde_json::from_str(&rest[..=close]).map_err(|_| Miss::No)?;
        self.at += close + 1;
        Ok(text)
    }
}
