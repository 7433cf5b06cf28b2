//! What `apply_chat_template` does to messages before the template sees them; knows no template.

use serde_json::Value;

/// The names under which clients send an assistant's reasoning, in the order in which they are looked up.
pub(super) const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The messages without null fields, reasoning copied to the two names that templates read.
pub(super) fn prepared(messages: &[Value]) -> Vec<Value> {
    let mut messages = messages.to_vec();
    for message in messages.iter_mut().filter_map(Value::as_object_mut) {
        message.retain(|_, value| !value.is_null());
        if let Some(reasoning) = REASONING.iter().find_map(|&name| message.get(name)).cloned() {
            message.entry("thinking").or_insert_with(|| reasoning.clone());
            message.insert("reasoning_content".into(), reasoning);
        }
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::prepared;
    use serde_json::json;

    #[test]
    fn drops_null_fields_of_the_message_only() {
        let messages =
            [json!({"role": "assistant", "content": null, "tool_calls": [{"note": null}]}), json!("text")];
        assert_eq!(
            prepared(&messages),
            [json!({"role": "assistant", "tool_calls": [{"note": null}]}), json!("text")]
        );
    }

    #[test]
    fn reasoning_takes_the_names_that_templates_read() {
        let messages = [
            json!({"reasoning": "a"}),
            json!({"reasoning_content": null, "thinking": "b", "reasoning": "c"}),
            json!({"reasoning_content": "d", "thinking": "e"}),
        ];
        assert_eq!(
            prepared(&messages),
            [
                json!({"reasoning": "a", "reasoning_content": "a", "thinking": "a"}),
                json!({"reasoning_content": "b", "thinking": "b", "reasoning": "c"}),
                json!({"reasoning_content": "d", "thinking": "e"}),
            ]
        );
    }
}
