//! [`Body`]: a request's body as JSON fields, read with a bound on its size and on the time between two pieces.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{FromRequest, Request},
    http::header,
};
use futures_util::StreamExt;
use tokio::time::timeout;

use super::{
    Server, blocking,
    error::{ApiError, Kind},
    fields::Fields,
};

/// How long a client may send nothing while its body is not whole.
const MOST_SILENCE: Duration = Duration::from_secs(30);

/// The fields of a request's body.
pub(super) struct Body(pub Fields);

impl FromRequest<Arc<Server>> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, server: &Arc<Server>) -> Result<Self, ApiError> {
        let most = server.settings().max_body_bytes;
        let too_large = || {
            ApiError::new(
                Kind::TooLarge,
                format!("the body has more than {most} bytes, which is the limit here"),
            )
        };
        let announced = request.headers().get(header::CONTENT_LENGTH);
        let announced = announced.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
        if announced.is_some_and(|length| length > most) {
            return Err(too_large());
        }
        let mut pieces = request.into_body().into_data_stream();
        let mut bytes = Vec::new();
        loop {
            let piece = timeout(MOST_SILENCE, pieces.next())
                .await
                .map_err(|_| ApiError::new(Kind::TooSlow, "the body did not come: send all of it at once"))?;
            let Some(piece) = piece else { break };
            let piece = piece
                .map_err(|error| ApiError::new(Kind::Invalid, format!("the body cannot be read: {error}")))?;
            if bytes.len() + piece.len() > most {
                return Err(too_large());
            }
            bytes.extend_from_slice(&piece);
        }
        blocking(move || {
            let value = serde_json::from_slice(&bytes)
                .map_err(|error| ApiError::new(Kind::Invalid, format!("the body is not JSON: {error}")))?;
            Fields::of_request(value).map(Body)
        })
        .await
    }
}
