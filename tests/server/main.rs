//! The server without an engine, and but for slow clients without sockets: a service that says what a test wrote, behind all routes.

mod anthropic;
mod chat;
mod completions;
mod control;
mod fake;
mod fields;
mod grammar;
mod refused;
mod responses;
mod slow;
