//! Where messages end in a rendered prompt: the places up to which another prompt is likely to be the same. A conversation
//! that is edited, shortened or begun anew differs from this one behind such a place.
//!
//! Nothing is known of the template but what it renders: a beginning of the messages is rendered alone, and once more as if
//! the user said something else next; how far either agrees with the whole is where the beginning ends.

use serde_json::{Value, json};

use super::template::{ChatTemplate, Prompt};
use crate::formats::tokenizer::{Tokenizer, TokenizerError};

/// The ends of messages in `text`, which is `prompt` rendered by `template`, in bytes, ascending: of system message and tools,
/// of each of the last `n_messages` messages, and where the assistant begins to write.
///
/// An end that the template hides is left out, or lies a little before where it should be. Costs two renderings an end.
pub fn message_ends(
    template: &ChatTemplate,
    prompt: &Prompt<'_>,
    text: &str,
    n_messages: usize,
) -> Vec<usize> {
    let messages = prompt.messages;
    let n_system = messages.iter().take_while(|message| message["role"] == "system").count();
    let last = messages.len().saturating_sub(n_messages).max(n_system + 1)..=messages.len();
    let mut ends: Vec<usize> =
        [n_system].into_iter().chain(last).map(|n| shared_by_first(n, template, prompt, text)).collect();
    ends.sort_unstable();
    ends.dedup();
    ends.retain(|&end| end > 0 && end < text.len());
    ends
}

/// How much of `text` another prompt shares whose first `n` messages are the same.
fn shared_by_first(n: usize, template: &ChatTemplate, prompt: &Prompt<'_>, text: &str) -> usize {
    let (first, next) = prompt.messages.split_at(n.min(prompt.messages.len()));
    let said = next.first().and_then(|message| message["content"].as_str()).unwrap_or_default();
    // Not what comes next, even in its first letter.
    let other = if said.trim_start().starts_with('A') { "B" } else { "A" };
    let otherwise = [first, &[json!({"role": "user", "content": other})]].concat();
    let shared = |messages: &[Value]| {
        let rendered = template.render(&Prompt { messages, add_generation_prompt: false, ..*prompt }).ok()?;
        Some(shared_bytes(&rendered, text))
    };
    // What a template prints of the last turns depends on whether a user's message follows.
    shared(first).max(shared(&otherwise)).unwrap_or(0)
}

fn shared_bytes(a: &str, b: &str) -> usize {
    let n_bytes = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    b.floor_char_boundary(n_bytes)
}

/// For each of `ends`, in bytes of `text`, how many of its `tokens` lie before it: a token that lies across an end lies behind
/// it. Empty where the tokens do not spell the text, as where a tokenizer normalises it.
///
/// # Errors
/// The tokenizer's.
pub fn in_tokens(
    tokenizer: &Tokenizer,
    text: &str,
    tokens: &[u32],
    ends: &[usize],
) -> Result<Vec<usize>, TokenizerError> {
    let mut n_bytes = 0;
    let mut previous = None;
    let mut ends = ends.iter().copied().peekable();
    let mut counts: Vec<usize> = Vec::new();
    for (n_tokens, &token) in tokens.iter().enumerate() {
        let bytes = tokenizer.bytes_after(previous, token)?;
        previous = Some(token);
        if text.as_bytes().get(n_bytes..n_bytes + bytes.len()) != Some(&bytes[..]) {
            return Ok(Vec::new());
        }
        n_bytes += bytes.len();
        while ends.next_if(|&end| end < n_bytes).is_some() {
            counts.push(n_tokens);
        }
    }
    counts.extend(ends.map(|_| tokens.len()));
    counts.dedup();
    counts.retain(|&count| count > 0);
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Map;
    use std::path::Path;

    const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                          {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

    fn pieces(source: &str, messages: &[Value], n_messages: usize) -> Vec<String> {
        let template = ChatTemplate::new(source, None, None).expect("parses");
        let kwargs = Map::new();
        let now = jiff::civil::DateTime::default();
        let prompt = Prompt { messages, tools: None, add_generation_prompt: true, kwargs: &kwargs, now };
        let text = template.render(&prompt).expect("renders");
        let mut start = 0;
        let ends = message_ends(&template, &prompt, &text, n_messages);
        let mut piece = |end: usize| text[std::mem::replace(&mut start, end)..end].to_owned();
        ends.into_iter().chain([text.len()]).map(&mut piece).collect()
    }

    fn conversation() -> Vec<Value> {
        let message = |(role, content)| json!({"role": role, "content": content});
        [("system", "Be terse."), ("user", "A"), ("assistant", "Hi."), ("user", "Bye")].map(message).to_vec()
    }

    #[test]
    fn the_last_messages_end_where_another_could_follow() {
        let begin = "<|im_start|>";
        let expected = [
            format!("{begin}system\nBe terse.<|im_end|>\n{begin}user\n"),
            format!("A<|im_end|>\n{begin}"),
            format!("assistant\nHi.<|im_end|>\n{begin}user\n"),
            format!("Bye<|im_end|>\n{begin}"),
            "assistant\n".to_owned(),
        ];
        assert_eq!(pieces(CHATML, &conversation(), 9), expected);
        assert_eq!(
            pieces(CHATML, &conversation(), 1),
            [expected[0].clone(), expected[1..3].concat(), expected[3].clone(), expected[4].clone()]
        );
    }

    #[test]
    fn a_template_that_forgets_thinking_hides_no_end() {
        let source = "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}\
                      {% set last.user = loop.index %}{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>\
                      {% if loop.index > last.user %}({{ m.thinking }}){% endif %}{{ m.content }};{% endfor %}";
        let mut messages = conversation();
        messages[2]["thinking"] = json!("hm");
        assert_eq!(
            pieces(source, &messages, 9),
            ["<system>Be terse.;<user>", "A;<", "assistant>Hi.;<user>", "Bye;"]
        );
    }

    #[test]
    fn without_a_system_message_the_beginning_is_shared() {
        let messages = [json!({"role": "user", "content": "A"})];
        let expected = ["<|im_start|>user\n", "A<|im_end|>\n<|im_start|>", "assistant\n"];
        assert_eq!(pieces(CHATML, &messages, 2), expected);
    }

    fn tokenizer() -> Tokenizer {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3_moe-bf16/tokenizer.json");
        Tokenizer::from_bytes("tokenizer.json", &std::fs::read(file).expect("is there")).expect("loads")
    }

    #[test]
    fn tokens_that_do_not_spell_the_text_have_no_ends() {
        let tokenizer = tokenizer();
        let tokens = tokenizer.encode("abc", false).expect("encodes");
        assert_eq!(in_tokens(&tokenizer, "abd", &tokens, &[1]).expect("decodes"), Vec::<usize>::new());
    }

    proptest! {
        #[test]
        fn no_token_lies_across_an_end(text in "[ab é🙂\n]{1,30}", ends in prop::collection::vec(any::<prop::sample::Index>(), 0..5)) {
            let tokenizer = tokenizer();
            let tokens = tokenizer.encode(&text, false).expect("encodes");
            let places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            let mut ends: Vec<usize> = ends.iter().map(|end| *end.get(&places)).collect();
            ends.sort_unstable();
            let counts = in_tokens(&tokenizer, &text, &tokens, &ends).expect("decodes");
            let n_bytes = |count: usize| {
                let bytes: Vec<u8> = tokens[..count].iter().flat_map(|&token| tokenizer.bytes_after(None, token).expect("decodes")).collect();
                bytes.len()
            };
            let mut expected: Vec<usize> = ends.iter().map(|&end| (0..=tokens.len()).rev().find(|&count| n_bytes(count) <= end).expect("0 fits")).collect();
            expected.dedup();
            expected.retain(|&count| count > 0);
            prop_assert_eq!(counts, expected);
        }
    }
}
