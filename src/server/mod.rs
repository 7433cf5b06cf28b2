//! The HTTP side: OpenAI's and Anthropic's protocols in front of a [`Service`]. It knows text and tokens, no tensor and no device.
//!
//! [`app`] is all of it without a socket; [`listen`] gives it one.

mod access;
mod answers;
mod anthropic;
mod ask;
mod body;
mod control;
mod conversation;
mod error;
mod fields;
mod grammar;
mod journal;
pub mod listen;
mod metrics;
mod model;
mod openai;
mod page;
mod settings;
mod sse;
mod tokens;

use std::sync::{
    Arc, PoisonError, RwLock,
    atomic::{AtomicU64, Ordering},
};

use axum::{
    Router,
    extract::{Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};

use access::{Clients, Peer};
use error::{ApiError, Kind, Protocol};
use journal::{Journal, Ticket};
pub use model::ServedModel;
pub use settings::Settings;

use crate::scheduler::{Refusal, Service};

/// Paths that ask the model something.
const ANSWERING: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"];

/// Everything that requests share.
pub struct Server {
    settings: Settings,
    model: ServedModel,
    stage: RwLock<Stage>,
    loaded_bytes: AtomicU64,
    journal: Arc<Journal>,
    clients: Arc<Clients>,
}

/// Where a server is in its life.
#[derive(Clone)]
enum Stage {
    Loading,
    Serving(Arc<dyn Service>),
    /// Running requests go on, new ones are refused.
    Draining(Arc<dyn Service>),
}

impl Server {
    /// A server whose model is still loading.
    pub fn new(settings: Settings, model: ServedModel) -> Self {
        Server {
            settings,
            model,
            stage: RwLock::new(Stage::Loading),
            loaded_bytes: AtomicU64::new(0),
            journal: Arc::default(),
            clients: Arc::default(),
        }
    }

    /// Notes that so many more bytes of the weights are loaded.
    pub fn loaded(&self, bytes: u64) {
        self.loaded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Begins to answer.
    pub fn serve(&self, service: Arc<dyn Service>) {
        *self.stage.write().unwrap_or_else(PoisonError::into_inner) = Stage::Serving(service);
    }

    /// Refuses new requests from now on; those that run go on.
    pub fn drain(&self) {
        let mut stage = self.stage.write().unwrap_or_else(PoisonError::into_inner);
        if let Stage::Serving(service) = stage.clone() {
            *stage = Stage::Draining(service);
        }
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn model(&self) -> &ServedModel {
        &self.model
    }

    fn stage(&self) -> Stage {
        self.stage.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What answers, or did until the server began to shut down.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] while the model loads.
    fn running(&self) -> Result<Arc<dyn Service>, ApiError> {
        match self.stage() {
            Stage::Serving(service) | Stage::Draining(service) => Ok(service),
            Stage::Loading => Err(ApiError {
                retry_seconds: Some(5),
                code: Some("model_loading"),
                ..ApiError::new(
                    Kind::Unavailable,
                    "the model is loading: try again soon; /health says how far it is",
                )
            }),
        }
    }

    /// What answers new requests.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] while the model loads and when the server shuts down.
    fn service(&self) -> Result<Arc<dyn Service>, ApiError> {
        match self.stage() {
            Stage::Draining(_) => Err(Refusal::ShuttingDown.into()),
            Stage::Serving(_) | Stage::Loading => self.running(),
        }
    }

    /// Refuses a model of another name, where the settings say so.
    fn check_model(&self, name: &str) -> Result<(), ApiError> {
        if !self.settings.strict_model || name == self.settings.model_name {
            return Ok(());
        }
        Err(self.no_such_model())
    }

    fn no_such_model(&self) -> ApiError {
        let known = &self.settings.model_name;
        let message = format!("there is no model of that name here: this server has `{known}`");
        ApiError { param: Some("model".into()), ..ApiError::new(Kind::NotFound, message) }
            .with_code("model_not_found")
    }
}

/// Does what takes long, such as tokenizing a long prompt, where it stops nobody else.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| {
        Err(ApiError::new(Kind::Internal, "the request could not be prepared: see the log"))
    })
}

/// All routes of a server.
pub fn app(server: Arc<Server>) -> Router {
    let answering = Router::new()
        .route(ANSWERING[0], post(openai::chat::answer))
        .route(ANSWERING[1], post(openai::completions::answer))
        .route(ANSWERING[2], post(anthropic::messages::answer))
        .route(ANSWERING[3], post(openai::responses::answer))
        .route_layer(middleware::from_fn_with_state(server.clone(), recorded));
    Router::new()
        .merge(answering)
        .route("/v1/messages/count_tokens", post(anthropic::count::answer))
        .route("/v1/responses/{id}", get(openai::responses::stored))
        .route("/v1/responses/{id}/cancel", post(openai::responses::stored))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/metrics", get(metrics::metrics))
        .route("/v1/cache/status", get(control::cache_status))
        .route("/v1/cache/resize", post(control::cache_resize))
        .route("/", get(page::index))
        .route("/page/{name}", get(page::file))
        .route("/health", get(control::health))
        .route("/v1/models", get(openai::models))
        .route("/v1/models/{name}", get(openai::model))
        .route("/v1/stats", get(control::stats))
        .route("/v1/requests", get(control::requests))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(middleware::from_fn_with_state(server.clone(), access::guarded))
        .layer(middleware::from_fn(error::shaped))
        .with_state(server)
}

async fn no_such_path() -> ApiError {
    ApiError::new(Kind::NotFound, "there is nothing at this path: docs/serving.md lists what there is")
}

async fn no_such_method() -> ApiError {
    ApiError::new(Kind::Method, "this path does not have that method")
}

/// The layer that counts a client's requests and writes them into the journal. The handler finds the [`Ticket`] in the
/// request's extensions, and keeps it as long as its answer goes on.
async fn recorded(State(server): State<Arc<Server>>, mut request: Request, next: Next) -> Response {
    let path = ANSWERING.iter().copied().find(|path| *path == request.uri().path());
    let path = path.expect("the routes of this layer are listed");
    let peer = request.extensions().get::<Peer>().copied();
    let slot = match server.clients.enter(peer, server.settings.max_requests_per_client) {
        Ok(slot) => slot,
        Err(error) => return error.into_response(),
    };
    let ticket: Arc<Ticket> = server.journal.open(path, slot);
    request.extensions_mut().insert(ticket.clone());
    let response = next.run(request).await;
    if let Some(error) = response.extensions().get::<ApiError>() {
        ticket.failed(error.status(Protocol::of_path(path)).as_u16(), error);
    }
    response
}
