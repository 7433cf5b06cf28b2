//! [`Ask`]: what a request wants, in the words of no protocol; and the way from there to the service and its [`Answers`].

use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use serde_json::{Map, Value};

use super::{
    Server,
    answers::{Answers, Reading},
    error::{ApiError, Kind},
    fields::{Fields, shown, wrong},
    grammar::GuidePlan,
    journal::Ticket,
};
use crate::{
    chat::{
        dialect::Dialect,
        reader::Reader,
        stop::{StopError, StopStrings},
    },
    engine::sampling::{ParamOutOfRange, SamplingParams},
    formats::generation_config::GenerationConfig,
    scheduler::Request,
};

/// Answers that one request may want.
pub(super) const MOST_CHOICES: usize = 16;
/// Tokens with a bias.
const MOST_BIASES: usize = 1024;

/// How the tokens of an answer are drawn, and where it ends.
#[derive(Debug, Clone)]
pub(super) struct Drawing {
    /// Parameters, of which the seed is the first choice's.
    pub(super) params: SamplingParams,
    /// Biases of tokens.
    pub(super) logit_bias: Vec<(u32, f32)>,
    /// Log-probabilities, and of how many tokens beside the drawn one.
    pub(super) logprobs: Option<usize>,
    /// Texts that end it.
    pub(super) stop: Vec<String>,
    /// Choices.
    pub(super) n: usize,
    /// Tokens that it may have; what the context leaves where nothing is said.
    pub(super) max_tokens: usize,
    /// Whether the model's own end is no end.
    pub(super) ignore_eos: bool,
}

impl Drawing {
    /// Takes the fields that all protocols have. `max_tokens` are the names of the limit, of which the first that is given
    /// wins.
    ///
    /// # Errors
    /// The first field that cannot be honoured.
    pub(super) fn take(
        fields: &mut Fields,
        generation: &GenerationConfig,
        max_tokens: &[&str],
        stop: &str,
    ) -> Result<Self, ApiError> {
        let mut params = generation.defaults();
        for (name, param) in [
            ("temperature", &mut params.temperature),
            ("top_p", &mut params.top_p),
            ("min_p", &mut params.min_p),
            ("presence_penalty", &mut params.presence_penalty),
            ("frequency_penalty", &mut params.frequency_penalty),
            ("repetition_penalty", &mut params.repetition_penalty),
        ] {
            *param = fields.take(name)?.unwrap_or(*param);
        }
        if let Some(top_k) = fields.take::<i64>("top_k")? {
            // Some clients turn it off with -1.
            params.top_k = match u32::try_from(top_k) {
                Ok(top_k) => top_k,
                Err(_) if top_k == -1 => 0,
                Err(_) => {
                    return Err(wrong("top_k", &top_k.to_string(), "a whole number from 0 (off)"));
                }
            };
        }
        params.seed = fields.take::<i64>("seed")?.map_or_else(random, |seed| seed as u64);
        let params = params.validated().map_err(|ParamOutOfRange { field, value, range }| {
            ApiError::field(field, format!("{field} is {value}, but must be {range}"))
        })?;
        let mut drawing = Drawing {
            params,
            logit_bias: Vec::new(),
            logprobs: None,
            stop: take_stop(fields, stop)?,
            n: 1,
            max_tokens: generation.max_new_tokens.map_or(usize::MAX, |most| most as usize),
            ignore_eos: fields.take("ignore_eos")?.unwrap_or_default(),
        };
        for name in max_tokens.iter().rev() {
            if let Some(most) = fields.take(name)? {
                drawing.limit(name, most)?;
            }
        }
        Ok(drawing)
    }

    /// Sets the most tokens of an answer. More than the context leaves is cut to that.
    ///
    /// # Errors
    /// Zero or less.
    pub(super) fn limit(&mut self, field: &str, most: i64) -> Result<(), ApiError> {
        let most_tokens = usize::try_from(most).ok().filter(|most| *most > 0);
        self.max_tokens =
            most_tokens.ok_or_else(|| wrong(field, &most.to_string(), "a whole number from 1"))?;
        Ok(())
    }

    /// Takes the number of choices.
    ///
    /// # Errors
    /// None at all, or too many.
    pub(super) fn take_n(&mut self, fields: &mut Fields) -> Result<(), ApiError> {
        if let Some(n) = fields.take::<u64>("n")? {
            let most = MOST_CHOICES as u64;
            if !(1..=most).contains(&n) {
                return Err(wrong("n", &n.to_string(), &format!("from 1 to {most}")));
            }
            self.n = n as usize;
        }
        Ok(())
    }

    /// Takes the biases of tokens, of which the model has `vocab`.
    ///
    /// # Errors
    /// A token that there is not, or a bias out of range.
    pub(super) fn take_logit_bias(&mut self, fields: &mut Fields, vocab: usize) -> Result<(), ApiError> {
        let Some(biases) = fields.take::<Map<String, Value>>("logit_bias")? else { return Ok(()) };
        if biases.len() > MOST_BIASES {
            let found = format!("of {} tokens", biases.len());
            return Err(wrong("logit_bias", &found, &format!("of at most {MOST_BIASES}")));
        }
        for (token, bias) in &biases {
            let id = token.parse::<u32>().ok().filter(|id| (*id as usize) < vocab);
            let id = id.ok_or_else(|| {
                let words = format!("the ids of tokens below {vocab}");
                wrong("logit_bias", &format!("of {}", shown(&Value::from(token.as_str()))), &words)
            })?;
            let value = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
            let value = value.ok_or_else(|| {
                wrong(&format!("logit_bias.{id}"), &shown(bias), "a number from -100 (never) to 100")
            })?;
            self.logit_bias.push((id, value as f32));
        }
        Ok(())
    }
}

/// Texts that end an answer: one, or a list.
fn take_stop(fields: &mut Fields, field: &str) -> Result<Vec<String>, ApiError> {
    let words = "a string or an array of strings";
    let strings = match fields.take::<Value>(field)? {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(texts)) => {
            let strings = texts.iter().map(|text| text.as_str().map(str::to_owned));
            strings.collect::<Option<_>>().ok_or_else(|| wrong(field, "an array of other things", words))?
        }
        Some(other) => return Err(wrong(field, &shown(&other), words)),
    };
    StopStrings::new(strings.clone())
        .map_err(|error: StopError| ApiError::field(field, error.to_string()))?;
    Ok(strings)
}

/// Tokens to continue.
pub(super) struct Prompt {
    /// One at least.
    pub(super) tokens: Vec<u32>,
    /// Lengths of its beginnings that other prompts may share.
    pub(super) anchors: Vec<usize>,
}

/// How a chat's answer is divided.
pub(super) struct ReadingPlan {
    /// How the model writes thinking and calls.
    pub(super) dialect: Dialect,
    /// The rendered prompt, which may end inside of thinking.
    pub(super) prompt: String,
    /// What may be called.
    pub(super) tools: Option<Vec<Value>>,
    /// Whether the first call ends the answer.
    pub(super) one_call: bool,
}

/// Prompts, and how they are to be continued.
pub(super) struct Ask {
    /// One for most protocols.
    pub(super) prompts: Vec<Prompt>,
    /// How tokens are drawn.
    pub(super) drawing: Drawing,
    /// How the answer is divided; without it, all is content.
    pub(super) reading: Option<ReadingPlan>,
    /// What the answer must look like.
    pub(super) constraint: Option<GuidePlan>,
}

impl Ask {
    /// Hands it to the service, once a choice.
    ///
    /// # Errors
    /// What the service refuses.
    pub(super) fn submit(self, server: &Arc<Server>, ticket: Arc<Ticket>) -> Result<Answers, ApiError> {
        let service = server.service()?;
        let context = service.context();
        for prompt in &self.prompts {
            match prompt.tokens.len() {
                0 => return Err(ApiError::new(Kind::Invalid, "the prompt has no tokens: give a text")),
                n_tokens if n_tokens >= context => return Err(ApiError::too_long(n_tokens, context)),
                _ => {}
            }
        }
        let mut choices = Vec::with_capacity(self.prompts.len() * self.drawing.n);
        for prompt in &self.prompts {
            for choice in 0..self.drawing.n {
                let reading = self.reading(server, prompt, choice);
                choices.push((service.submit(self.request(server, prompt, choice, context))?, reading));
            }
        }
        Ok(Answers::new(server.clone(), choices, ticket))
    }

    fn request(&self, server: &Server, prompt: &Prompt, choice: usize, context: usize) -> Request {
        let Drawing { params, logit_bias, logprobs, max_tokens, ignore_eos, .. } = &self.drawing;
        let seed = params.seed.wrapping_add(choice as u64);
        let eos = &server.model().generation().eos_token_ids;
        Request {
            prompt: prompt.tokens.clone(),
            sampling: SamplingParams { seed, ..*params },
            logit_bias: logit_bias.clone(),
            max_tokens: (*max_tokens).min(context - prompt.tokens.len()),
            eos: if *ignore_eos { Vec::new() } else { eos.clone() },
            logprobs: *logprobs,
            constraint: self.constraint.as_ref().map(GuidePlan::guide),
            anchors: prompt.anchors.clone(),
        }
    }

    fn reading(&self, server: &Server, prompt: &Prompt, choice: usize) -> Reading {
        let tokenizer = server.model().tokenizer();
        let plan = self.reading.as_ref();
        Reading {
            prompt_tokens: prompt.tokens.len(),
            is_first: choice == 0,
            reader: plan.map(|ReadingPlan { dialect, prompt, tools, .. }| {
                Reader::new(*dialect, prompt, tools.as_deref(), &fresh_id(""))
            }),
            markers: plan.map(|plan| plan.dialect.tokens(tokenizer)).unwrap_or_default(),
            one_call: plan.is_some_and(|plan| plan.one_call),
            stop: StopStrings::new(self.drawing.stop.clone()).expect("checked when they were read"),
            eos: server.model().generation().eos_token_ids.clone(),
        }
    }
}

/// A number that nobody can tell beforehand.
pub(super) fn random() -> u64 {
    static DRAWN: AtomicU64 = AtomicU64::new(0);
    RandomState::new().hash_one(DRAWN.fetch_add(1, Ordering::Relaxed))
}

/// A name that no other answer has.
pub(super) fn fresh_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:08x}", random(), random() as u32)
}
