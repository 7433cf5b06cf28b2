//! Answers in channels, which Harmony has: a grammar of the whole answer, thinking and all. What is thought, said and called are
//! messages with headers, so there is no place at which a grammar could begin later.

use llguidance::{Matcher, toktrie::TokEnv};
use serde_json::{Value, json};

use super::{
    Format, allow_next,
    calls::{arguments_schema, quoted},
    json_rule,
};
use crate::{
    scheduler::Constraint,
    server::{
        conversation::Conversation,
        error::{ApiError, Kind},
        model::ServedModel,
    },
};

/// The answer behind a prompt that ends where a header begins: thinking, then a message or a call. `forced` are the functions of
/// which one must be called.
///
/// # Errors
/// A tokenizer without the tokens of channels, and a prompt that has begun the answer itself.
pub(super) fn grammar(
    asked: &Conversation,
    forced: Option<&[&Value]>,
    prompt: &str,
    model: &ServedModel,
) -> Result<String, ApiError> {
    let token = |name: &str| {
        let id = model.tokenizer().token_to_id(name).filter(|id| model.tokenizer().is_special(*id));
        let refusal = || {
            let message = format!(
                "neither the form of an answer nor a bound on thinking can be promised: this model writes {name}, but its \
                 tokenizer has no such token"
            );
            ApiError::new(Kind::Invalid, message)
        };
        id.map(|id| format!("<[{id}]>")).ok_or_else(refusal)
    };
    let [start, channel, message, end, constrain] = [
        token("<|start|>")?,
        token("<|channel|>")?,
        token("<|message|>")?,
        token("<|end|>")?,
        token("<|constrain|>")?,
    ];
    let last = prompt.rsplit_once("<|start|>").map_or("", |(_, last)| last);
    if last.contains("<|channel|>") {
        let message = "neither the form of an answer nor a bound on thinking can be promised: this model's template begins the \
                       answer itself";
        return Err(ApiError::new(Kind::Invalid, message));
    }
    let (thoughts, bound) = match asked.thinking.budget {
        _ if asked.thinking.on == Some(false) => ("", String::new()),
        Some(0) => ("", String::new()),
        Some(n_tokens) => ("think? ", format!("[max_tokens={n_tokens}]")),
        None => ("think* ", String::new()),
    };
    let next = format!("{end} {start} \"assistant\"");
    let mut rules = format!(
        "think: {channel} \"analysis\" {message} thought {next}\nthought{bound}: /(?s:.*)/\n\
         preamble: {channel} \"commentary\" {message} text {next}\ntext: /(?s:.*)/\n"
    );
    let may_call: Vec<&Value> = match forced {
        Some(tools) => tools.to_vec(),
        None => asked.offered().unwrap_or_default().iter().collect(),
    };
    let (mut lead, mut last) = (thoughts.to_owned(), Vec::new());
    match (forced, &asked.format) {
        (Some(_), _) => {}
        (None, Format::Json(schema)) => {
            last.push("said".to_owned());
            rules += &format!("said: {channel} \"final\" {message} json\njson: {}\n", json_rule(schema));
        }
        (None, Format::Text) => {
            // Models say what they are about to call.
            lead += if may_call.is_empty() { "" } else { "preamble? " };
            last.push("said".to_owned());
            rules += &format!("said: {channel} \"final\" {message} text\n");
        }
    }
    for (i, tool) in may_call.into_iter().enumerate() {
        let function = &tool["function"];
        let is_kept = forced.is_some() || asked.format != Format::Text || function["strict"] == true;
        let schema =
            if is_kept { arguments_schema(&function["parameters"]) } else { json!({ "type": "object" }) };
        let name = function["name"].as_str().unwrap_or_default();
        let head = quoted(&format!("commentary to=functions.{name} "));
        last.push(format!("call{i}"));
        rules += &format!(
            "call{i}: {channel} {head} {constrain} \"json\" {message} arguments{i}\narguments{i}: {}\n",
            json_rule(&schema)
        );
    }
    Ok(format!("start: {lead}({})\n{rules}", last.join(" | ")))
}

/// Holds one answer to a grammar from its first token to its last.
#[derive(Clone)]
pub(super) struct Guide {
    tokens: TokEnv,
    matcher: Matcher,
}

impl Guide {
    /// At the beginning of an answer.
    pub(super) fn new(tokens: TokEnv, matcher: Matcher) -> Self {
        Guide { tokens, matcher }
    }
}

impl Constraint for Guide {
    fn allow(&mut self, mask: &mut [u32]) {
        allow_next(&mut self.matcher, &self.tokens, mask);
    }

    fn accept(&mut self, token: u32) -> bool {
        self.matcher.consume_token(token).is_ok() && !self.matcher.is_stopped()
    }
}
