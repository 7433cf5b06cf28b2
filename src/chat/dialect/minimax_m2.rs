//! MiniMax M2: `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>`.

use super::{
    Call, Entry, Form, Syntax,
    tagged_arguments::{Parameter, TaggedArguments, Tags},
};
use crate::chat::{
    reader::{Miss, Peek},
    tools::Tools,
};

pub(super) static ENTRY: Entry = Entry {
    name: "minimax-m2",
    is_of: |source| source.contains("<minimax:tool_call>"),
    tokens: &["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"],
    form: Form::Tags(&SYNTAX),
};

static SYNTAX: Syntax = Syntax {
    thinking: ("<think>", "</think>"),
    openers: &["<minimax:tool_call>"],
    first_openers: &[],
    block_ends: &["</minimax:tool_call>"],
    call,
};

static TAGS: Tags = Tags {
    parameter,
    opener: "<parameter name=",
    closers: &["</parameter>"],
    end: "</invoke>",
    block_end: "</minimax:tool_call>",
    own_line: false,
    undeclared_are_strings: false,
};

fn call(peek: &mut Peek<'_>, tools: &Tools) -> Result<Call, Miss> {
    peek.optional("<minimax:tool_call>")?;
    peek.literal("<invoke name=\"")?;
    let name = peek.name_until("\">")?;
    let arguments = TaggedArguments::behind(peek, &TAGS, tools.parameters(&name))?;
    Ok(Call { name, id: None, arguments })
}

fn parameter(peek: &mut Peek<'_>) -> Result<Parameter, Miss> {
    peek.literal("<parameter name=\"")?;
    Ok(Parameter { name: peek.name_until("\">")?, is_string: None })
}
