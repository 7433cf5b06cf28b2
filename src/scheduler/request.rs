//! What a client asks for and what it gets. The server speaks to a [`Service`]; the scheduler is one, and tests have
//! another that needs no model.

use tokio::sync::mpsc;

use crate::engine::{Division, sampling::SamplingParams};

/// A continuation that somebody wants.
pub struct Request {
    /// Tokens to continue; one at least.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Added to the logits of these tokens before anything else. -100 and less forbids one.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that the answer may have; cut to what the context leaves.
    pub max_tokens: usize,
    /// Tokens that end the answer.
    pub eos: Vec<u32>,
    /// With each token its log-probability, and so many of the likeliest ones beside it.
    pub logprobs: Option<usize>,
    /// What the answer must look like.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Lengths of the prompt's beginnings that another prompt may share (ends of messages), ascending.
    pub anchors: Vec<usize>,
}

/// A grammar over tokens, driven by the engine's thread.
pub trait Constraint: Send {
    /// Sets the bit of each token that may come next; bit `id % 32` of word `id / 32`. All bits are clear before.
    fn allow(&mut self, mask: &mut [u32]);
    /// Takes the token that was drawn. Whether the text may go on.
    fn accept(&mut self, token: u32) -> bool;
}

/// A token's logarithm of probability, of the distribution before temperature and cuts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Logprob {
    /// The token.
    pub id: u32,
    /// At most 0.
    pub logprob: f32,
}

/// A token of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// The token.
    pub id: u32,
    /// Of the token, where it was asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens of its place, best first.
    pub top: Vec<Logprob>,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// A token of [`Request::eos`], which is the last that was sent, or the end of a grammar.
    Eos,
    /// [`Request::max_tokens`], or the end of the context.
    Length,
    /// The service is being shut down.
    Shutdown,
}

/// Tokens of a request, counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt.
    pub prompt_tokens: usize,
    /// Of those, that were not computed because another request had.
    pub cached_tokens: usize,
    /// Drawn.
    pub completion_tokens: usize,
}

/// The end of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Ended {
    /// Why.
    pub stop: Stop,
    /// What it took.
    pub usage: Usage,
}

/// What happens to a request, in order: any number of `Prefill`, any number of `Token`, then one `Ended` or `Failed`.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// So many tokens of the prompt are computed (those that were cached among them).
    Prefill {
        /// Computed.
        n_computed: usize,
        /// Of those, found in the cache.
        n_cached: usize,
    },
    /// A token was drawn.
    Token(Token),
    /// The answer is whole.
    Ended(Ended),
    /// The engine could not go on with it; others may.
    Failed(String),
}

/// The events of a request. Dropping it cancels the request within one step.
pub type Events = mpsc::UnboundedReceiver<Event>;

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Too many wait already.
    #[error("{n_waiting} requests wait already: try again in {retry_seconds} s")]
    Full {
        /// Requests that wait.
        n_waiting: usize,
        /// When another try is likely to be taken.
        retry_seconds: u32,
    },
    /// The prompt leaves no room for an answer.
    #[error("the prompt has {n_tokens} tokens and the context holds {context}, the answer included")]
    TooLong {
        /// Of the prompt.
        n_tokens: usize,
        /// That prompt and answer may have together.
        context: usize,
    },
    /// No more requests are taken.
    #[error("the server is shutting down")]
    ShuttingDown,
}

/// What a service did and does.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Stats {
    /// Requests whose tokens are computed now.
    pub n_running: usize,
    /// Requests that wait.
    pub n_waiting: usize,
    /// Requests that ended, whatever the way.
    pub n_ended: u64,
    /// Of those, whose client left.
    pub n_cancelled: u64,
    /// Prompt tokens that were computed.
    pub prefilled_tokens: u64,
    /// Prompt tokens that were found in the cache.
    pub cached_tokens: u64,
    /// Tokens drawn.
    pub decoded_tokens: u64,
    /// What the memory holds.
    pub cache: Cache,
    /// Of each MoE layer, where experts are behind a cache.
    pub layers: Vec<Routed>,
    /// Seconds since it began.
    pub uptime_seconds: f64,
}

/// What the memory of a service holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct Cache {
    /// Tokens that the key-value cache has room for.
    pub kv_tokens: usize,
    /// Of those, held by running requests.
    pub kv_tokens_running: usize,
    /// Of those, kept for prompts to come.
    pub kv_tokens_kept: usize,
    /// Bytes of a token.
    pub kv_token_bytes: u64,
    /// Device memory for states of recurrent layers, of running requests and kept ones.
    pub state_bytes: u64,
    /// States that are kept for prompts to come, where a model has any.
    pub states: Option<States>,
    /// Experts, where they are behind a cache.
    pub experts: Option<Experts>,
}

/// States that are kept for prompts to come: places now, and sums since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct States {
    /// Places on the device.
    pub n_slots: usize,
    /// Of those, taken.
    pub n_in_slots: usize,
    /// Most states in host memory.
    pub n_host: usize,
    /// States there.
    pub n_in_host: usize,
    /// Bytes of one.
    pub state_bytes: u64,
    /// Requests that went on from one on the device.
    pub slot_hits: u64,
    /// From one in host memory.
    pub host_hits: u64,
    /// That went from the device to host memory.
    pub spilled: u64,
    /// That left for the room of others.
    pub dropped: u64,
}

/// Experts behind a cache: places now, and sums since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct Experts {
    /// Places on the device.
    pub n_slots: usize,
    /// Experts of all layers.
    pub n_experts: usize,
    /// Bytes of one.
    pub record_bytes: u64,
    /// Of all layers.
    #[serde(flatten)]
    pub routed: Routed,
    /// Experts that came over the link for prompts.
    pub streamed: u64,
}

/// Routed experts of decode steps since the start, by where they were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Routed {
    /// In a place on the device.
    pub hits: u64,
    /// Brought to one.
    pub fetched: u64,
    /// Read in host memory by the device.
    pub in_place: u64,
    /// Computed by the host.
    pub on_host: u64,
}

/// Something that answers requests.
pub trait Service: Send + Sync {
    /// Takes a request. Its events come from another thread.
    ///
    /// # Errors
    /// [`Refusal`]; nothing was taken.
    fn submit(&self, request: Request) -> Result<Events, Refusal>;

    /// Tokens that a prompt and its answer may have together.
    fn context(&self) -> usize;

    /// What it did and does.
    fn stats(&self) -> Stats;

    /// Divides the memory anew, between two steps. What it holds then.
    ///
    /// # Errors
    /// What would fit, in words; nothing has changed.
    fn divide(&self, division: Division) -> Result<Cache, String>;
}
