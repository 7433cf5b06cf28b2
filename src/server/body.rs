//! [`Body`]: a request's body as JSON fields, read with bounds on its size and its time.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{FromRequest, Request},
    http::header,
};
use futures_util::StreamExt;
use tokio::time::{Instant, timeout_at};

use super::{
    Server, Settings, blocking,
    error::{ApiError, Kind},
    fields::Fields,
};

/// Bytes for which a client has a second more to send all of them.
const LEAST_RATE: usize = 64 << 10;

/// The fields of a request's body.
pub(super) struct Body(pub Fields);

impl FromRequest<Arc<Server>> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, server: &Arc<Server>) -> Result<Self, ApiError> {
        let Settings { max_body_bytes: most, body_time, .. } = *server.settings();
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
        let start = Instant::now();
        let mut pieces = request.into_body().into_data_stream();
        let mut bytes = Vec::new();
        loop {
            let all = start + body_time + Duration::from_secs((bytes.len() / LEAST_RATE) as u64);
            let piece = timeout_at(all.min(Instant::now() + body_time), pieces.next())
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
