//! `POST /v1/messages/count_tokens`: also while the model loads.

use std::sync::Arc;

use axum::{Json, extract::State};
use serde_json::{Value, json};

use super::request::{conversation, rest};
use crate::server::{Server, blocking, body::Body, error::ApiError};

/// Counts the tokens of the prompt that a request would have.
///
/// # Errors
/// As the request itself.
pub(in crate::server) async fn answer(
    State(server): State<Arc<Server>>,
    Body(mut fields): Body,
) -> Result<Json<Value>, ApiError> {
    let model: String = fields.require("model")?;
    server.check_model(&model)?;
    let conversation = conversation(&mut fields, server.model())?;
    rest(&mut fields)?;
    fields.finish()?;
    let (prompt, _) = blocking(move || conversation.prompt(server.model())).await?;
    Ok(Json(json!({ "input_tokens": prompt.tokens.len() })))
}
