//! Log-probabilities in OpenAI's words.

use serde_json::{Value, json};

use crate::server::answers::TokenLogprob;

/// An entry of `logprobs.content` of a chat completion.
pub(super) fn chat(token: &TokenLogprob) -> Value {
    let entry = |bytes: &[u8], logprob: f32| json!({ "token": String::from_utf8_lossy(bytes), "logprob": finite(logprob), "bytes": bytes });
    let mut shown = entry(&token.bytes, token.logprob);
    let top: Vec<Value> = token.top.iter().map(|(bytes, logprob)| entry(bytes, *logprob)).collect();
    shown["top_logprobs"] = top.into();
    shown
}

/// JSON has no infinity: a token without a chance has the least number that clients expect.
pub(super) fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// `logprobs` of a completion. `offset`: characters of the text in front of the first of these tokens.
pub(super) fn completion(tokens: &[TokenLogprob], offset: usize) -> Value {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let texts: Vec<String> = tokens.iter().map(|token| text(&token.bytes)).collect();
    let logprobs: Vec<f32> = tokens.iter().map(|token| finite(token.logprob)).collect();
    let tops = tokens.iter().map(|token| {
        let top = token.top.iter().map(|(bytes, logprob)| (text(bytes), finite(*logprob).into()));
        Value::Object(top.collect())
    });
    let offsets = texts.iter().scan(offset, |end, text| {
        let start = *end;
        *end += text.chars().count();
        Some(start)
    });
    json!({
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": tops.collect::<Vec<_>>(),
        "text_offset": offsets.collect::<Vec<_>>(),
    })
}
