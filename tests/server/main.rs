//! The server without sockets and without an engine: a service that says what a test wrote, behind all routes.

mod anthropic;
mod chat;
mod completions;
mod control;
mod fake;
mod grammar;
mod refused;
mod responses;
