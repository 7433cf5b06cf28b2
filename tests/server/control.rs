//! What the server tells about itself, who may ask, and tokens.

use axum::{body::Body, http::Request};
use freetoken::{scheduler::Stop, server::Settings};
use serde_json::{Value, json};

use crate::fake::{CONTEXT, Client, Script, client, client_with, loading_client};

const CHAT: &str = "/v1/chat/completions";

fn hello() -> Value {
    json!({ "model": "tiny", "messages": [{ "role": "user", "content": "Hi." }] })
}

fn says(text: &'static str) -> Script {
    Script::Says(text, Stop::Eos)
}

#[tokio::test]
async fn health_tells_how_far_loading_is() {
    let client = loading_client(Settings::local("tiny"));
    client.server.loaded(1000);
    let health = client.get("/health").await;
    assert_eq!(health.status, 503);
    let body = health.json();
    assert_eq!((&body["status"], &body["progress"]["loaded_bytes"]), (&json!("loading"), &json!(1000)));
    assert!(body["progress"]["total_bytes"].as_u64().is_some_and(|bytes| bytes > 100_000));
    let refused = client.post(CHAT, hello()).await;
    assert!(refused.headers.contains_key("retry-after"));
    assert_eq!(refused.error(503)["code"], "model_loading");
    assert_eq!(client.get("/v1/cache/status").await.error(503)["code"], "model_loading");
    client.server.serve(client.fake.clone());
    assert_eq!(client.get("/health").await.ok()["status"], "ok");
    client.server.drain();
    assert_eq!(client.get("/health").await.json()["status"], "draining");
    client.post(CHAT, hello()).await.error(503);
    assert_eq!(client.get("/v1/cache/status").await.ok()["kv_tokens"], 4096);
}

#[tokio::test]
async fn the_model_and_its_context_are_listed() {
    let client = client([]);
    let models = client.get("/v1/models").await.ok();
    assert_eq!(client.get("/v1/models/tiny").await.ok(), models["data"][0]);
    assert_eq!(client.get("/v1/models/other").await.error(404)["code"], "model_not_found");
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("tiny")));
    assert_eq!(models["data"][0]["context_length"], CONTEXT);
}

#[tokio::test]
async fn figures_count_requests_and_never_quote_them() {
    let client = client([says("Hello."), says("Hello.")]);
    client.post(CHAT, hello()).await.ok();
    let mut streamed = hello();
    streamed["stream"] = true.into();
    client.post(CHAT, streamed).await.events();
    client.post(CHAT, json!({ "model": "tiny", "messages": [], "temperature": "secret" })).await.error(400);
    let all = client.get("/v1/requests").await.ok();
    let entries = all["requests"].as_array().expect("a list");
    let status: Vec<(&Value, &Value)> =
        entries.iter().map(|entry| (&entry["status"], &entry["stream"])).collect();
    let (no, yes) = (json!(false), json!(true));
    assert_eq!(status, [(&json!(200), &no), (&json!(200), &yes), (&json!(400), &no)]);
    assert!(
        entries[1]["seconds_to_first_token"].is_f64() && entries[1]["completion_tokens"].as_u64() > Some(1)
    );
    assert!(!all.to_string().contains("secret") && !all.to_string().contains("Hi."));
    let later = client.get("/v1/requests?since=2&limit=5").await.ok();
    assert_eq!((later["requests"].as_array().map(Vec::len), &later["next_since"]), (Some(1), &json!(3)));
    client.get("/v1/requests?since=x").await.error(400);

    let stats = client.get("/v1/stats").await.ok();
    assert_eq!((&stats["requests"]["ended"], &stats["requests"]["active"]), (&json!(3), &json!(0)));
    assert_eq!(stats["service"]["decoded_tokens"], 7);
    let metrics = client.get("/metrics").await.text;
    for line in [
        "freetoken_requests_ended_total{path=\"/v1/chat/completions\",status=\"200\"} 2",
        "freetoken_requests_ended_total{path=\"/v1/chat/completions\",status=\"400\"} 1",
        "freetoken_request_seconds_count 3",
        "freetoken_time_to_first_token_seconds_bucket{le=\"+Inf\"} 2",
        "freetoken_decoded_tokens_total 7",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} in\n{metrics}");
    }
    assert_eq!(client.get("/v1/cache/status").await.ok()["kv_tokens"], 4096);
}

#[tokio::test]
async fn memory_is_divided_by_numbers_that_fit() {
    let client = client([]);
    let resize = |body: Value| client.post("/v1/cache/resize", body);
    assert_eq!(resize(json!({ "kv_tokens": 2048 })).await.ok()["kv_tokens"], 2048);
    for (body, why) in [
        (json!({ "kv_tokens": 9000 }), "8192 tokens would fit"),
        (json!({}), "nothing to divide"),
        (json!({ "expert_slots": 3 }), "all experts are on the device"),
        (json!({ "state_slots": 3 }), "no recurrent layers"),
        (json!({ "state_cache_bytes": 1 << 20 }), "no recurrent layers"),
        (json!({ "kv_tokens": -1 }), "kv_tokens"),
        (json!({ "kv_tokens": 1, "slots": 2 }), "slots"),
    ] {
        let error = resize(body).await.error(400);
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[tokio::test]
async fn tokens_of_texts_and_messages_and_back() {
    let client = client([]);
    let tokens =
        client.post("/tokenize", json!({ "prompt": "Hi, é!", "return_token_strs": true })).await.ok();
    let n = tokens["tokens"].as_array().map(Vec::len);
    assert_eq!(
        (tokens["count"].as_u64(), tokens["token_strs"].as_array().map(Vec::len)),
        (n.map(|n| n as u64), n)
    );
    assert_eq!(tokens["max_model_len"], CONTEXT);
    let text = client.post("/detokenize", json!({ "tokens": tokens["tokens"] })).await.ok();
    assert_eq!(text["prompt"], "Hi, é!");
    let chat = client.post("/tokenize", json!({ "messages": hello()["messages"] })).await.ok();
    let text = client.post("/detokenize", json!({ "tokens": chat["tokens"] })).await.ok();
    assert_eq!(text["prompt"], "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n");
    client.post("/detokenize", json!({ "tokens": [100_000] })).await.error(400);
    client.post("/tokenize", json!({})).await.error(400);
}

fn request(path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let builder = Request::get(path);
    let builder = headers.iter().fold(builder, |builder, (name, value)| builder.header(*name, *value));
    builder.body(Body::empty()).expect("a request")
}

async fn status(client: &Client, path: &str, headers: &[(&str, &str)]) -> u16 {
    client.answer(request(path, headers)).await.status.as_u16()
}

#[tokio::test]
async fn a_key_opens_everything_but_health() {
    let settings = Settings { api_key: Some("secret".into()), ..Settings::local("tiny") };
    let client = client_with(settings, []);
    for headers in [
        &[("authorization", "Bearer secret")][..],
        &[("x-api-key", "secret")],
        &[("authorization", "bearer secret")],
    ] {
        assert_eq!(status(&client, "/v1/models", headers).await, 200, "{headers:?}");
    }
    for headers in [
        &[][..],
        &[("authorization", "Bearer secre")],
        &[("authorization", "secret")],
        &[("x-api-key", "Secret")],
    ] {
        assert_eq!(status(&client, "/v1/models", headers).await, 401, "{headers:?}");
        assert_eq!(status(&client, "/metrics", headers).await, 401, "{headers:?}");
        assert_eq!(status(&client, "/nothing", headers).await, 401, "{headers:?}");
    }
    assert_eq!(status(&client, "/health", &[]).await, 200);
    assert_eq!(client.post(CHAT, hello()).await.error(401)["code"], "invalid_api_key");
    assert_eq!(client.post("/v1/messages", hello()).await.error(401)["type"], "authentication_error");
}

#[tokio::test]
async fn pages_of_other_origins_are_kept_out_unless_allowed() {
    let closed = client([]);
    let page = [("origin", "http://evil.example"), ("host", "127.0.0.1:1919")];
    assert_eq!(status(&closed, "/v1/models", &page).await, 403);
    assert_eq!(status(&closed, "/v1/models", &[("host", "rebound.example:1919")]).await, 403);
    let own = [("origin", "http://127.0.0.1:1919"), ("host", "127.0.0.1:1919")];
    assert_eq!(status(&closed, "/v1/models", &own).await, 200);
    let answer = closed.answer(request("/v1/models", &own)).await;
    assert!(!answer.headers.contains_key("access-control-allow-origin"));

    let settings = Settings { cors_origins: vec!["http://app.example".into()], ..Settings::local("tiny") };
    let open = client_with(settings, []);
    let app = [("origin", "http://app.example"), ("host", "127.0.0.1:1919")];
    let answer = open.answer(request("/v1/models", &app)).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.headers["access-control-allow-origin"]),
        (200, &"http://app.example".parse().expect("a value"))
    );
    assert_eq!(status(&open, "/v1/models", &page).await, 403);
    let asked = Request::options(CHAT).header("origin", "http://app.example").body(Body::empty());
    assert_eq!(open.answer(asked.expect("a request")).await.status, 204);
}

#[tokio::test]
async fn a_client_has_so_many_requests_at_a_time() {
    let settings = Settings { max_requests_per_client: 1, ..Settings::local("tiny") };
    let client = client_with(settings, [Script::Hangs(""), says("a")]);
    let mut streamed = hello();
    streamed["stream"] = true.into();
    let body = Body::from(streamed.to_string());
    let first = client.send(Request::post(CHAT).body(body).expect("a request")).await;
    let second = client.post(CHAT, hello()).await;
    assert!(second.headers.contains_key("retry-after"));
    assert_eq!(second.error(429)["type"], "rate_limit_error");
    drop(first);
    client.post(CHAT, hello()).await.ok();
}
