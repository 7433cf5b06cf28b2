//! Elastic experts: where the experts of a route point are computed, and what stays on the device.
//!
//! The policies are pure: ids, rows, bytes and measured seconds in, plans out; no device, no clock.
//!
//! - [`budget`]: how device memory is divided at load
//! - [`cache`]: which expert is in which slot, and which one leaves for another
//! - [`cost`]: the seconds that a split of the misses takes, and the best split (q*)
//! - [`plan`]: the answer to a route point
//! - [`ram`]: which experts host memory holds, where that is not all of them
//! - [`trace`]: recorded and synthetic routings
//! - [`simulate`]: a trace replayed on a device in virtual time
//!
//! What carries the plans out moves records and calls backends, and knows none of them by name: host banks, the reader that fills
//! them from a disk, the host's half of the experts, the stream of a prefill, the start-up probe, and [`Elastic`], which holds them together. Nothing here
//! allocates at a route point.

mod banks;
pub mod budget;
pub mod cache;
pub mod cost;
mod counters;
mod elastic;
mod feed;
mod host;
pub mod plan;
mod probe;
pub mod ram;
mod reader;
pub mod simulate;
mod stream;
mod tier;
pub mod trace;

pub use banks::ExpertBanks;
pub use budget::{BudgetError, ByteCount, CacheSize, ExpertPlan};
pub use elastic::{Elastic, ElasticCounters, ElasticError, ElasticOptions};
pub use host::HostExperts;
pub use ram::RamCache;
pub use reader::{DiskSums, RecordReader, RecordSource};
pub use stream::{ExpertStream, LayerStep, Streamed};
pub use tier::DiskTier;

pub use cache::{ExpertCache, Policy, Resized};
pub use cost::{ExpertCost, FromDisk, Misses, Observed, Rates, Split, Spread, StepSeconds};
pub use counters::Counters;
pub use plan::{Choices, Mode, PlanError, Planned, Planner, PlannerOptions, StepKind, Wanted};
pub use probe::{saved_disk_rate, saved_rates};
pub use trace::{Preference, Routing, Trace, TraceError, TraceWriter};
