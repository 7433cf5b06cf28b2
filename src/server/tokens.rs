//! `POST /tokenize` and `POST /detokenize`: also while the model loads.

use std::sync::Arc;

use axum::{Json, extract::State};
use serde_json::{Map, Value, json};

use super::{
    Server, blocking,
    body::Body,
    conversation::{Conversation, Thinking, ToolChoice},
    error::ApiError,
    fields::{Fields, shown, wrong},
    grammar::Format,
    openai,
};

/// The tokens of a text, or of the prompt that messages become.
///
/// # Errors
/// The first field that is wrong.
pub(super) async fn tokenize(
    State(server): State<Arc<Server>>,
    Body(mut fields): Body,
) -> Result<Json<Value>, ApiError> {
    take_model(&mut fields, &server)?;
    let with_texts: bool = fields.take("return_token_strs")?.unwrap_or_default();
    let text: Option<String> = fields.take("prompt")?;
    let add_special_tokens: bool = fields.take("add_special_tokens")?.unwrap_or(true);
    let conversation = match text {
        Some(_) => None,
        None => Some(conversation(&mut fields)?),
    };
    fields.finish()?;
    let max_model_len = server.running().ok().map(|service| service.context());
    let (tokens, texts) = blocking(move || {
        let model = server.model();
        let tokens = match (text, conversation) {
            (Some(text), _) => model.encode(&text, add_special_tokens, "prompt")?,
            (None, conversation) => {
                let conversation = conversation.expect("there is a text or a conversation");
                conversation.prompt(model)?.0.tokens
            }
        };
        let texts = tokens.iter().filter(|_| with_texts).map(|id| decode(&server, &[*id]));
        let texts = texts.collect::<Result<Vec<String>, ApiError>>()?;
        Ok((tokens, with_texts.then_some(texts)))
    })
    .await?;
    Ok(Json(json!({
        "count": tokens.len(), "max_model_len": max_model_len, "tokens": tokens, "token_strs": texts,
    })))
}

/// The text of tokens.
///
/// # Errors
/// The first field that is wrong.
pub(super) async fn detokenize(
    State(server): State<Arc<Server>>,
    Body(mut fields): Body,
) -> Result<Json<Value>, ApiError> {
    take_model(&mut fields, &server)?;
    let vocab = server.model().tokenizer().vocab_size();
    let tokens = fields.require::<Vec<Value>>("tokens")?.into_iter().map(|id| {
        let known = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < vocab);
        known
            .ok_or_else(|| wrong("tokens", &format!("with {}", shown(&id)), &format!("of ids below {vocab}")))
    });
    let tokens = tokens.collect::<Result<Vec<u32>, ApiError>>()?;
    fields.finish()?;
    let text = blocking(move || decode(&server, &tokens)).await?;
    Ok(Json(json!({ "prompt": text })))
}

fn take_model(fields: &mut Fields, server: &Server) -> Result<(), ApiError> {
    fields.take::<String>("model")?.map_or(Ok(()), |name| server.check_model(&name))
}

fn conversation(fields: &mut Fields) -> Result<Conversation, ApiError> {
    Ok(Conversation {
        messages: openai::messages(fields)?,
        tools: openai::tools(fields)?,
        tool_choice: ToolChoice::Auto,
        parallel: true,
        format: Format::Text,
        thinking: Thinking::default(),
        kwargs: fields.take::<Map<String, Value>>("chat_template_kwargs")?.unwrap_or_default(),
    })
}

fn decode(server: &Server, tokens: &[u32]) -> Result<String, ApiError> {
    let text = server.model().tokenizer().decode(tokens, false);
    text.map_err(|error| ApiError::field("tokens", error.to_string()))
}
