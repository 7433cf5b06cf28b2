//! Answers that must have a form: JSON of a schema, or calls of tools, as grammars over the model's tokens; and a bound on
//! thinking, behind which a grammar begins. The grammars' engine is llguidance; this file knows how dialects write a call.

mod calls;
mod channels;

use std::sync::Arc;

use llguidance::{
    Matcher, ParserFactory,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie},
};
use serde_json::{Value, json};

use self::calls::Writer;
use super::{
    conversation::{Conversation, ToolChoice},
    error::{ApiError, Kind},
    model::ServedModel,
};
use crate::{
    chat::dialect::Dialect,
    formats::tokenizer::{Tokenizer, TokenizerError},
    scheduler::Constraint,
};

/// What an answer's content looks like.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) enum Format {
    /// As the model likes.
    #[default]
    Text,
    /// JSON of a schema.
    Json(Value),
}

/// Grammars over one tokenizer.
pub(super) struct Grammars {
    factory: ParserFactory,
}

impl Grammars {
    /// Takes a moment for a large vocabulary.
    ///
    /// # Errors
    /// A tokenizer whose tokens have no text.
    pub(super) fn new(tokenizer: &Tokenizer, eos: &[u32]) -> Result<Self, ApiError> {
        let failed =
            |reason: String| ApiError::new(Kind::Internal, format!("this model takes no grammars: {reason}"));
        let words = words(tokenizer).map_err(|error| failed(error.to_string()))?;
        let end = eos.first().ok_or_else(|| failed("it has no token that ends an answer".into()))?;
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, *end), &words).with_eos_tokens(eos);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory =
            ParserFactory::new_simple(&environment).map_err(|error| failed(error.to_string()))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(Grammars { factory })
    }

    fn matcher(&self, grammar: &str, param: &str) -> Result<Matcher, ApiError> {
        let parser = self.factory.create_parser(TopLevelGrammar::from_lark(grammar.to_owned()));
        let parser =
            parser.map_err(|error| ApiError::field(param, format!("{param} makes no grammar: {error:#}")))?;
        Ok(Matcher::new(Ok(parser)))
    }
}

/// The bytes of every token. Special ones begin with a byte that no text has.
fn words(tokenizer: &Tokenizer) -> Result<Vec<Vec<u8>>, TokenizerError> {
    // Some decoders leave out the space of a text's first token.
    let before = tokenizer.token_to_id("a");
    let word = |id: u32| {
        let bytes = tokenizer.bytes_after(before, id)?;
        let special = tokenizer.is_special(id).then_some(TokTrie::SPECIAL_TOKEN_MARKER);
        Ok(special.into_iter().chain(bytes).collect())
    };
    (0..tokenizer.vocab_size() as u32).map(word).collect()
}

/// Makes a constraint for each choice of a request.
pub(super) struct GuidePlan(Box<dyn Fn() -> Box<dyn Constraint> + Send>);

/// The tags around thinking.
#[derive(Clone)]
struct Tags {
    /// The token that begins it, where it is one.
    opener: Option<u32>,
    end: &'static str,
    /// The tokens of `end`.
    closer: Vec<u32>,
}

/// Where an answer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// At its beginning, where thinking may begin.
    Start,
    Thinking,
    /// Behind thinking.
    Content,
}

impl GuidePlan {
    /// What a conversation asks for; `None` where the model may do as it likes. `prompt` is the rendered text.
    ///
    /// # Errors
    /// What cannot be promised for this model.
    pub(super) fn new(
        asked: &Conversation,
        dialect: Dialect,
        prompt: &str,
        model: &ServedModel,
    ) -> Result<Option<Self>, ApiError> {
        let tools = asked.offered().unwrap_or_default();
        let is_strict = |tool: &&Value| tool["function"]["strict"] == true;
        let forced: Option<Vec<&Value>> = match &asked.tool_choice {
            ToolChoice::Required => Some(tools.iter().collect()),
            ToolChoice::Named(name) => {
                Some(tools.iter().filter(|tool| tool["function"]["name"] == **name).collect())
            }
            ToolChoice::Auto | ToolChoice::None => None,
        };
        let wanted =
            asked.format != Format::Text || forced.is_some() || tools.iter().any(|tool| is_strict(&tool));
        if !wanted && asked.thinking.budget.is_none() {
            return Ok(None);
        }
        let param = if asked.format == Format::Text { "tools" } else { "response_format" };
        let writer = || Writer::of(dialect, model);
        let grammars = model.grammars()?;
        let Some((begin, end)) = dialect.thinking() else {
            let grammar = channels::grammar(asked, forced.as_deref(), prompt, model)?;
            let matcher = grammars.matcher(&grammar, param)?;
            return Ok(Some(Self::of(channels::Guide::new(grammars.factory.tok_env().clone(), matcher))));
        };
        let rendered = prompt.trim_end();
        let place = if rendered.ends_with(begin) {
            Place::Thinking
        } else if rendered.ends_with(end) || asked.thinking.on == Some(false) {
            Place::Content
        } else {
            Place::Start
        };
        let lead = if place == Place::Content { "" } else { "/\\n{0,2}/ " };
        let content = match (&asked.format, &forced) {
            (Format::Text, None) => None,
            (Format::Json(schema), None) if tools.is_empty() => {
                Some(format!("start: {lead}json\njson: {}\n", json_rule(schema)))
            }
            (format, forced) => {
                let called = forced.clone().unwrap_or_else(|| tools.iter().collect());
                let json = match format {
                    Format::Json(schema) if forced.is_none() => Some(schema),
                    _ => None,
                };
                Some(writer()?.whole(lead, &called, asked.parallel, json))
            }
        };
        let content = content.map(|grammar| grammars.matcher(&grammar, param)).transpose()?;
        let calls = match content {
            None if tools.iter().any(|tool| is_strict(&tool)) => {
                let tools: Vec<&Value> = tools.iter().collect();
                let (opener, grammar) = writer()?.behind_opener(&tools)?;
                Some((opener, grammars.matcher(&grammar, "tools")?))
            }
            _ => None,
        };
        let opener = model.tokenizer().token_to_id(begin);
        Ok(Some(Self::of(Guide {
            tokens: grammars.factory.tok_env().clone(),
            matcher: content,
            calls,
            place,
            thinking: Tags { opener, end, closer: model.encode(end, false, "thinking")? },
            left: asked.thinking.budget.unwrap_or(usize::MAX),
            n_closed: 0,
            tail: Vec::new(),
        })))
    }

    fn of(guide: impl Constraint + Clone + 'static) -> Self {
        GuidePlan(Box::new(move || Box::new(guide.clone())))
    }

    /// A guide for one choice.
    pub(super) fn guide(&self) -> Box<dyn Constraint> {
        (self.0)()
    }
}

/// A schema as a rule of a grammar. White space is as models write it, and nowhere else.
fn json_rule(schema: &Value) -> String {
    let mut schema = schema.clone();
    schema["x-guidance"] =
        json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
    format!("%json {schema}")
}

/// Allows what a grammar does.
fn allow_next(matcher: &mut Matcher, tokens: &TokEnv, mask: &mut [u32]) {
    // Where the grammar's engine fails, the answer ends.
    let allowed = matcher.compute_mask_or_eos();
    let allowed = allowed.unwrap_or_else(|_| tokens.tok_trie().eos_token_set());
    mask.iter_mut().zip(allowed.as_slice()).for_each(|(word, allowed)| *word |= allowed);
}

/// Holds one answer of a model that writes tags to its form.
#[derive(Clone)]
struct Guide {
    tokens: TokEnv,
    /// What the content, or a call, must be from here on.
    matcher: Option<Matcher>,
    /// The opener of a call, and what must follow it.
    calls: Option<(&'static str, Matcher)>,
    place: Place,
    thinking: Tags,
    /// Tokens that thinking may still have.
    left: usize,
    /// Tokens of `thinking.closer` that were forced.
    n_closed: usize,
    /// The last bytes, as many as it takes to see a tag.
    tail: Vec<u8>,
}

impl Guide {
    /// Notes the bytes of a token. Whether `tag` is complete.
    fn sees(&mut self, token: u32, tag: &str) -> bool {
        const KEPT: usize = 64;
        let bytes = self.tokens.tok_trie().token(token).iter();
        self.tail.extend(bytes.filter(|byte| **byte != TokTrie::SPECIAL_TOKEN_MARKER));
        let seen = self.tail.windows(tag.len()).any(|window| window == tag.as_bytes());
        let n_old = self.tail.len().saturating_sub(KEPT.max(tag.len()));
        self.tail.drain(..n_old);
        if seen {
            self.tail.clear();
        }
        seen
    }

    fn allow_all(&self, mask: &mut [u32], ends: bool) {
        let trie = self.tokens.tok_trie();
        for id in 0..trie.vocab_size() {
            mask[id / 32] |= 1 << (id % 32);
        }
        if !ends {
            trie.eos_tokens().iter().for_each(|&id| mask[id as usize / 32] &= !(1 << (id % 32)));
        }
    }
}

impl Constraint for Guide {
    fn allow(&mut self, mask: &mut [u32]) {
        let mut one = |id: u32| mask[id as usize / 32] |= 1 << (id % 32);
        match self.place {
            Place::Thinking if self.left == 0 => return one(self.thinking.closer[self.n_closed]),
            Place::Thinking => return self.allow_all(mask, false),
            Place::Start => self.thinking.opener.filter(|_| self.left > 0).into_iter().for_each(one),
            Place::Content => {}
        }
        match &mut self.matcher {
            None => self.allow_all(mask, true),
            Some(matcher) => allow_next(matcher, &self.tokens, mask),
        }
    }

    fn accept(&mut self, token: u32) -> bool {
        match self.place {
            Place::Thinking if self.left == 0 => {
                self.n_closed += 1;
                if self.n_closed == self.thinking.closer.len() {
                    self.place = Place::Content;
                }
                return true;
            }
            Place::Thinking => {
                self.left -= 1;
                if self.sees(token, self.thinking.end) {
                    self.place = Place::Content;
                }
                return true;
            }
            Place::Start if Some(token) == self.thinking.opener => {
                self.place = Place::Thinking;
                return true;
            }
            Place::Start => self.place = Place::Content,
            Place::Content => {}
        }
        if let Some(matcher) = &mut self.matcher {
            let goes_on = matcher.consume_token(token).is_ok() && !matcher.is_stopped();
            if !goes_on && self.calls.is_some() {
                self.matcher = None;
                return true;
            }
            return goes_on;
        }
        if let Some((opener, _)) = self.calls
            && self.sees(token, opener)
        {
            self.matcher = self.calls.as_ref().map(|(_, matcher)| matcher.clone());
        }
        true
    }
}
