//! MiniMax M3: every tag of a call stands behind `]<]minimax[>[`, and arguments are elements within elements: fields by their
//! names, members of a list by `item`.

use serde_json::Value;

use super::{Arguments, Call, Entry, Form, Syntax, typed};
use crate::chat::{
    reader::{Found, Miss, Peek, Unread},
    tools::{Parameters, Tools, property},
};

pub(super) static ENTRY: Entry = Entry {
    name: "minimax-m3",
    is_of: |source| source.contains("]<]minimax[>["),
    tokens: &["<mm:think>", "</mm:think>", SPACE],
    form: Form::Tags(&SYNTAX),
};

static SYNTAX: Syntax = Syntax {
    thinking: ("<mm:think>", "</mm:think>"),
    openers: &["]<]minimax[>[<tool_call>"],
    first_openers: &[],
    block_ends: &["]<]minimax[>[</tool_call>"],
    call,
};

/// What stands before a tag.
const SPACE: &str = "]<]minimax[>[";
const END: &str = "]<]minimax[>[</invoke>";
/// Elements within elements that are read; deeper ones are passed on as they are written.
const MAX_DEPTH: usize = 64;

fn call(peek: &mut Peek<'_>, tools: &Tools) -> Result<Call, Miss> {
    peek.optional("]<]minimax[>[<tool_call>")?;
    peek.literal("]<]minimax[>[<invoke name=\"")?;
    let name = peek.name_until("\">")?;
    let parameters = tools.parameters(&name);
    Ok(Call { name, id: None, arguments: Box::new(Elements { text: String::new(), parameters }) })
}

/// Keeps the elements until the call ends.
struct Elements {
    text: String,
    parameters: Parameters,
}

impl Arguments for Elements {
    fn read(&mut self, unread: &mut Unread, json: &mut String) -> bool {
        let (n_bytes, over) = match unread.find(&[END]) {
            Found::Nowhere { n_certain } => (n_certain, false),
            Found::Marker { at, .. } => (at, true),
        };
        self.text.push_str(unread.take(n_bytes));
        if over {
            unread.take(END.len());
            let arguments = arguments(&self.text, self.parameters.schema());
            json.push_str(arguments.as_deref().unwrap_or(&self.text));
        } else if unread.ended() {
            json.push_str(&self.text);
        }
        over
    }
}

/// The elements as a JSON object; `None` where they are not well-formed.
fn arguments(text: &str, schema: &Value) -> Option<String> {
    let mut rest = text.trim();
    let mut fields = Vec::new();
    while !rest.is_empty() {
        fields.push(element(&mut rest, Some(schema), 0)?);
        rest = rest.trim_start();
    }
    Some(object(&fields))
}

/// Reads `<name>...</name>`. Its name and JSON.
fn element(rest: &mut &str, parent: Option<&Value>, depth: usize) -> Option<(String, String)> {
    let (name, inside) = rest.strip_prefix(SPACE)?.strip_prefix('<')?.split_once('>')?;
    if depth > MAX_DEPTH || name.is_empty() || name.starts_with('/') {
        return None;
    }
    let field = || parent.and_then(|schema| property(schema, name));
    let member = || parent.and_then(|schema| schema.get("items")).filter(|_| name == "item");
    let schema = field().or_else(member);
    *rest = inside;
    let (text, _) = rest.split_once(SPACE)?;
    *rest = &rest[text.len()..];
    let close = format!("{SPACE}</{name}>");
    let mut children = Vec::new();
    while !rest.starts_with(&close) {
        children.push(element(rest, schema, depth + 1)?);
        *rest = rest.trim_start();
    }
    *rest = &rest[close.len()..];
    let is = |kind: &str| schema.is_some_and(|schema| schema["type"] == kind);
    let json = if children.is_empty() {
        match text.trim() {
            "" if is("array") => "[]".into(),
            "" if is("object") => "{}".into(),
            _ => typed::typed(text, schema),
        }
    } else if is("array") || !is("object") && children.iter().all(|(name, _)| name == "item") {
        let members: Vec<String> = children.into_iter().map(|(_, json)| json).collect();
        format!("[{}]", members.join(", "))
    } else {
        object(&children)
    };
    Some((name.into(), json))
}

fn object(fields: &[(String, String)]) -> String {
    let fields: Vec<String> =
        fields.iter().map(|(name, json)| format!("{}: {json}", typed::quoted(name))).collect();
    format!("{{{}}}", fields.join(", "))
}
