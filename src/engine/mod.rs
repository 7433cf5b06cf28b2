//! The engine: sequences in, tokens out. It records a program for each batch bucket, packs what changes from step to step
//! into one small write, and keeps the paged KV cache. It knows no tensor of a checkpoint and no request of a client.

mod batch;
mod division;
mod draw;
mod error;
mod input;
mod kv;
mod layered;
mod options;
mod prefill;
mod prefix;
mod prepare;
mod programs;
mod reuse;
pub mod sampling;
mod sequence;
mod snapshots;
mod state;
mod state_places;
mod step;
mod trace;
mod worth;

pub use batch::Batch;
pub use division::Division;
pub use error::EngineError;
pub use kv::BlockPool;
pub use options::{EngineOptions, step_bytes};
pub use prefix::StateCounters;
pub use reuse::Pages;
pub use sequence::Sequence;
pub use snapshots::KeptStates;
pub use state::RecurrentState;
pub use step::Engine;
pub use trace::Trace;
