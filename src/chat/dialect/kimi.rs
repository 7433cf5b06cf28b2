//! Kimi K2: `<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>`. What stands in front of the
//! arguments is the call's id, which counts the calls of the whole conversation.

use super::{Call, Entry, Form, Syntax, json_arguments::JsonArguments};
use crate::chat::{
    reader::{Miss, Peek},
    tools::Tools,
};

pub(super) static ENTRY: Entry = Entry {
    name: "kimi",
    is_of: |source| source.contains("<|tool_call_argument_begin|>"),
    tokens: &[
        "<think>",
        "</think>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ],
    form: Form::Tags(&SYNTAX),
};

static SYNTAX: Syntax = Syntax {
    thinking: ("<think>", "</think>"),
    openers: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    first_openers: &[],
    block_ends: &["<|tool_calls_section_end|>"],
    call,
};

fn call(peek: &mut Peek<'_>, _: &Tools) -> Result<Call, Miss> {
    peek.optional("<|tool_calls_section_begin|>")?;
    peek.literal("<|tool_call_begin|>")?;
    let id = peek.name_until("<|tool_call_argument_begin|>")?;
    let name = id.strip_prefix("functions.").unwrap_or(&id);
    let name = name.rsplit_once(':').map_or(name, |(name, _)| name);
    if name.is_empty() {
        return Err(Miss::No);
    }
    Ok(Call { name: name.into(), id: Some(id), arguments: JsonArguments::boxed(&["<|tool_call_end|>"]) })
}
