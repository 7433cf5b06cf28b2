//! What a client is told when a request fails: a status, a sentence, and the name of the field that is to blame. The words
//! are the same for all; [`shaped`] gives them the form that the path's protocol has. It knows no endpoint.

use axum::{
    Json,
    body::Body,
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::scheduler::Refusal;

/// The sort of an error, from which status and type follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The request cannot be honoured as it is.
    Invalid,
    /// No key, or a wrong one.
    Unauthorized,
    /// The key does not help: the request came from a place it must not come from.
    Forbidden,
    /// No such path or model.
    NotFound,
    /// The path has no such method.
    Method,
    /// The body is too large.
    TooLarge,
    /// The body came too slowly.
    TooSlow,
    /// This client has too many requests at a time.
    RateLimit,
    /// The queue is full.
    Overloaded,
    /// The model is loading, or the server shutting down.
    Unavailable,
    /// Our fault.
    Internal,
}

/// An error for a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ApiError {
    /// What sort.
    pub(super) kind: Kind,
    /// One sentence.
    pub(super) message: String,
    /// The field that is to blame.
    pub(super) param: Option<String>,
    /// What programs match on.
    pub(super) code: Option<&'static str>,
    /// When another try is worth it.
    pub(super) retry_seconds: Option<u32>,
}

/// Whose errors and events a path has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    /// `{"error": {"message", "type", "param", "code"}}`
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}}`
    Anthropic,
}

impl Protocol {
    /// That of a path.
    pub(super) fn of_path(path: &str) -> Self {
        let anthropic = path == "/v1/messages" || path.starts_with("/v1/messages/");
        if anthropic { Protocol::Anthropic } else { Protocol::OpenAi }
    }
}

impl ApiError {
    /// An error without a field.
    pub(super) fn new(kind: Kind, message: impl Into<String>) -> Self {
        ApiError { kind, message: message.into(), param: None, code: None, retry_seconds: None }
    }

    /// A field cannot be honoured.
    pub(super) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError { param: Some(param.into()), ..Self::new(Kind::Invalid, message) }
    }

    /// The same with a word that programs match on.
    pub(super) fn with_code(self, code: &'static str) -> Self {
        ApiError { code: Some(code), ..self }
    }

    /// A prompt that leaves no room for an answer. Clients match on the first words and on the code.
    pub(super) fn too_long(n_tokens: usize, context: usize) -> Self {
        let most = context.saturating_sub(1);
        let message = format!(
            "prompt is too long: {n_tokens} tokens > {most} maximum (the context holds {context}, the answer included)"
        );
        ApiError::new(Kind::Invalid, message).with_code("context_length_exceeded")
    }

    /// The status of the answer.
    pub(super) fn status(&self, protocol: Protocol) -> StatusCode {
        match self.kind {
            Kind::Invalid => StatusCode::BAD_REQUEST,
            Kind::Unauthorized => StatusCode::UNAUTHORIZED,
            Kind::Forbidden => StatusCode::FORBIDDEN,
            Kind::NotFound => StatusCode::NOT_FOUND,
            Kind::Method => StatusCode::METHOD_NOT_ALLOWED,
            Kind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Kind::TooSlow => StatusCode::REQUEST_TIMEOUT,
            Kind::RateLimit => StatusCode::TOO_MANY_REQUESTS,
            Kind::Overloaded => match protocol {
                Protocol::OpenAi => StatusCode::TOO_MANY_REQUESTS,
                Protocol::Anthropic => StatusCode::from_u16(529).expect("three digits"),
            },
            Kind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Kind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The body of the answer, or of an error event.
    pub(super) fn body(&self, protocol: Protocol) -> Value {
        match protocol {
            Protocol::OpenAi => json!({ "error": self.openai() }),
            Protocol::Anthropic => {
                json!({ "type": "error", "error": { "type": self.anthropic_type(), "message": self.message } })
            }
        }
    }

    /// The inner object of OpenAI's form.
    pub(super) fn openai(&self) -> Value {
        let kind = match self.kind {
            Kind::RateLimit | Kind::Overloaded => "rate_limit_error",
            Kind::Unavailable | Kind::Internal => "server_error",
            _ => "invalid_request_error",
        };
        let code = self.code.or(match self.kind {
            Kind::Unauthorized => Some("invalid_api_key"),
            Kind::RateLimit | Kind::Overloaded => Some("rate_limit_exceeded"),
            _ => None,
        });
        json!({ "message": self.message, "type": kind, "param": self.param, "code": code })
    }

    fn anthropic_type(&self) -> &'static str {
        match self.kind {
            Kind::Invalid | Kind::Method | Kind::TooSlow => "invalid_request_error",
            Kind::Unauthorized => "authentication_error",
            Kind::Forbidden => "permission_error",
            Kind::NotFound => "not_found_error",
            Kind::TooLarge => "request_too_large",
            Kind::RateLimit => "rate_limit_error",
            Kind::Overloaded | Kind::Unavailable => "overloaded_error",
            Kind::Internal => "api_error",
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Full { retry_seconds, .. } => ApiError {
                retry_seconds: Some(retry_seconds),
                ..Self::new(Kind::Overloaded, refusal.to_string())
            },
            Refusal::TooLong { n_tokens, context } => Self::too_long(n_tokens, context),
            Refusal::ShuttingDown => Self::new(Kind::Unavailable, refusal.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    /// A response without a body: [`shaped`] knows the path and writes it.
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = self.status(Protocol::OpenAi);
        response.extensions_mut().insert(self);
        response
    }
}

/// The layer that gives every error the form of its path's protocol.
pub(super) async fn shaped(request: Request, next: Next) -> Response {
    let protocol = Protocol::of_path(request.uri().path());
    let mut response = next.run(request).await;
    let Some(error) = response.extensions_mut().remove::<ApiError>() else { return response };
    let mut shaped = (error.status(protocol), Json(error.body(protocol))).into_response();
    if let Some(seconds) = error.retry_seconds {
        shaped.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if error.kind == Kind::Unauthorized {
        shaped.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    shaped
}
