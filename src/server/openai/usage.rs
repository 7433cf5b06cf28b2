//! Usage in OpenAI's words.

use serde_json::{Value, json};

use crate::server::answers::Taken;

/// That of chat completions and completions.
pub(super) fn usage(taken: Taken) -> Value {
    let Taken { usage, reasoning_tokens } = taken;
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": { "cached_tokens": usage.cached_tokens },
        "completion_tokens_details": { "reasoning_tokens": reasoning_tokens },
    })
}
