//! Text that a template writes, up to a limit.

use minijinja::{Error, ErrorKind};
use std::{fmt, io};

/// The longest text, in bytes: far more than any context window, far less than the memory.
const MAX_BYTES: usize = 64 << 20;

/// A string whose writers fail once it would exceed the limit.
#[derive(Default)]
pub(super) struct BoundedText(String);

impl BoundedText {
    /// What `write` writes; an error of its own, or one that names the limit.
    pub(super) fn written_by(write: impl FnOnce(&mut Self) -> Result<(), Error>) -> Result<String, Error> {
        let mut text = Self::default();
        write(&mut text).map_err(|error| match error.kind() {
            ErrorKind::WriteFailure => {
                Error::new(ErrorKind::WriteFailure, format!("the text exceeds {MAX_BYTES} bytes"))
            }
            _ => error,
        })?;
        Ok(text.0)
    }
}

impl fmt::Write for BoundedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if text.len() > MAX_BYTES - self.0.len() {
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

/// Takes whole characters at a time, which is how the template engine writes.
impl io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = std::str::from_utf8(bytes).map_err(io::Error::other)?;
        fmt::Write::write_str(self, text).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
