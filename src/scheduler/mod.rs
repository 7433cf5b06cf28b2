//! Many requests on one engine: what a client asks for and what it gets, in tokens. No text, no protocol, no device.

mod request;
mod sequential;

pub use request::{
    Constraint, Ended, Event, Events, Logprob, Refusal, Request, Service, Stats, Stop, Token, Usage,
};
pub use sequential::Sequential;
