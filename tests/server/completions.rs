//! `/v1/completions`.

use freetoken::scheduler::Stop;
use serde_json::{Value, json};

use crate::fake::{CACHED, Script, client};

const PATH: &str = "/v1/completions";

fn says(text: &'static str) -> Script {
    Script::Says(text, Stop::Eos)
}

#[tokio::test]
async fn a_text_goes_on_without_a_template() {
    let client = client([says(" upon a <think>time"), says(" upon a <think>time")]);
    let body = client.post(PATH, json!({ "model": "m", "prompt": "Once there was" })).await.ok();
    assert_eq!(body["object"], "text_completion");
    let choice =
        json!({ "index": 0, "text": " upon a <think>time", "logprobs": null, "finish_reason": "stop" });
    assert_eq!(body["choices"], json!([choice]));
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], CACHED);
    assert_eq!(client.asked()[0].prompt, "Once there was");

    let streamed = json!({ "model": "m", "prompt": "Once there was", "stream": true, "stream_options": { "include_usage": true } });
    let events = client.post(PATH, streamed).await.events();
    let texts = events.iter().filter_map(|event| event.data["choices"][0]["text"].as_str());
    assert_eq!(texts.collect::<String>(), " upon a <think>time");
    let n = events.len();
    assert_eq!(events[n - 3].data["choices"][0]["finish_reason"], "stop");
    assert_eq!(events[n - 2].data["choices"], json!([]));
    assert_eq!(events[n - 1].data, "[DONE]");
}

#[tokio::test]
async fn prompts_may_be_several_texts_or_tokens() {
    let client = client([says("a"), says("b"), says("c"), says("d"), says("e")]);
    let texts = json!({ "model": "m", "prompt": ["x", "yy"], "n": 2 });
    let body = client.post(PATH, texts).await.ok();
    let choices: Vec<Value> = body["choices"].as_array().expect("a list").clone();
    let texts: Vec<&Value> = choices.iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["a", "b", "c", "d"]);
    let prompts: Vec<String> = client.asked().into_iter().map(|asked| asked.prompt).collect();
    assert_eq!(prompts, ["x", "x", "yy", "yy"]);
    let lengths = 1 + client.post("/tokenize", json!({ "prompt": "yy" })).await.ok()["count"]
        .as_u64()
        .expect("a number");
    assert_eq!(body["usage"]["prompt_tokens"], lengths);
    client.post(PATH, json!({ "model": "m", "prompt": [5, 6, 7] })).await.ok();
    assert_eq!(client.asked()[0].request.prompt, [5, 6, 7]);
}

#[tokio::test]
async fn logprobs_have_the_old_form() {
    let client = client([says("ab")]);
    let body =
        client.post(PATH, json!({ "model": "m", "prompt": "x", "logprobs": 1, "max_tokens": 5 })).await.ok();
    let logprobs = &body["choices"][0]["logprobs"];
    let n = logprobs["tokens"].as_array().map(Vec::len);
    assert!(n.is_some_and(|n| n > 0), "{logprobs}");
    for list in ["token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[list].as_array().map(Vec::len), n, "{list}");
    }
    assert_eq!(logprobs["text_offset"][0], 0);
}
