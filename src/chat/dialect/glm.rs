//! `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM-4.5, 4.6 and 4.7.

use super::{
    Call, Entry, Form, Syntax,
    tagged_arguments::{Parameter, TaggedArguments, Tags},
};
use crate::chat::{
    reader::{Miss, Peek},
    tools::Tools,
};

pub(super) static ENTRY: Entry = Entry {
    name: "glm",
    is_of: |source| source.contains("<arg_key>"),
    tokens: &[
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ],
    form: Form::Tags(&SYNTAX),
};

static SYNTAX: Syntax = Syntax {
    thinking: ("<think>", "</think>"),
    openers: &["<tool_call>"],
    first_openers: &[],
    block_ends: &[],
    call,
};

static TAGS: Tags = Tags {
    parameter,
    opener: "<arg_key>",
    closers: &["</arg_value>"],
    end: "</tool_call>",
    block_end: "</tool_call>",
    own_line: false,
    undeclared_are_strings: false,
};

fn call(peek: &mut Peek<'_>, tools: &Tools) -> Result<Call, Miss> {
    peek.literal("<tool_call>")?;
    peek.space();
    let name = peek.word()?;
    let arguments = TaggedArguments::behind(peek, &TAGS, tools.parameters(&name))?;
    Ok(Call { name, id: None, arguments })
}

fn parameter(peek: &mut Peek<'_>) -> Result<Parameter, Miss> {
    peek.literal("<arg_key>")?;
    let name = peek.name_until("</arg_key>")?;
    peek.space();
    peek.literal("<arg_value>")?;
    Ok(Parameter { name, is_string: None })
}
