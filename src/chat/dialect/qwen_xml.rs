//! `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5, Qwen3.6, Nemotron.
//! Models forget `<tool_call>` now and then.

use super::{
    Call, Entry, Form, Syntax,
    tagged_arguments::{Parameter, TaggedArguments, Tags},
};
use crate::chat::{
    reader::{Miss, Peek},
    tools::Tools,
};

pub(super) static ENTRY: Entry = Entry {
    name: "qwen-xml",
    is_of: |source| source.contains("<function="),
    tokens: &["<think>", "</think>", "<tool_call>", "</tool_call>"],
    form: Form::Tags(&SYNTAX),
};

static SYNTAX: Syntax = Syntax {
    thinking: ("<think>", "</think>"),
    openers: &["<tool_call>", "<function="],
    first_openers: &[],
    block_ends: &["</tool_call>"],
    call,
};

static TAGS: Tags = Tags {
    parameter,
    opener: "<parameter=",
    closers: &["\n</parameter>", "</parameter>"],
    end: "</function>",
    block_end: "</tool_call>",
    own_line: true,
    undeclared_are_strings: true,
};

fn call(peek: &mut Peek<'_>, tools: &Tools) -> Result<Call, Miss> {
    peek.optional("<tool_call>")?;
    peek.literal("<function=")?;
    let name = peek.name_until(">")?;
    let arguments = TaggedArguments::behind(peek, &TAGS, tools.parameters(&name))?;
    Ok(Call { name, id: None, arguments })
}

fn parameter(peek: &mut Peek<'_>) -> Result<Parameter, Miss> {
    peek.literal("<parameter=")?;
    Ok(Parameter { name: peek.name_until(">")?, is_string: None })
}
