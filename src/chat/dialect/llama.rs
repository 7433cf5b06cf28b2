//! Llama 3: the answer is `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>` in front; several are separated by
//! semicolons.

use super::{Call, Entry, Form, Syntax, json_arguments};
use crate::chat::{
    reader::{Miss, Peek},
    tools::Tools,
};

pub(super) static ENTRY: Entry = Entry {
    name: "llama",
    is_of: |source| source.contains("<|start_header_id|>") || source.contains("<|python_tag|>"),
    tokens: &["<|python_tag|>"],
    form: Form::Tags(&SYNTAX),
};

static SYNTAX: Syntax = Syntax {
    thinking: ("<think>", "</think>"),
    openers: &["<|python_tag|>"],
    first_openers: &["{"],
    block_ends: &[],
    call,
};

fn call(peek: &mut Peek<'_>, _: &Tools) -> Result<Call, Miss> {
    peek.optional("<|python_tag|>")?;
    peek.optional(";")?;
    json_arguments::object_call(peek)
}
