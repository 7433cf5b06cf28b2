//! DeepSeek V3.1: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`. V3 and R1 put the word `function` in front of the
//! separator, and behind it the name and the arguments in a fenced block.

use super::{Call, Entry, Form, Syntax, json_arguments::JsonArguments};
use crate::chat::{
    reader::{Miss, Peek},
    tools::Tools,
};

pub(super) static ENTRY: Entry = Entry {
    name: "deepseek",
    is_of: |source| source.contains("<｜tool▁call▁begin｜>"),
    tokens: &[
        "<think>",
        "</think>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
    form: Form::Tags(&SYNTAX),
};

static SYNTAX: Syntax = Syntax {
    thinking: ("<think>", "</think>"),
    openers: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    first_openers: &[],
    block_ends: &["<｜tool▁calls▁end｜>"],
    call,
};

fn call(peek: &mut Peek<'_>, _: &Tools) -> Result<Call, Miss> {
    peek.optional("<｜tool▁calls▁begin｜>")?;
    peek.literal("<｜tool▁call▁begin｜>")?;
    let name = peek.name_until("<｜tool▁sep｜>")?;
    let fence = peek.clone().fenced_name();
    if name == "function" && fence != Err(Miss::No) {
        return Ok(Call {
            name: peek.fenced_name()?,
            id: None,
            arguments: JsonArguments::boxed(&["```", "<｜tool▁call▁end｜>"]),
        });
    }
    Ok(Call { name, id: None, arguments: JsonArguments::boxed(&["<｜tool▁call▁end｜>"]) })
}

impl Peek<'_> {
    fn fenced_name(&mut self) -> Result<String, Miss> {
        let name = self.word()?;
        self.space();
        self.literal("```json")?;
        Ok(name)
    }
}
