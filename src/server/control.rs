//! What the server tells about itself: health, figures, requests.

use std::sync::{Arc, atomic::Ordering};

use axum::{
    Json,
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{
    Server, Stage, blocking,
    body::Body,
    error::{ApiError, Kind},
    journal,
};
use crate::{
    engine::Division,
    scheduler::{Cache, Service},
};

/// More slots or tokens than any memory holds.
const MOST_PLACES: usize = 1 << 32;

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

/// `GET /v1/cache/status`: what the memory can hold and holds.
///
/// # Errors
/// While the model loads.
pub(super) async fn cache_status(State(server): State<Arc<Server>>) -> Result<Json<Cache>, ApiError> {
    Ok(Json(service(&server)?.stats().cache))
}

/// `POST /v1/cache/resize` with `expert_slots`, `kv_tokens`, `state_slots` or `state_cache_bytes`: divides the memory anew while requests
/// run, and tells what it holds then.
///
/// # Errors
/// While the model loads, and with what would fit where that does not.
pub(super) async fn cache_resize(
    State(server): State<Arc<Server>>,
    Body(mut fields): Body,
) -> Result<Json<Cache>, ApiError> {
    let service = service(&server)?;
    let mut count = |name: &str| -> Result<Option<usize>, ApiError> {
        let wanted = fields.take::<u64>(name)?;
        Ok(wanted.map(|n| usize::try_from(n).unwrap_or(usize::MAX).min(MOST_PLACES)))
    };
    let division = Division {
        expert_slots: count("expert_slots")?,
        kv_tokens: count("kv_tokens")?,
        state_slots: count("state_slots")?,
        state_cache_bytes: fields
            .take::<u64>("state_cache_bytes")?
            .map(|n| usize::try_from(n).unwrap_or(usize::MAX)),
    };
    fields.finish()?;
    if division == Division::default() {
        let message = "nothing to divide: give expert_slots, kv_tokens, state_slots or state_cache_bytes";
        return Err(ApiError::new(Kind::Invalid, message));
    }
    if division.expert_slots.is_some() && service.stats().cache.experts.is_none() {
        let message = "all experts are on the device: there are no slots to divide";
        return Err(ApiError::field("expert_slots", message));
    }
    let of_states =
        [("state_slots", division.state_slots), ("state_cache_bytes", division.state_cache_bytes)];
    if let Some((name, _)) = of_states.into_iter().find(|(_, asked)| asked.is_some())
        && service.stats().cache.states.is_none()
    {
        return Err(ApiError::field(name, "the model has no recurrent layers: there are no states to keep"));
    }
    let divide = move || service.divide(division).map_err(|why| ApiError::new(Kind::Invalid, why));
    Ok(Json(blocking(divide).await?))
}

fn service(server: &Server) -> Result<Arc<dyn Service>, ApiError> {
    server.running().ok_or_else(|| ApiError::new(Kind::Unavailable, "the model is loading"))
}
