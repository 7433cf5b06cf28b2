//! DSML: `<｜DSML｜invoke name="NAME">` with `<｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>`, in a block
//! of `function_calls` (DeepSeek V3.2) or `tool_calls` (V4). The tag says whether a value is text or JSON.

use super::{
    Call, Entry, Form, Syntax,
    tagged_arguments::{Parameter, TaggedArguments, Tags},
};
use crate::chat::{
    reader::{Miss, Peek},
    tools::Tools,
};

pub(super) static ENTRY: Entry = Entry {
    name: "dsml",
    is_of: |source| source.contains("｜DSML｜"),
    tokens: &["<think>", "</think>", "｜DSML｜"],
    form: Form::Tags(&SYNTAX),
};

static SYNTAX: Syntax = Syntax {
    thinking: ("<think>", "</think>"),
    openers: &["<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜invoke"],
    first_openers: &[],
    block_ends: &["</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"],
    call,
};

static TAGS: Tags = Tags {
    parameter,
    opener: "<｜DSML｜parameter",
    closers: &["</｜DSML｜parameter>"],
    end: "</｜DSML｜invoke>",
    block_end: "</｜DSML｜",
    own_line: false,
    undeclared_are_strings: false,
};

fn call(peek: &mut Peek<'_>, tools: &Tools) -> Result<Call, Miss> {
    if !peek.optional("<｜DSML｜function_calls>")? {
        peek.optional("<｜DSML｜tool_calls>")?;
    }
    peek.literal("<｜DSML｜invoke name=\"")?;
    let name = peek.name_until("\">")?;
    let arguments = TaggedArguments::behind(peek, &TAGS, tools.parameters(&name))?;
    Ok(Call { name, id: None, arguments })
}

fn parameter(peek: &mut Peek<'_>) -> Result<Parameter, Miss> {
    peek.literal("<｜DSML｜parameter name=\"")?;
    let name = peek.name_until("\"")?;
    if peek.clone().literal(">") == Ok(()) {
        peek.literal(">")?;
        return Ok(Parameter { name, is_string: None });
    }
    peek.literal(" string=\"")?;
    let is_string = peek.name_until("\">")? == "true";
    Ok(Parameter { name, is_string: Some(is_string) })
}
