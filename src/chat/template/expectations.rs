//! [`Expectations`]: what a template expects of messages beyond what the API promises, found out by rendering small
//! conversations; and messages made so that they meet it. It knows no template by name.
//!
//! Clients send what the API allows: arguments as text, content in parts, system messages anywhere. Templates were written
//! for the messages of their model's training, and print anything else wrongly or refuse it.

mod probe;
#[cfg(test)]
mod tests;

use serde_json::{Map, Value, json};

use super::messages::REASONING;

/// What a template does with messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Expectations {
    /// Arguments of calls as JSON text print as the object would. Then they stay as the model wrote them, which is what a
    /// prefix cache holds.
    text_arguments: bool,
    /// Ids of calls must have nine characters.
    short_ids: bool,
    /// All calls of a message are printed.
    parallel_calls: bool,
    /// A message may have content, thinking and calls at once.
    thinking_beside_content: bool,
    /// A system message is printed where it stands.
    system_anywhere: bool,
    /// One user message may follow another.
    user_after_user: bool,
}

/// Length of the ids of templates that ask for one.
const ID_CHARS: usize = 9;

impl Expectations {
    /// The messages as the template wants them.
    pub(super) fn meet(&self, messages: &[Value]) -> Vec<Value> {
        let mut messages: Vec<Value> = messages.to_vec();
        for message in messages.iter_mut().filter_map(Value::as_object_mut) {
            plain(message);
            self.meet_in(message);
        }
        messages = self.with_systems_placed(messages);
        if !self.parallel_calls {
            messages = with_single_calls(messages);
        }
        if !self.user_after_user {
            messages.dedup_by(|next, message| {
                let both =
                    role(message) == "user" && role(next) == "user" && is_text(message) && is_text(next);
                if both {
                    append(message, text(next));
                }
                both
            });
        }
        messages
    }

    fn meet_in(&self, message: &mut Map<String, Value>) {
        if self.short_ids
            && let Some(Value::String(id)) = message.get_mut("tool_call_id")
        {
            *id = short_id(id);
        }
        let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) else { return };
        for call in calls.iter_mut() {
            if self.short_ids
                && let Some(Value::String(id)) = call.get_mut("id")
            {
                *id = short_id(id);
            }
            let function = if call.get("function").is_some() { &mut call["function"] } else { call };
            if let Some(arguments) = function.get_mut("arguments") {
                self.meet_arguments(arguments);
            }
        }
        if calls.is_empty() {
            message.shift_remove("tool_calls");
        } else if !self.thinking_beside_content {
            join_thinking(message);
        }
    }

    fn meet_arguments(&self, arguments: &mut Value) {
        let Value::String(text) = arguments else { return };
        if self.text_arguments {
            return;
        }
        *arguments = match serde_json::from_str(text) {
            Ok(Value::Object(object)) => Value::Object(object),
            _ if text.trim().is_empty() => json!({}),
            // A call that was cut has arguments that are no object; the model shall see them nevertheless.
            _ => json!({ "arguments": text }),
        };
    }

    /// System messages at the beginning become one. A later one that the template would refuse, leave out or print at the
    /// beginning is added to the user's or tool's message beside it.
    fn with_systems_placed(&self, messages: Vec<Value>) -> Vec<Value> {
        let mut placed: Vec<Value> = Vec::with_capacity(messages.len());
        // A text for the user message that comes next.
        let mut waiting: Option<Value> = None;
        for message in messages {
            let is_system = role(&message) == "system" && is_text(&message);
            let folds = is_system && !self.system_anywhere;
            let n_placed = placed.len();
            match placed.last_mut() {
                Some(first) if is_system && n_placed == 1 && role(first) == "system" => {
                    append(first, text(&message));
                }
                Some(last) if folds && waiting.is_none() && takes_text(last) => {
                    append(last, text(&message));
                }
                Some(_) if folds => {
                    let user = waiting.get_or_insert_with(|| json!({"role": "user", "content": ""}));
                    append(user, text(&message));
                }
                _ => match waiting.take() {
                    Some(mut user) if role(&message) == "user" && is_text(&message) => {
                        append(&mut user, text(&message));
                        placed.push(user);
                    }
                    user => placed.extend(user.into_iter().chain([message])),
                },
            }
        }
        placed.extend(waiting);
        placed
    }
}

/// Undoes what the API allows and no template needs: text in parts, no content at all, the name `developer`.
fn plain(message: &mut Map<String, Value>) {
    if message.get("role").is_some_and(|role| role == "developer") {
        message["role"] = json!("system");
    }
    match message.get("content") {
        Some(Value::Array(parts)) if parts.iter().all(|part| part["text"].is_string()) => {
            let mut joined = String::new();
            for part in parts.iter().filter_map(|part| part["text"].as_str()) {
                if !joined.is_empty() && !joined.ends_with(char::is_whitespace) {
                    joined.push('\n');
                }
                joined.push_str(part);
            }
            message["content"] = json!(joined);
        }
        None | Some(Value::Null) => {
            message.insert("content".into(), json!(""));
        }
        _ => {}
    }
}

/// Adds what is said beside a call to the thinking before it.
fn join_thinking(message: &mut Map<String, Value>) {
    let said = message["content"].as_str().unwrap_or_default().to_owned();
    let Some(name) = REASONING.into_iter().find(|&name| message.get(name).is_some_and(Value::is_string))
    else {
        return;
    };
    let thought = message[name].as_str().unwrap_or_default();
    if !said.is_empty() && !thought.is_empty() {
        let both = format!("{thought}\n\n{said}");
        REASONING.iter().for_each(|&name| drop(message.shift_remove(name)));
        message.insert(name.into(), json!(both));
        message["content"] = json!("");
    }
}

/// Messages of several calls as several messages, each with the result of its call behind it.
fn with_single_calls(messages: Vec<Value>) -> Vec<Value> {
    let mut single = Vec::with_capacity(messages.len());
    let mut messages = messages.into_iter().peekable();
    while let Some(mut message) = messages.next() {
        let calls = match message.get_mut("tool_calls").map(Value::take) {
            Some(Value::Array(calls)) if calls.len() > 1 => calls,
            calls => {
                calls.into_iter().for_each(|calls| message["tool_calls"] = calls);
                single.push(message);
                continue;
            }
        };
        let mut results = Vec::new();
        while let Some(result) = messages.next_if(|next| role(next) == "tool") {
            results.push(result);
        }
        for call in calls {
            let result = results.iter().position(|result| result["tool_call_id"] == call["id"]);
            message["tool_calls"] = json!([call]);
            single.push(message);
            single.extend(result.map(|at| results.remove(at)));
            message = json!({"role": "assistant", "content": ""});
        }
        single.append(&mut results);
    }
    single
}

fn role(message: &Value) -> &str {
    message["role"].as_str().unwrap_or_default()
}

fn is_text(message: &Value) -> bool {
    message["content"].is_string()
}

fn text(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

/// Whether a system message may be added to this one: what the assistant said stays its own.
fn takes_text(message: &Value) -> bool {
    matches!(role(message), "user" | "tool") && is_text(message)
}

/// Adds a paragraph to a message.
fn append(message: &mut Value, paragraph: &str) {
    let before = text(message);
    let gap = if before.is_empty() || paragraph.is_empty() { "" } else { "\n\n" };
    message["content"] = json!(format!("{before}{gap}{paragraph}"));
}

/// Nine letters and digits for any id, the same each time.
fn short_id(id: &str) -> String {
    const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    if id.len() == ID_CHARS && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return id.into();
    }
    // FNV-1a
    let hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let digits = std::iter::successors(Some(hash), |rest| Some(rest / 62)).take(ID_CHARS);
    digits.map(|rest| char::from(DIGITS[(rest % 62) as usize])).collect()
}
