//! `GET /`: a page to chat on and to watch the server with. It loads nothing from anywhere else, and may not.

use axum::{
    http::header,
    response::{Html, IntoResponse, Response},
};

/// What the page may do: run what is in it, and ask this server.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page.
pub(super) async fn page() -> Response {
    ([(header::CONTENT_SECURITY_POLICY, POLICY)], Html(include_str!("page.html"))).into_response()
}
