//! Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which Qwen2.5 and Qwen3 write, and many fine-tuned models.

use super::{Call, Entry, Form, Syntax, json_arguments};
use crate::chat::{
    reader::{Miss, Peek},
    tools::Tools,
};

pub(super) static ENTRY: Entry = Entry {
    name: "hermes",
    is_of: |source| source.contains("<tool_call>"),
    tokens: &["<think>", "</think>", "<tool_call>", "</tool_call>"],
    form: Form::Tags(&SYNTAX),
};

static SYNTAX: Syntax = Syntax {
    thinking: ("<think>", "</think>"),
    openers: &["<tool_call>"],
    first_openers: &[],
    block_ends: &["</tool_call>"],
    call,
};

fn call(peek: &mut Peek<'_>, _: &Tools) -> Result<Call, Miss> {
    peek.optional("<tool_call>")?;
    json_arguments::object_call(peek)
}
