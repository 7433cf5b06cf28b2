//! What the server tells about itself: health, figures, requests.

use std::sync::{Arc, atomic::Ordering};

use axum::{
    Json,
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use freetoken_backend::PAGE_TOKENS;
use serde_json::{Value, json};

use super::{
    Server, Stage,
    error::{ApiError, Kind},
    journal,
};

/// `GET /health`: 200 where requests are answered, otherwise 503.
pub(super) async fn health(State(server): State<Arc<Server>>) -> Response {
    let version = env!("CARGO_PKG_VERSION");
    let (status, word) = match server.stage() {
        Stage::Serving(_) => (StatusCode::OK, "ok"),
        Stage::Loading => (StatusCode::SERVICE_UNAVAILABLE, "loading"),
        Stage::Draining(_) => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
    };
    let mut body = json!({ "status": word, "model": server.settings().model_name, "version": version });
    if word == "loading" {
        let loaded = server.loaded_bytes.load(Ordering::Relaxed);
        body["progress"] = json!({ "loaded_bytes": loaded, "total_bytes": server.model().total_bytes() });
    }
    (status, Json(body)).into_response()
}

/// `GET /v1/stats`: what the service and the server counted.
pub(super) async fn stats(State(server): State<Arc<Server>>) -> Json<Value> {
    let totals = server.journal.totals();
    let mean = |histogram: journal::Histogram| {
        (histogram.count > 0).then(|| histogram.seconds / histogram.count as f64)
    };
    let service = server.running();
    Json(json!({
        "model": { "id": server.settings().model_name, "context": service.as_ref().map(|s| s.context()) },
        "service": service.as_ref().map(|service| service.stats()),
        "requests": {
            "active": totals.n_active,
            "ended": totals.ended.values().sum::<u64>(),
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
            "completion_tokens": totals.completion_tokens,
            "mean_seconds_to_first_token": mean(totals.to_first_token),
            "mean_seconds": mean(totals.whole),
        },
    }))
}

/// Which requests to list.
#[derive(serde::Deserialize)]
pub(super) struct Wanted {
    since: Option<u64>,
    limit: Option<usize>,
}

/// `GET /v1/requests?since=ID&limit=N`: requests that ended, oldest first, and where to go on.
pub(super) async fn requests(
    State(server): State<Arc<Server>>,
    wanted: Result<Query<Wanted>, axum::extract::rejection::QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    let Query(Wanted { since, limit }) =
        wanted.map_err(|error| ApiError::new(Kind::Invalid, error.body_text()))?;
    let limit = limit.unwrap_or(journal::MOST_ENTRIES).clamp(1, journal::MOST_ENTRIES);
    let entries = server.journal.entries(since.unwrap_or_default(), limit);
    let next = entries.iter().map(|entry| entry.id).max().or(since).unwrap_or_default();
    Ok(Json(json!({ "requests": entries, "next_since": next })))
}

/// `GET /v1/cache/status`: what the key-value cache can hold and holds.
///
/// # Errors
/// While the model loads.
pub(super) async fn cache_status(State(server): State<Arc<Server>>) -> Result<Json<Value>, ApiError> {
    let service = server.running().ok_or_else(|| ApiError::new(Kind::Unavailable, "the model is loading"))?;
    let stats = service.stats();
    Ok(Json(json!({
        "context": service.context(),
        "page_tokens": PAGE_TOKENS,
        "pages": stats.kv_pages,
        "pages_running": stats.kv_pages_running,
        "pages_cached": stats.kv_pages_cached,
    })))
}
