//! Anthropic's protocol.

mod blocks;
pub(super) mod count;
pub(super) mod messages;
mod request;
