//! Mistral: `[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}`, where the id may be missing; older models write
//! `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`.

use super::{
    Call, Entry, Form, Syntax,
    json_arguments::{self, JsonArguments},
};
use crate::chat::{
    reader::{Miss, Peek},
    tools::Tools,
};

pub(super) static ENTRY: Entry = Entry {
    name: "mistral",
    is_of: |source| source.contains("[TOOL_CALLS]"),
    tokens: &["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
    form: Form::Tags(&SYNTAX),
};

static SYNTAX: Syntax = Syntax {
    thinking: ("[THINK]", "[/THINK]"),
    openers: &["[TOOL_CALLS]"],
    first_openers: &[],
    block_ends: &["]"],
    call,
};

fn call(peek: &mut Peek<'_>, _: &Tools) -> Result<Call, Miss> {
    let first = peek.optional("[TOOL_CALLS]")?;
    if peek.optional(if first { "[" } else { "," })? || peek.rest().starts_with('{') {
        return json_arguments::object_call(peek);
    }
    if !first {
        return Err(Miss::No);
    }
    let name = peek.word()?;
    let id = match peek.optional("[CALL_ID]")? {
        true => Some(peek.name_until("[ARGS]")?),
        false => {
            peek.space();
            peek.literal("[ARGS]")?;
            None
        }
    };
    Ok(Call { name, id, arguments: JsonArguments::boxed(&[]) })
}
