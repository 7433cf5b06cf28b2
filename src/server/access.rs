//! Who may ask, and how much at a time: the key, the pages of other origins, and the requests of one client. It knows no
//! endpoint but those that need no key.

use std::{
    collections::HashMap,
    hint::black_box,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header},
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::{
    Server,
    error::{ApiError, Kind},
    page,
};

/// Paths that answer without a key, as a load balancer and a browser need it: they say nothing of a conversation.
const OPEN_PATHS: [&str; 2] = ["/", "/health"];

/// Whether a path answers without a key.
fn is_open(path: &str) -> bool {
    OPEN_PATHS.contains(&path) || path.starts_with(page::FOLDER)
}

/// Methods that a page of an allowed origin may use.
const METHODS: &str = "GET, POST, OPTIONS";

/// The address that a request came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Peer(pub IpAddr);

/// Requests of each client that are answered now.
#[derive(Debug, Default)]
pub(super) struct Clients(Mutex<HashMap<Option<Peer>, usize>>);

/// One of the requests that a client may have at a time.
#[derive(Debug)]
pub(super) struct Slot {
    clients: Arc<Clients>,
    peer: Option<Peer>,
}

impl Clients {
    /// Counts a request, of which a client may have `most` at a time.
    ///
    /// # Errors
    /// [`Kind::RateLimit`].
    pub(super) fn enter(self: &Arc<Self>, peer: Option<Peer>, most: usize) -> Result<Slot, ApiError> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(peer).or_default();
        if *count >= most {
            return Err(ApiError {
                retry_seconds: Some(1),
                ..ApiError::new(
                    Kind::RateLimit,
                    format!("this client has {most} requests at a time already: wait for one of them to end"),
                )
            });
        }
        *count += 1;
        Ok(Slot { clients: self.clone(), peer })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut counts = self.clients.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.peer);
            }
        }
    }
}

/// The layer that refuses requests without the key, and those of pages that nobody allowed.
pub(super) async fn guarded(State(server): State<Arc<Server>>, request: Request, next: Next) -> Response {
    let settings = server.settings();
    let origin = request.headers().get(header::ORIGIN).cloned();
    let allowed = origin.filter(|origin| {
        settings.cors_origins.iter().any(|allowed| allowed == "*" || allowed.as_bytes() == origin.as_bytes())
    });
    if allowed.is_some() && request.method() == Method::OPTIONS {
        return with_cors(StatusCode::NO_CONTENT.into_response(), allowed);
    }
    let checked = match &settings.api_key {
        Some(_) if is_open(request.uri().path()) => Ok(()),
        Some(key) => check_key(request.headers(), key),
        None if allowed.is_some() => check_host(request.headers(), request.uri()),
        None => check_host(request.headers(), request.uri()).and_then(|()| check_origin(request.headers())),
    };
    let response = match checked {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    with_cors(response, allowed)
}

fn with_cors(mut response: Response, origin: Option<HeaderValue>) -> Response {
    if let Some(origin) = origin {
        let headers: [(HeaderName, HeaderValue); 4] = [
            (header::ACCESS_CONTROL_ALLOW_ORIGIN, origin),
            (header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(METHODS)),
            (header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("*, Authorization")),
            (header::VARY, HeaderValue::from_static("Origin")),
        ];
        response.headers_mut().extend(headers);
    }
    response
}

/// Compares the key of `Authorization: Bearer` or `x-api-key`.
fn check_key(headers: &HeaderMap, key: &str) -> Result<(), ApiError> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, token) = value.as_bytes().split_at_checked("Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
    });
    let given = bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes));
    match given {
        Some(given) if same(given, key.as_bytes()) => Ok(()),
        Some(_) => Err(ApiError::new(Kind::Unauthorized, "the API key is wrong")),
        None => Err(ApiError::new(
            Kind::Unauthorized,
            "this server needs an API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`",
        )),
    }
}

/// Whether two texts are the same, in a time that tells nothing but their lengths.
fn same(a: &[u8], b: &[u8]) -> bool {
    let differences = a.iter().zip(b).fold(0, |all, (a, b)| black_box(all | (a ^ b)));
    a.len() == b.len() && black_box(differences) == 0
}

/// Without a key, a name that is not this machine's means a page that had its own name resolve to us.
fn check_host(headers: &HeaderMap, uri: &Uri) -> Result<(), ApiError> {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let Some(host) = host.or_else(|| uri.authority().map(|authority| authority.as_str())) else {
        return Ok(());
    };
    if is_local_name(host) {
        return Ok(());
    }
    let message = "a server without an API key answers to `localhost` and to addresses alone: use one of them, or start \
                   it with a key";
    Err(ApiError::new(Kind::Forbidden, message))
}

fn is_local_name(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

/// Without a key, pages of other origins may not ask, not even where they cannot read the answer.
fn check_origin(headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or("?"));
    let Some(origin) = text(header::ORIGIN) else { return Ok(()) };
    let authority = origin.split_once("://").map(|(_, authority)| authority);
    if authority.is_some() && authority == text(header::HOST) {
        return Ok(());
    }
    let message = "pages of other origins may not use this server: start it with --cors-origin to allow one";
    Err(ApiError::new(Kind::Forbidden, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_the_same_or_not() {
        assert!(same(b"key", b"key"));
        for other in [&b"kez"[..], b"ke", b"keyy", b""] {
            assert!(!same(other, b"key"));
        }
    }

    #[test]
    fn names_of_this_machine() {
        for host in ["localhost", "LOCALHOST:1919", "127.0.0.1:80", "[::1]:1919", "192.168.0.7"] {
            assert!(is_local_name(host), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:1919", "", "[x]:1"] {
            assert!(!is_local_name(host), "{host}");
        }
    }

    #[test]
    fn a_client_has_so_many_requests_at_a_time() {
        let clients = Arc::new(Clients::default());
        let peer = Some(Peer(IpAddr::from([10, 0, 0, 1])));
        let first = clients.enter(peer, 1).expect("there is room");
        assert_eq!(clients.enter(peer, 1).expect_err("there is none").kind, Kind::RateLimit);
        let _other = clients.enter(None, 1).expect("another client has its own");
        drop(first);
        clients.enter(peer, 1).expect("there is room again");
    }
}
