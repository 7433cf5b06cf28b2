//! The web page: a chat and a dashboard, from files in the binary. It asks the same endpoints as every other client, and no other
//! address.

use axum::{
    extract::Path,
    http::{HeaderName, header},
    response::{IntoResponse, Response},
};

use super::error::{ApiError, Kind};

/// Where the files of the page are.
pub(super) const FOLDER: &str = "/page/";

/// Nothing from elsewhere, nothing written into the page, and no frame of another origin around it.
const POLICY: &str =
    "default-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'self'; object-src 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// Name, type and text of each.
const FILES: [(&str, &str, &str); 13] = [
    ("style.css", CSS, include_str!("page/style.css")),
    ("icon.svg", SVG, include_str!("page/icon.svg")),
    ("chart.js", SCRIPT, include_str!("page/chart.js")),
    ("chat.js", SCRIPT, include_str!("page/chat.js")),
    ("dashboard.js", SCRIPT, include_str!("page/dashboard.js")),
    ("dom.js", SCRIPT, include_str!("page/dom.js")),
    ("history.js", SCRIPT, include_str!("page/history.js")),
    ("main.js", SCRIPT, include_str!("page/main.js")),
    ("markdown.js", SCRIPT, include_str!("page/markdown.js")),
    ("message.js", SCRIPT, include_str!("page/message.js")),
    ("numbers.js", SCRIPT, include_str!("page/numbers.js")),
    ("server.js", SCRIPT, include_str!("page/server.js")),
    ("settings.js", SCRIPT, include_str!("page/settings.js")),
];

/// `GET /`
pub(super) async fn index() -> Response {
    answer(HTML, include_str!("page/index.html"))
}

/// `GET /page/{name}`
///
/// # Errors
/// There is no such file.
pub(super) async fn file(Path(name): Path<String>) -> Result<Response, ApiError> {
    let found = FILES.iter().find(|(known, ..)| *known == name);
    let (_, kind, text) =
        found.ok_or_else(|| ApiError::new(Kind::NotFound, "the page has no file of that name"))?;
    Ok(answer(kind, text))
}

fn answer(kind: &'static str, text: &'static str) -> Response {
    const CSP: HeaderName = header::CONTENT_SECURITY_POLICY;
    let headers = [
        (header::CONTENT_TYPE, kind),
        (CSP, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_that_is_asked_for_is_there() {
        let texts = FILES.iter().map(|(.., text)| *text).chain([include_str!("page/index.html")]);
        let mut n_found = 0;
        for text in texts {
            for quoted in text.split('"') {
                let name = quoted.strip_prefix("page/").or_else(|| quoted.strip_prefix("./"));
                if let Some(name) = name.filter(|name| name.ends_with(".js") || name.ends_with(".css")) {
                    assert!(FILES.iter().any(|(known, ..)| *known == name), "{name}");
                    n_found += 1;
                }
            }
        }
        assert!(n_found > FILES.len());
    }
}
