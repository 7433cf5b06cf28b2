//! Many requests on one engine: what a client asks for and what it gets, in tokens. No text, no protocol, no device.

mod batching;
mod request;
mod row_draw;

pub use batching::{Scheduler, SchedulerOptions};
pub use request::{
    Cache, Constraint, Ended, Event, Events, Experts, Logprob, Refusal, Request, Routed, Service, States,
    Stats, Stop, Token, Usage,
};
