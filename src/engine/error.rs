//! What can be wrong with a step, in words its owner can act on.

use super::sampling::SamplingError;

/// Why a step, or making an engine, failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device's answer.
    #[error(transparent)]
    Backend(#[from] freetoken_backend::Error),
    /// Experts cannot be served as was asked.
    #[error(transparent)]
    Experts(#[from] crate::moe::ElasticError),
    /// No token could be drawn.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The plan does not fit.
    #[error(
        "a context of {context} tokens needs {needed_mib} MiB of memory and {free_mib} MiB are free: try --context {fits}"
    )]
    TooLarge {
        /// Context asked for.
        context: usize,
        /// Memory that it takes.
        needed_mib: u64,
        /// Memory that is free.
        free_mib: u64,
        /// A context that fits.
        fits: usize,
    },
    /// A sequence outgrew the context.
    #[error(
        "the sequence has {n_tokens} tokens and the context holds {context}: shorten it, or raise --context"
    )]
    ContextFull {
        /// Tokens of the sequence.
        n_tokens: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// All pages are taken by other sequences.
    #[error("the key-value cache is full: wait for other sequences to end, or raise --context")]
    CacheFull,
    /// A token that the model does not have.
    #[error(
        "token id {id} is not below the model's vocabulary of {vocab}: the tokenizer does not belong to this model"
    )]
    Token {
        /// The token.
        id: u32,
        /// Tokens of the model.
        vocab: usize,
    },
}
