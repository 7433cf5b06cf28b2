//! `/v1/responses`.

use freetoken::scheduler::Stop;
use serde_json::{Value, json};

use crate::fake::{CACHED, Script, client};

const PATH: &str = "/v1/responses";
const ALL: &str =
    "<think>Hm.</think>I add.<tool_call>\n{\"name\": \"add\", \"arguments\": {\"x\": 1}}\n</tool_call>";

fn ask(more: Value) -> Value {
    let tool = json!({
        "type": "function", "name": "add", "strict": false,
        "parameters": { "type": "object", "properties": { "x": { "type": "integer" } } },
    });
    let mut body = json!({ "model": "m", "input": "Hi.", "tools": [tool, { "type": "web_search" }] });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

#[tokio::test]
async fn a_response_has_its_items() {
    let client = client([Script::Says(ALL, Stop::Eos)]);
    let body = client.post(PATH, ask(json!({ "instructions": "Be kind." }))).await.ok();
    assert_eq!((&body["object"], &body["status"]), (&json!("response"), &json!("completed")));
    let output = body["output"].as_array().expect("a list");
    let kinds: Vec<&Value> = output.iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(output[0]["content"][0], json!({ "type": "reasoning_text", "text": "Hm." }));
    assert_eq!(output[1]["content"][0]["text"], "I add.");
    assert_eq!((&output[2]["name"], &output[2]["arguments"]), (&json!("add"), &json!("{\"x\": 1}")));
    assert_eq!(body["usage"]["input_tokens_details"]["cached_tokens"], CACHED);
    assert!(body["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().is_some_and(|n| n > 0));
    let prompt = &client.asked()[0].prompt;
    assert!(prompt.contains("<|im_start|>system\nBe kind.") && !prompt.contains("web_search"), "{prompt}");
}

#[tokio::test]
async fn a_stream_tells_every_item_from_its_beginning_to_its_end() {
    let client = client([Script::Says(ALL, Stop::Eos)]);
    let events = client.post(PATH, ask(json!({ "stream": true }))).await.events();
    let mut order: Vec<&str> = events.iter().map(|event| event.name.as_str()).collect();
    order.dedup();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(order, expected);
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event.data["sequence_number"], i);
        assert_eq!(event.data["type"], event.name.as_str());
    }
    let indices: Vec<&Value> = events
        .iter()
        .filter(|event| event.name == "response.output_item.done")
        .map(|event| &event.data["output_index"])
        .collect();
    assert_eq!(indices, [0, 1, 2]);
    let last = &events.last().expect("an event").data["response"];
    assert_eq!(last["output"].as_array().map(Vec::len), Some(3));
    assert_eq!(last["usage"]["input_tokens_details"]["cached_tokens"], CACHED);
}

#[tokio::test]
async fn an_answer_that_is_cut_off_is_incomplete() {
    let client = client([Script::Says("a long answer", Stop::Eos), Script::Says("a long answer", Stop::Eos)]);
    let body = client.post(PATH, ask(json!({ "max_output_tokens": 2 }))).await.ok();
    assert_eq!(body["status"], "incomplete");
    assert_eq!(body["incomplete_details"]["reason"], "max_output_tokens");
    let events = client.post(PATH, ask(json!({ "max_output_tokens": 2, "stream": true }))).await.events();
    assert_eq!(events.last().expect("an event").name, "response.incomplete");
}

#[tokio::test]
async fn a_failure_is_the_last_event() {
    let client = client([Script::Fails("a")]);
    let events = client.post(PATH, ask(json!({ "stream": true }))).await.events();
    let last = events.last().expect("an event");
    assert_eq!(
        (last.name.as_str(), &last.data["response"]["error"]["code"]),
        ("response.failed", &json!("server_error"))
    );
}

#[tokio::test]
async fn nothing_is_stored() {
    let client = client([]);
    for (more, param) in [
        (json!({ "store": true }), "store"),
        (json!({ "previous_response_id": "resp_1" }), "previous_response_id"),
        (json!({ "background": true }), "background"),
        (json!({ "truncation": "auto" }), "truncation"),
        (json!({ "include": ["file_search_call.results"] }), "include"),
    ] {
        assert_eq!(client.post(PATH, ask(more)).await.error(400)["param"], param);
    }
    client.get("/v1/responses/resp_1").await.error(404);
}
