//! [`StopStrings`]: ends a streamed text before the first stop string, however the text is cut into pieces.
//!
//! A stop string may arrive in parts, so the longest end of the text that could begin one is held back. It
//! knows text only, not tokens.

/// How many stop strings a request may have.
const MAX_STRINGS: usize = 16;
/// How many bytes a stop string may have.
const MAX_BYTES: usize = 1024;

/// Why a list of stop strings was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// It would stop every text at once.
    #[error("stop string {index} is empty; leave it out")]
    Empty {
        /// Place in the list, from 0.
        index: usize,
    },
    /// Longer than the limit.
    #[error("stop string {index} has {bytes} bytes, more than the {MAX_BYTES} allowed")]
    TooLong {
        /// Place in the list, from 0.
        index: usize,
        /// Its length.
        bytes: usize,
    },
    /// More than the limit.
    #[error("{n_strings} stop strings were given, more than the {MAX_STRINGS} allowed")]
    TooMany {
        /// How many were given.
        n_strings: usize,
    },
}

/// What a piece of text led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopOutcome {
    /// No stop string yet; the text, perhaps empty, that can be shown.
    Continue(String),
    /// A stop string is complete: generation ends here.
    Stopped {
        /// The last text to show, which ends where the stop string begins.
        text: String,
        /// The stop string.
        stop: String,
    },
}

/// Stop strings, and the end of the text that may be the beginning of one.
#[derive(Clone, Debug)]
pub struct StopStrings {
    strings: Vec<String>,
    held: String,
}

impl StopStrings {
    /// A matcher for a new text; an empty list never stops.
    ///
    /// # Errors
    /// [`StopError`] for an empty string, one of more than 1,024 bytes, or more than 16 strings.
    pub fn new(strings: Vec<String>) -> Result<Self, StopError> {
        if strings.len() > MAX_STRINGS {
            return Err(StopError::TooMany { n_strings: strings.len() });
        }
        for (index, string) in strings.iter().enumerate() {
            match string.len() {
                0 => return Err(StopError::Empty { index }),
                1..=MAX_BYTES => {}
                bytes => return Err(StopError::TooLong { index, bytes }),
            }
        }
        Ok(Self { strings, held: String::new() })
    }

    /// Takes the next piece of the text. The stop string that ends first wins, and of those that end at the
    /// same place the longest. After [`StopOutcome::Stopped`] the text is over.
    pub fn push(&mut self, text: &str) -> StopOutcome {
        self.held.push_str(text);
        let matches = self.strings.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        if let Some((start, stop)) = matches.min_by_key(|(start, stop)| (start + stop.len(), *start)) {
            let stop = stop.clone();
            self.held.truncate(start);
            return StopOutcome::Stopped { text: std::mem::take(&mut self.held), stop };
        }
        let n_held = self.strings.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - n_held);
        StopOutcome::Continue(std::mem::replace(&mut self.held, held))
    }

    /// Ends a text that no stop string ended, and returns what was held back.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// How many bytes at the end of `text` are the beginning, but not the whole, of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    (1..=longest).rev().find(|&n_bytes| text.as_bytes().ends_with(&stop.as_bytes()[..n_bytes])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The whole text searched place by place: what is shown, and the stop string.
    fn search(strings: &[String], text: &str) -> (String, Option<String>) {
        let ends = (0..=text.len()).filter(|&end| text.is_char_boundary(end));
        for head in ends.map(|end| &text[..end]) {
            if let Some(stop) =
                strings.iter().filter(|stop| head.ends_with(*stop)).max_by_key(|stop| stop.len())
            {
                return (head[..head.len() - stop.len()].to_string(), Some(stop.clone()));
            }
        }
        (text.to_string(), None)
    }

    fn stream<'a>(strings: &[String], pieces: impl IntoIterator<Item = &'a str>) -> (String, Option<String>) {
        let mut stops = StopStrings::new(strings.to_vec()).expect("valid stop strings");
        let mut shown = String::new();
        for piece in pieces {
            match stops.push(piece) {
                StopOutcome::Continue(text) => shown.push_str(&text),
                StopOutcome::Stopped { text, stop } => return (shown + &text, Some(stop)),
            }
        }
        (shown + &stops.flush(), None)
    }

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_possible_beginning_is_held_back() {
        let mut stops = StopStrings::new(strings(&["\n\nHuman:"])).expect("valid stop strings");
        assert_eq!(stops.push("Yes.\n"), StopOutcome::Continue("Yes.".into()));
        assert_eq!(stops.push("\nHum"), StopOutcome::Continue(String::new()));
        assert_eq!(stops.push("us"), StopOutcome::Continue("\n\nHumus".into()));
        assert_eq!(stops.push("\n"), StopOutcome::Continue(String::new()));
        assert_eq!(
            stops.push("\nHuman: x"),
            StopOutcome::Stopped { text: "".into(), stop: "\n\nHuman:".into() }
        );
    }

    #[test]
    fn the_stop_string_that_ends_first_wins_and_then_the_longest() {
        assert_eq!(stream(&strings(&["abcd", "bc"]), ["xabcd"]), ("xa".into(), Some("bc".into())));
        assert_eq!(stream(&strings(&["c", "abc"]), ["xabc"]), ("x".into(), Some("abc".into())));
    }

    #[test]
    fn bad_lists_are_refused() {
        let refused = |list: Vec<String>| StopStrings::new(list).expect_err("refused");
        assert_eq!(refused(strings(&["a", ""])), StopError::Empty { index: 1 });
        assert_eq!(refused(vec!["a".repeat(1025)]), StopError::TooLong { index: 0, bytes: 1025 });
        assert_eq!(refused(vec!["a".into(); 17]), StopError::TooMany { n_strings: 17 });
        assert_eq!(stream(&[], ["any", "thing"]), ("anything".into(), None));
    }

    proptest! {
        #[test]
        fn any_split_gives_what_a_search_of_the_whole_gives(
            strings in prop::collection::vec("[abé]{1,4}", 0..4),
            pieces in prop::collection::vec("[abé]{0,5}", 0..12),
        ) {
            let streamed = stream(&strings, pieces.iter().map(String::as_str));
            prop_assert_eq!(streamed, search(&strings, &pieces.concat()));
        }
    }
}
