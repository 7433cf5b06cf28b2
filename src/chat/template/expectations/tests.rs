//! Templates of a line, each with one expectation.

use serde_json::{Value, json};

use crate::chat::template::ChatTemplate;

/// Prints roles, contents and calls as they are.
const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}\
                     [{{ c.id }} {{ c.function.name }} {{ c.function.arguments }}]{% endfor %}{% endfor %}";

fn adapted(source: &str, messages: Value) -> Value {
    let template = ChatTemplate::new(source, None, None).expect("it parses");
    template.adapted(messages.as_array().expect("a list")).into()
}

fn call(id: &str, arguments: Value) -> Value {
    json!({"id": id, "function": {"name": "f", "arguments": arguments}})
}

fn assistant(calls: &[Value]) -> Value {
    json!({"role": "assistant", "content": "", "tool_calls": calls})
}

fn result(id: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": id})
}

#[test]
fn what_the_api_allows_becomes_plain() {
    let messages = json!([
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}, {"type": "text", "text": "c"}]},
        {"role": "system", "content": "d"},
        {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "e"}]},
        {"role": "assistant", "content": null, "tool_calls": []},
    ]);
    let plain = json!([
        {"role": "system", "content": "a\nb\nc\n\nd"},
        {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "e"}]},
        {"role": "assistant", "content": ""},
    ]);
    assert_eq!(adapted(PLAIN, messages), plain);
}

#[test]
fn arguments_are_text_where_that_prints_right_and_objects_elsewhere() {
    let (text, object) = (json!("{\"b\":1}"), json!({"b": 1}));
    let arguments = |source: &str, arguments: &Value| {
        let adapted = adapted(source, json!([assistant(&[call("1", arguments.clone())])]));
        adapted[0]["tool_calls"][0]["function"]["arguments"].clone()
    };
    let items = PLAIN.replace(
        "{{ c.function.arguments }}",
        "{% for k, v in c.function.arguments|items %}{{ k }}{{ v }}{% endfor %}",
    );
    let json = PLAIN.replace("{{ c.function.arguments }}", "{{ c.function.arguments|tojson }}");
    let either = PLAIN.replace(
        "{{ c.function.arguments }}",
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments|tojson }}{% endif %}",
    );
    for (source, expected) in [(PLAIN, &text), (&items, &object), (&json, &object), (&either, &text)] {
        assert_eq!(&arguments(source, &text), expected, "{source}");
    }
    assert_eq!(arguments(&items, &json!("{\"b\": ")), json!({"arguments": "{\"b\": "}));
    assert_eq!(arguments(&items, &json!("")), json!({}));
}

#[test]
fn calls_come_one_by_one_where_only_the_first_is_printed() {
    let first = PLAIN.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]");
    let refused = PLAIN.replace(
        "{% for c in",
        "{% if (m.tool_calls or [])|length > 1 %}{{ raise_exception('one') }}{% endif %}{% for c in",
    );
    let messages = json!([assistant(&[call("1", json!("{}")), call("2", json!("{}"))]), result("2"), result("1"), {"role": "user", "content": "a"}]);
    let single = json!([
        assistant(&[call("1", json!("{}"))]), result("1"), assistant(&[call("2", json!("{}"))]), result("2"), {"role": "user", "content": "a"},
    ]);
    assert_eq!(adapted(&first, messages.clone()), single);
    assert_eq!(adapted(&refused, messages.clone()), single);
    assert_eq!(adapted(PLAIN, messages.clone()), messages);
}

#[test]
fn ids_are_short_where_they_must_be() {
    let strict = PLAIN
        .replace("[{{ c.id }}", "{% if c.id|length != 9 %}{{ raise_exception('id') }}{% endif %}[{{ c.id }}");
    let adapted = adapted(
        &strict,
        json!([
            assistant(&[call("call_7_0", json!("{}"))]),
            result("call_7_0"),
            assistant(&[call("abcdefghi", json!("{}"))])
        ]),
    );
    let id = adapted[0]["tool_calls"][0]["id"].as_str().expect("a text");
    assert!(id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
    assert_eq!(adapted[1]["tool_call_id"], id);
    assert_eq!(adapted[2]["tool_calls"][0]["id"], "abcdefghi");
}

#[test]
fn system_messages_are_folded_where_they_would_be_refused_or_moved() {
    let refused = format!(
        "{PLAIN}{{% for m in messages[1:] %}}{{% if m.role == 'system' %}}{{{{ raise_exception('first') }}}}{{% endif %}}{{% endfor %}}"
    );
    let moved = format!(
        "{{% for m in messages %}}{{% if m.role == 'system' %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}{}",
        PLAIN.replace(
            "<{{ m.role }}>{{ m.content }}",
            "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}"
        )
    );
    let message = |(role, content): (&str, &str)| json!({"role": role, "content": content});
    let messages: Value = [
        ("system", "a"),
        ("user", "b"),
        ("system", "c"),
        ("assistant", "d"),
        ("system", "e"),
        ("system", "f"),
        ("user", "g"),
        ("assistant", "h"),
        ("system", "i"),
    ]
    .map(message)
    .to_vec()
    .into();
    let folded: Value = [
        ("system", "a"),
        ("user", "b\n\nc"),
        ("assistant", "d"),
        ("user", "e\n\nf\n\ng"),
        ("assistant", "h"),
        ("user", "i"),
    ]
    .map(message)
    .to_vec()
    .into();
    assert_eq!(adapted(&refused, messages.clone()), folded);
    assert_eq!(adapted(&moved, messages.clone()), folded);
    assert_eq!(adapted(PLAIN, messages.clone()), messages);
}

#[test]
fn neighbours_are_one_where_roles_must_alternate() {
    let strict = format!(
        "{PLAIN}{{% for m in messages %}}{{% if loop.previtem and loop.previtem.role == m.role %}}{{{{ raise_exception('turns') }}}}{{% endif %}}{{% endfor %}}"
    );
    let messages = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]);
    assert_eq!(adapted(&strict, messages.clone()), json!([{"role": "user", "content": "a\n\nb"}]));
    assert_eq!(adapted(PLAIN, messages.clone()), messages);
}

#[test]
fn what_is_said_beside_a_call_is_thought_where_both_are_refused() {
    let strict = PLAIN.replace("{% for c in", "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}{% for c in");
    let mut message = assistant(&[call("1", json!("{}"))]);
    (message["content"], message["reasoning"]) = (json!("said"), json!("thought"));
    let adapted = adapted(&strict, json!([message]));
    assert_eq!((&adapted[0]["content"], &adapted[0]["reasoning"]), (&json!(""), &json!("thought\n\nsaid")));
}
