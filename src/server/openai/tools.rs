//! Tools, the choice among them, and the form of an answer, as a chat request gives them.

use serde_json::{Value, json};

use crate::server::{
    conversation::ToolChoice,
    error::ApiError,
    fields::{Fields, shown, wrong},
    grammar::Format,
};

/// The functions that a request offers.
///
/// # Errors
/// The first that is wrong.
pub(in crate::server) fn tools(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let tools: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let tools = tools.into_iter().enumerate().map(|(i, tool)| {
        let mut tool = Fields::of(format!("tools[{i}]"), tool)?;
        let name = tool.name("type");
        match tool.require::<String>("type")?.as_str() {
            "function" => {}
            other => return Err(wrong(&name, &shown(&other.into()), "\"function\"")),
        }
        let name = tool.name("function");
        let function =
            tool.object("function")?.ok_or_else(|| wrong(&name, "missing", "an object with a name"))?;
        tool.skip(&["cache_control"]);
        tool.finish()?;
        function_tool(function)
    });
    tools.collect()
}

/// A tool in the form that templates take, from the fields that describe its function.
///
/// # Errors
/// What is wrong.
pub(super) fn function_tool(mut function: Fields) -> Result<Value, ApiError> {
    let name = function.name("name");
    let known = function.require::<String>("name")?;
    let is_name = !known.is_empty() && known.len() <= 128 && !known.contains(char::is_whitespace);
    if !is_name {
        return Err(wrong(&name, &shown(&known.into()), "a name of 1 to 128 characters without spaces"));
    }
    let mut definition = json!({ "name": known });
    if let Some(text) = function.take::<String>("description")? {
        definition["description"] = text.into();
    }
    let schema = function.take::<serde_json::Map<String, Value>>("parameters")?;
    definition["parameters"] =
        schema.map_or_else(|| json!({ "type": "object", "properties": {} }), Value::Object);
    if function.take::<bool>("strict")?.unwrap_or_default() {
        definition["strict"] = true.into();
    }
    function.finish()?;
    Ok(json!({ "type": "function", "function": definition }))
}

/// Whether tools are called.
///
/// # Errors
/// A choice that there is not.
pub(super) fn tool_choice(fields: &mut Fields) -> Result<ToolChoice, ApiError> {
    let words = "\"auto\", \"none\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": ...}}";
    match fields.take::<Value>("tool_choice")? {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            _ => Err(wrong("tool_choice", &shown(&word.into()), words)),
        },
        Some(choice @ Value::Object(_)) => {
            let mut choice = Fields::of("tool_choice", choice)?;
            choice.word("type", &[("function", ())])?;
            // The Responses API has the name beside the type.
            let mut function = match choice.object("function")? {
                Some(function) => function,
                None => return named(choice),
            };
            let name = function.require("name")?;
            function.finish()?;
            choice.finish()?;
            Ok(ToolChoice::Named(name))
        }
        Some(other) => Err(wrong("tool_choice", &shown(&other), words)),
    }
}

fn named(mut choice: Fields) -> Result<ToolChoice, ApiError> {
    let name = choice.require("name")?;
    choice.finish()?;
    Ok(ToolChoice::Named(name))
}

/// What the content looks like.
///
/// # Errors
/// A form that there is not.
pub(super) fn response_format(fields: &mut Fields) -> Result<Format, ApiError> {
    let Some(mut format) = fields.object("response_format")? else { return Ok(Format::Text) };
    let read = match format.require::<String>("type")?.as_str() {
        "text" => Format::Text,
        "json_object" => Format::Json(json!({ "type": "object" })),
        "json_schema" => {
            let mut inner = format
                .object("json_schema")?
                .ok_or_else(|| wrong("response_format.json_schema", "missing", "an object with a schema"))?;
            let schema = json_schema(&mut inner)?;
            inner.finish()?;
            schema
        }
        other => {
            let words = "\"text\", \"json_object\" or \"json_schema\"";
            return Err(wrong("response_format.type", &shown(&other.into()), words));
        }
    };
    format.finish()?;
    Ok(read)
}

/// The fields of a named schema. It is always kept to, whatever `strict` says.
///
/// # Errors
/// No schema.
pub(super) fn json_schema(fields: &mut Fields) -> Result<Format, ApiError> {
    fields.skip(&["name", "description", "strict"]);
    let schema: serde_json::Map<String, Value> = fields.require("schema")?;
    Ok(Format::Json(Value::Object(schema)))
}
