//! What can be wrong with a step, in words its owner can act on.

use super::sampling::SamplingError;
use crate::moe::ByteCount;

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
    /// A new division of the memory does not fit.
    #[error(
        "that takes {more} more device memory and {spare} are to be had: beside that key-value cache fit {slots} slots of \
         experts, and beside what is there now {tokens} tokens, or {states} states of recurrent layers"
    )]
    Division {
        /// Bytes beyond what is taken now.
        more: ByteCount,
        /// Bytes to be had.
        spare: ByteCount,
        /// Slots that would fit beside the pages and states asked for.
        slots: usize,
        /// Tokens that would fit beside the slots of now.
        tokens: usize,
        /// Slots for states that would fit beside the rest of now.
        states: usize,
    },
    /// A key-value cache that is smaller than what is in it.
    #[error(
        "a key-value cache of {tokens} tokens does not hold the running sequences: they take {fits} tokens"
    )]
    KvInUse {
        /// Asked for.
        tokens: usize,
        /// The least that holds them.
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
    /// All places for recurrent states are taken by other sequences.
    #[error("all {n} sequences that the engine has room for are running: wait for one of them to end")]
    StatesFull {
        /// Places.
        n: usize,
    },
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
