//! `{% generation %}` blocks, which mark what the assistant wrote and otherwise render their body in a scope of its own.
//!
//! That is what `{% with %}` does, so the word is exchanged and every rule on white space stays the engine's.
//! Knows as much of Jinja's lexis as it takes not to touch text, comments, raw blocks and strings.

/// `source` with each generation block turned into a `with` block; lines stay where they are.
pub(super) fn as_with_blocks(source: &str) -> String {
    let mut output = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{").filter(|&at| at + 1 < rest.len()) {
        let (text, tag) = rest.split_at(start);
        output.push_str(text);
        let length = match tag.as_bytes()[1] {
            b'#' => tag.find("#}").map_or(tag.len(), |at| at + 2),
            b'{' => tag_length(tag, "}}"),
            b'%' => block_length(tag),
            _ => 1,
        };
        let (tag, after) = tag.split_at(length);
        match block_word(tag) {
            Some("generation") => output.push_str(&tag.replacen("generation", "with", 1)),
            Some("endgeneration") => output.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => output.push_str(tag),
        }
        rest = after;
    }
    output.push_str(rest);
    output
}

/// The first word of a block tag.
fn block_word(tag: &str) -> Option<&str> {
    let inside = tag.strip_prefix("{%")?.trim_start_matches(['-', '+']).trim_start();
    inside.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

/// Bytes of the block tag that `text` starts with, for `raw` up to its end tag.
fn block_length(text: &str) -> usize {
    let length = tag_length(text, "%}");
    if block_word(text) != Some("raw") {
        return length;
    }
    let end =
        text[length..].match_indices("{%").find(|(at, _)| block_word(&text[length + at..]) == Some("endraw"));
    end.map_or(text.len(), |(at, _)| length + at)
}

/// Bytes of the tag that `text` starts with, up to and with `end` outside of strings.
fn tag_length(text: &str, end: &str) -> usize {
    let mut quote = None;
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if c == '\'' || c == '"' => quote = Some(c),
            None if text[at..].starts_with(end) => return at + end.len(),
            None => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::as_with_blocks;

    #[test]
    fn exchanges_the_word_and_nothing_else() {
        let source = "a{%- generation -%}b{% endgeneration +%}c{%generation%}{%endgeneration%}\n";
        assert_eq!(as_with_blocks(source), "a{%- with -%}b{% endwith +%}c{%with%}{%endwith%}\n");
    }

    #[test]
    fn leaves_text_comments_raw_blocks_and_strings_alone() {
        for source in [
            "generation {# {% generation %} #}",
            "{% raw %}{% generation %}{{ '{%- endraw %}x",
            "{{ '{% generation %}' }}{{ \"}}\\\"{% generation %}\" }}",
            "{% set generation = 1 %}{% generations %}",
            "{",
            "{%",
            "{{ 'é",
            "{% generation_prompt %}",
        ] {
            assert_eq!(as_with_blocks(source), source);
        }
    }
}
