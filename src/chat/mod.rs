//! Between text and tokens: chat templates, text as it appears token by token, what in it is thinking or a tool call, and
//! where an answer ends.

pub mod answer;
pub mod boundaries;
pub mod detokenizer;
pub mod dialect;
pub mod reader;
pub mod stop;
pub mod template;
mod tools;
