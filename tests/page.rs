//! The web page in a browser: what its Markdown makes of hostile text, and a conversation with the demo model. The checks are in
//! `tests/page`; a browser tells their outcome.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by a panic and says what it left out"
)]

use std::{
    env,
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use axum::{
    Json, Router,
    extract::Path as UrlPath,
    http::header,
    response::IntoResponse,
    routing::{get, post},
};
use freetoken::{
    engine::EngineOptions,
    model_files::ModelFiles,
    moe::{CacheSize, ElasticOptions, Mode},
    scheduler::{Scheduler, SchedulerOptions},
    server::{ServedModel, Server, Settings, app},
};
use freetoken_backend::Precision;
use freetoken_cpu::{Cpu, CpuOptions};
use serde_json::Value;
use tokio::{net::TcpListener, sync::mpsc, time::timeout};

/// What Debian, Chrome and others call it.
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];
/// How long the checks of a page may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// A browser that ends with the test.
struct Browser(Child);

impl Drop for Browser {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Browser {
    /// Opens a page; `None` where there is no browser.
    fn open(url: &str, profile: &Path) -> Option<Self> {
        BROWSERS.iter().find_map(|name| {
            let child = Command::new(name)
                .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"])
                .arg(format!("--user-data-dir={}", profile.display()))
                .arg(url)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn();
            child.ok().map(Browser)
        })
    }
}

/// Behind a cache of `expert_slots`, where they are given.
fn demo_server(expert_slots: Option<usize>) -> Arc<Server> {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    let files = Arc::new(ModelFiles::open(Some(&demo)).unwrap());
    let cpu = || Arc::new(Cpu::new(CpuOptions { threads: Some(2), precision: Precision::Auto }).unwrap());
    let options = EngineOptions {
        max_sequences: 2,
        expert_cache: expert_slots.map(CacheSize::Slots),
        elastic: ElasticOptions { mode: Mode::Share(0.5), host: Some(cpu()), ..ElasticOptions::default() },
        ..EngineOptions::default()
    };
    let engine = files.engine(cpu(), &options, &mut |_| ()).unwrap();
    let server = Arc::new(Server::new(Settings::local("demo"), ServedModel::new(files).unwrap()));
    server.serve(Arc::new(Scheduler::start(engine, SchedulerOptions::default()).unwrap()));
    server
}

/// A file of the checks.
async fn check_file(UrlPath(name): UrlPath<String>) -> impl IntoResponse {
    assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || c == '.'), "{name}");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/page");
    let kind = if name.ends_with(".js") { "text/javascript" } else { "text/html; charset=utf-8" };
    ([(header::CONTENT_TYPE, kind)], std::fs::read(folder.join(name)).unwrap_or_default())
}

/// Opens a page of checks and waits for what came of them.
async fn outcome(page: &str, server: Arc<Server>) {
    let (tell, mut told) = mpsc::unbounded_channel();
    let checks = Router::new()
        .route("/test/{file}", get(check_file))
        .route("/test/outcome", post(async move |Json(outcome): Json<Value>| tell.send(outcome).unwrap()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(axum::serve(listener, app(server).merge(checks)).into_future());
    let profile = tempfile::tempdir().unwrap();
    let Some(_browser) = Browser::open(&format!("http://{address}/test/{page}"), profile.path()) else {
        let must = env::var_os("FREETOKEN_CI").is_some_and(|value| value == "1");
        assert!(!must, "there is no browser: none of {BROWSERS:?} can be started");
        eprintln!("LEFT OUT: the page, since there is no browser: none of {BROWSERS:?} can be started");
        return;
    };
    let outcome = timeout(PATIENCE, told.recv()).await.expect("an outcome in time").unwrap();
    serving.abort();
    assert_eq!((&outcome["outcome"], &outcome["failures"]), (&"passed".into(), &Value::Array(Vec::new())));
    assert!(outcome["checks"].as_u64() > Some(10), "{outcome}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_markdown_stays_text() {
    outcome("markdown.html", demo_server(None)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_person_talks_to_the_demo_model() {
    outcome("page.html", demo_server(None)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_person_sees_where_experts_are() {
    outcome("page.html", demo_server(Some(40))).await;
}
