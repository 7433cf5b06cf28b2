//! Small conversations that a template is tried on: what it prints of them, and which it refuses, is what it expects.

use serde_json::{Map, Value, json};

use super::Expectations;
use crate::chat::template::{ChatTemplate, Prompt};

/// An id that every template takes.
const ID: &str = "probe0001";
const LONG_ID: &str = "probe_of_any_length";

impl Expectations {
    /// What `template` expects. Costs eight short renderings.
    pub(in crate::chat::template) fn of(template: &ChatTemplate) -> Self {
        let object = json!({"key": "value"});
        let text = json!("{\"key\": \"value\"}");
        let as_object = render(template, &called_once(ID, &object));
        let as_text = render(template, &called_once(ID, &text));
        // A dict that is printed in Python's notation is nothing that a model was trained on.
        let object_prints = as_object.as_ref().is_some_and(|prompt| !prompt.contains("{'key'"));
        let text_arguments = as_text.is_some() && (as_object == as_text || !object_prints);
        let arguments = if text_arguments { text } else { object };
        // A template that takes no calls at all says nothing of what they should be like.
        let takes_calls = as_object.is_some() || as_text.is_some();
        let refuses = |messages: &[Value]| takes_calls && render(template, messages).is_none();

        let both = [call(ID, "alpha", &arguments), call("probe0002", "beta", &arguments)];
        let two_calls = render(template, &[user("ask"), calling(&both), result(ID), result("probe0002")]);
        let asked = render(template, &[user("ask")]).unwrap_or_default();
        // Both stand in the list of tools as well.
        let prints_beta = |prompt: String| prompt.matches("beta").count() > asked.matches("beta").count();

        let mut full = called_once(ID, &arguments);
        full[1]["content"] = json!("said");
        full[1]["reasoning_content"] = json!("thought");

        let said = json!({"role": "assistant", "content": "said"});
        let middle = render(template, &[system("first"), user("ask"), said, system("second"), user("more")]);
        let in_place = |prompt: String| prompt.rfind("second") > prompt.rfind("ask");
        Expectations {
            text_arguments,
            short_ids: refuses(&called_once(LONG_ID, &arguments)),
            parallel_calls: !takes_calls || two_calls.is_some_and(prints_beta),
            thinking_beside_content: !refuses(&full),
            system_anywhere: middle.is_some_and(in_place),
            user_after_user: render(template, &[user("ask"), user("more")]).is_some(),
        }
    }
}

/// A prompt with two tools, `alpha` and `beta`; `None` where the template refuses the messages.
fn render(template: &ChatTemplate, messages: &[Value]) -> Option<String> {
    let tools = ["alpha", "beta"].map(|name| {
        let parameters = json!({"type": "object", "properties": {"key": {"type": "string"}}});
        json!({"type": "function", "function": {"name": name, "description": name, "parameters": parameters}})
    });
    let prompt = Prompt {
        messages,
        tools: Some(&tools),
        add_generation_prompt: true,
        kwargs: &Map::new(),
        now: jiff::civil::DateTime::default(),
    };
    template.render(&prompt).ok()
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn system(text: &str) -> Value {
    json!({"role": "system", "content": text})
}

fn result(id: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": "done"})
}

fn call(id: &str, name: &str, arguments: &Value) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

fn calling(calls: &[Value]) -> Value {
    json!({"role": "assistant", "content": "", "tool_calls": calls})
}

fn called_once(id: &str, arguments: &Value) -> [Value; 3] {
    [user("ask"), calling(&[call(id, "alpha", arguments)]), result(id)]
}
