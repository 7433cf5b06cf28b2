//! Between text and tokens: chat templates, text as it appears token by token, and where an answer ends.

pub mod answer;
pub mod detokenizer;
pub mod stop;
pub mod template;
