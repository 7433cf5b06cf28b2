//! freetoken runs Mixture-of-Experts language models far larger than the GPU's memory on one personal machine.
//!
//! [`formats`] reads checkpoints, [`models`] turn them into ops, [`engine`] records and replays steps on a device that
//! [`devices`] opened, [`chat`] is what lies between text and tokens, [`scheduler`] and [`server`] what lies between these and
//! many clients. `docs/architecture.md` is the map.

pub mod chat;
pub mod cli;
pub mod convert;
pub mod devices;
pub mod engine;
pub mod formats;
pub mod golden;
pub mod hub;
pub mod loading;
pub mod model_files;
pub mod models;
pub mod moe;
pub mod philox;
pub mod scheduler;
pub mod server;
