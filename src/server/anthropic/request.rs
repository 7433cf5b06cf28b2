//! The fields of a request for a message, or for the count of its tokens.

use serde_json::{Map, Value, json};

use super::blocks::{cache_control, messages};
use crate::server::{
    conversation::{Conversation, Thinking, ToolChoice, effort},
    error::ApiError,
    fields::{Fields, shown, wrong},
    grammar::Format,
    model::ServedModel,
};

/// Takes all that decides the prompt.
///
/// # Errors
/// The first field that cannot be honoured.
pub(super) fn conversation(fields: &mut Fields, model: &ServedModel) -> Result<Conversation, ApiError> {
    let mut thinking = thinking(fields)?;
    let mut format = output_format(fields.object("output_format")?)?;
    if let Some(mut output) = fields.object("output_config")? {
        if let Some(word) = output.take::<String>("effort")? {
            let asked = effort("output_config.effort", &word, model)?;
            thinking.effort = asked.effort;
            thinking.on = thinking.on.or(asked.on);
        }
        if let Some(inner) = output.object("format")? {
            format = output_format(Some(inner))?;
        }
        output.finish()?;
    }
    let (tool_choice, parallel) = tool_choice(fields)?;
    Ok(Conversation {
        messages: messages(fields)?,
        tools: tools(fields)?,
        tool_choice,
        parallel,
        format,
        thinking,
        kwargs: fields.take("chat_template_kwargs")?.unwrap_or_default(),
    })
}

/// Takes what asks for nothing, and refuses what there is not.
///
/// # Errors
/// A field that asks for what there is not.
pub(super) fn rest(fields: &mut Fields) -> Result<(), ApiError> {
    cache_control(fields)?;
    context_management(fields)?;
    fields.refuse("container", &[], "this server runs no code: leave it out")?;
    fields.refuse("mcp_servers", &[json!([])], "this server calls no others: offer their tools yourself")?;
    fields.refuse("speed", &[json!("standard")], "there is one speed: leave it out")?;
    fields.refuse(
        "diagnostics",
        &[json!({})],
        "prompts are not compared with earlier ones: see /v1/requests",
    )?;
    fields.skip(&["metadata", "service_tier", "inference_geo", "betas", "user_profile_id", "workspace_id"]);
    Ok(())
}

fn thinking(fields: &mut Fields) -> Result<Thinking, ApiError> {
    let Some(mut thinking) = fields.object("thinking")? else { return Ok(Thinking::default()) };
    let on = thinking.word("type", &[("enabled", true), ("adaptive", true), ("disabled", false)])?;
    let budget = thinking.take::<u64>("budget_tokens")?.map(|tokens| tokens as usize);
    thinking.refuse("display", &[json!("summarized")], "thinking is sent as it is: leave it out yourself")?;
    thinking.finish()?;
    Ok(Thinking { on, effort: None, budget })
}

fn output_format(fields: Option<Fields>) -> Result<Format, ApiError> {
    let Some(mut fields) = fields else { return Ok(Format::Text) };
    fields.word("type", &[("json_schema", ())])?;
    let schema: Map<String, Value> = fields.require("schema")?;
    fields.skip(&["name"]);
    fields.finish()?;
    Ok(Format::Json(Value::Object(schema)))
}

/// Edits of the conversation that leave it as it is.
fn context_management(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(mut management) = fields.object("context_management")? else { return Ok(()) };
    let name = management.name("edits");
    let edits: Vec<Value> = management.take("edits")?.unwrap_or_default();
    if edits.iter().any(|edit| edit["keep"] != "all") {
        let words = "edits that keep \"all\": leave out of the messages what the model is to forget";
        return Err(wrong(&name, "an array of edits that clear something", words));
    }
    management.finish()
}

fn tool_choice(fields: &mut Fields) -> Result<(ToolChoice, bool), ApiError> {
    let Some(mut choice) = fields.object("tool_choice")? else { return Ok((ToolChoice::Auto, true)) };
    let words = "\"auto\", \"any\", \"tool\" or \"none\"";
    let wanted = match choice.require::<String>("type")?.as_str() {
        "auto" => ToolChoice::Auto,
        "any" => ToolChoice::Required,
        "tool" => ToolChoice::Named(choice.require("name")?),
        "none" => ToolChoice::None,
        other => return Err(wrong("tool_choice.type", &shown(&other.into()), words)),
    };
    let one = choice.take::<bool>("disable_parallel_tool_use")?.unwrap_or_default();
    choice.finish()?;
    Ok((wanted, !one))
}

/// Tools, in OpenAI's form.
fn tools(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let tools: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let tools = tools.into_iter().enumerate().map(|(i, tool)| {
        let mut tool = Fields::of(format!("tools.{i}"), tool)?;
        if let Some(kind) = tool.take::<String>("type")?.filter(|kind| kind != "custom") {
            let words = "\"custom\": this server runs no tools of its own";
            return Err(wrong(&tool.name("type"), &shown(&kind.into()), words));
        }
        let mut function = json!({ "name": tool.require::<String>("name")? });
        if let Some(text) = tool.take::<String>("description")? {
            function["description"] = text.into();
        }
        let mut schema: Map<String, Value> = tool.require("input_schema")?;
        // Where schemas have them, and templates show them.
        schema
            .extend(tool.take::<Vec<Value>>("input_examples")?.map(|list| ("examples".into(), list.into())));
        function["parameters"] = schema.into();
        if tool.take::<bool>("strict")?.unwrap_or_default() {
            function["strict"] = true.into();
        }
        cache_control(&mut tool)?;
        tool.refuse("allowed_callers", &[json!(["direct"])], "this server runs no code that could call it")?;
        tool.refuse(
            "defer_loading",
            &[json!(false)],
            "this server has no search for tools: offer it or do not",
        )?;
        tool.skip(&["eager_input_streaming"]);
        tool.finish()?;
        Ok(json!({ "type": "function", "function": function }))
    });
    tools.collect()
}
