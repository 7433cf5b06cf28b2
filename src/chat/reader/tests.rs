//! Every dialect, whole and cut anywhere.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{Answered, Piece, Reader};
use crate::chat::dialect::Dialect;

fn tools() -> Vec<Value> {
    let weather = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "options": {"type": "object"}, "hourly": {"type": "boolean"}}});
    vec![
        json!({"type": "function", "function": {"name": "get_weather", "parameters": weather}}),
        json!({"type": "function", "function": {"name": "now"}}),
    ]
}

fn dialect(name: &str) -> Dialect {
    Dialect::named(name).expect("a dialect")
}

/// Pieces of the whole answer, neighbours of one kind together.
fn read<'a>(
    dialect: Dialect,
    prompt: &str,
    with_tools: bool,
    parts: impl IntoIterator<Item = &'a str>,
) -> Vec<Piece> {
    let tools = tools();
    let mut reader = Reader::new(dialect, prompt, with_tools.then_some(&tools), "7");
    let mut pieces: Vec<Piece> = parts.into_iter().flat_map(|part| reader.push(part)).collect();
    pieces.extend(reader.finish());
    let mut merged: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (merged.last_mut(), &piece) {
            (Some(Piece::Reasoning(last)), Piece::Reasoning(text))
            | (Some(Piece::Content(last)), Piece::Content(text)) => {
                last.push_str(text);
            }
            (Some(Piece::ToolCallArguments { json: last, .. }), Piece::ToolCallArguments { json, .. }) => {
                last.push_str(json)
            }
            _ => merged.push(piece),
        }
    }
    merged
}

fn answered(name: &str, prompt: &str, text: &str) -> Answered {
    let mut answered = Answered::default();
    answered.extend(read(dialect(name), prompt, true, [text]));
    answered
}

/// Names and arguments.
fn calls(answered: &Answered) -> Vec<(&str, &str)> {
    answered.tool_calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect()
}

/// An answer in each dialect: thinking, a text, and two calls, the second without arguments.
const ANSWERS: [(&str, &str); 15] = [
    (
        "hermes",
        "<think>\nHm <b>.\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Z\\u00fc </tool_call>\", \
         \"days\": 3}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
    ),
    (
        "qwen-xml",
        "<think>\nHm <b>.\n</think>\n\nLet me see.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZü </tool_call>\n</parameter>\n\
         <parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    (
        "glm",
        "<think>Hm <b>.</think>\nLet me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zü </tool_call></arg_value>\n\
         <arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    ),
    (
        "dsml",
        "<think>Hm <b>.</think>Let me see.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" \
         string=\"true\">Zü </tool_call></｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n\
         </｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    (
        "deepseek",
        "<think>Hm <b>.</think>Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Zü </tool_call>\", \
         \"days\": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "deepseek",
        "<think>Hm <b>.</think>Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Zü \
         </tool_call>\", \"days\": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>\
         <｜tool▁calls▁end｜>",
    ),
    (
        "minimax-m2",
        "<think>\nHm <b>.\n</think>\n\nLet me see.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Zü </tool_call>\
         </parameter>\n<parameter name=\"days\">3</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
    ),
    (
        "minimax-m3",
        "<mm:think>Hm <b>.</mm:think>Let me see.]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"get_weather\">]<]minimax[>[<city>Zü \
         </tool_call>]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name=\"now\">\
         ]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    ),
    (
        "kimi",
        "<think>Hm <b>.</think>Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>\
         {\"city\": \"Zü </tool_call>\", \"days\": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}\
         <|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "gemma",
        "<|channel>thought\nHm <b>.\n<channel|>Let me see.<|tool_call>call:get_weather{city:<|\"|>Zü </tool_call><|\"|>,days:3}<tool_call|>\
         <|tool_call>call:now{}<tool_call|>",
    ),
    (
        "mistral",
        "[THINK]Hm <b>.[/THINK]Let me see.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"Zü </tool_call>\", \"days\": 3}\
         [TOOL_CALLS]now[ARGS]{}",
    ),
    (
        "mistral",
        "[THINK]Hm <b>.[/THINK]Let me see.[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zü </tool_call>\", \"days\": 3}}, \
         {\"arguments\": {}, \"name\": \"now\"}]",
    ),
    (
        "lfm",
        "<think>Hm <b>.</think>Let me see.<|tool_call_start|>[get_weather(city='Zü </tool_call>', days=3), now()]<|tool_call_end|>",
    ),
    (
        "llama",
        "<think>Hm <b>.</think>Let me see.<|python_tag|>{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Zü </tool_call>\", \"days\": 3}}; \
         {\"name\": \"now\", \"parameters\": {}}",
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant\
         <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Zü </tool_call>\", \"days\": 3}<|call|>\
         <|start|>assistant to=functions.now<|channel|>commentary json<|message|><|call|>",
    ),
];

#[test]
fn every_dialect_says_the_same() {
    for (name, text) in ANSWERS {
        let answered = answered(name, "", text);
        assert_eq!(
            (answered.reasoning.as_str(), answered.content.as_str()),
            ("Hm <b>.", "Let me see."),
            "{name}"
        );
        let calls = calls(&answered);
        assert_eq!(calls.iter().map(|call| call.0).collect::<Vec<_>>(), ["get_weather", "now"], "{name}");
        let arguments: Value = serde_json::from_str(calls[0].1)
            .unwrap_or_else(|error| panic!("{name}: {error}: {}", calls[0].1));
        assert_eq!(arguments, json!({"city": "Zü </tool_call>", "days": 3}), "{name}");
        assert_eq!(calls[1].1, "{}", "{name}");
    }
    let tested: Vec<&str> = ANSWERS.iter().map(|answer| answer.0).collect();
    for dialect in Dialect::all() {
        assert!(tested.contains(&dialect.name()), "{dialect:?}");
    }
}

#[test]
fn a_character_at_a_time_is_as_good_as_all_at_once() {
    for (name, text) in ANSWERS {
        let whole = read(dialect(name), "", true, [text]);
        assert_eq!(read(dialect(name), "", true, text.split("").filter(|c| !c.is_empty())), whole, "{name}");
        for (index, piece) in
            whole.iter().filter(|piece| matches!(piece, Piece::ToolCallBegin { .. })).enumerate()
        {
            assert!(matches!(piece, Piece::ToolCallBegin { index: i, .. } if *i == index), "{piece:?}");
        }
    }
}

#[test]
fn ids_are_the_models_own_or_made() {
    let ids = |name: &str, text: &str| {
        answered(name, "", text).tool_calls.into_iter().map(|call| call.id).collect::<Vec<_>>()
    };
    for (name, text) in ANSWERS {
        let expected = match name {
            "kimi" => ["functions.get_weather:0", "functions.now:1"],
            "mistral" if text.contains("[CALL_ID]") => ["abcdefghi", "call_7_1"],
            _ => ["call_7_0", "call_7_1"],
        };
        assert_eq!(ids(name, text), expected, "{name}");
    }
}

#[test]
fn without_tools_a_call_is_text() {
    for (name, text) in ANSWERS {
        let pieces = read(dialect(name), "", false, [text]);
        let said = |piece: &Piece| matches!(piece, Piece::Reasoning(_) | Piece::Content(_));
        assert!(pieces.iter().all(said) && pieces.len() == 2, "{name}: {pieces:?}");
    }
}

#[test]
fn a_prompt_may_begin_the_thinking_or_end_it() {
    let answered = |prompt, text| {
        let answered = answered("qwen-xml", prompt, text);
        (answered.reasoning, answered.content)
    };
    let texts = |reasoning: &str, content: &str| (reasoning.to_owned(), content.to_owned());
    assert_eq!(answered("<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nYes."), texts("Hm.", "Yes."));
    assert_eq!(
        answered("<think>\n\n</think>\n\n", "Yes, <think> is a tag."),
        texts("", "Yes, <think> is a tag.")
    );
    assert_eq!(answered("", "Yes."), texts("", "Yes."));
    assert_eq!(answered("", "</think>\n\nYes."), texts("", "Yes."));
    assert_eq!(answered("<think>\n", "Hm. cut"), texts("Hm. cut", ""));
}

#[test]
fn white_space_within_a_text_is_its_own() {
    let text = "  Yes:\n\n    let a = b;\n ";
    assert_eq!(answered("hermes", "", text).content, text);
}

#[test]
fn only_what_may_become_a_marker_is_held_back() {
    let tools = tools();
    let mut reader = Reader::new(dialect("qwen-xml"), "", Some(&tools), "7");
    let content = |text: &str| vec![Piece::Content(text.into())];
    assert_eq!(reader.push("a < b, <tool"), content("a < b,"));
    assert_eq!(reader.push("s> are good "), content(" <tools> are good"));
    let begin = Piece::ToolCallBegin { index: 0, id: "call_7_0".into(), name: "get_weather".into() };
    assert_eq!(reader.push("<tool_call>\n<function=get_weather>\n"), []);
    assert_eq!(reader.push("<parameter="), [begin]);
    let arguments = |json: &str| vec![Piece::ToolCallArguments { index: 0, json: json.into() }];
    assert_eq!(reader.push("city>\nNew\nYo"), arguments("{\"city\": \"New\\nYo"));
    assert_eq!(reader.push("rk\n</para"), arguments("rk"));
    // A tag within a value is text, unless another follows it.
    assert_eq!(reader.push("meter>\n</fun"), []);
    let end = Piece::ToolCallEnd { index: 0 };
    assert_eq!(reader.push("ction>"), [arguments("\"}"), vec![end]].concat());
    assert_eq!(reader.finish(), []);
}

#[test]
fn an_object_that_is_no_call_is_said_as_it_comes() {
    let tools = tools();
    let mut reader = Reader::new(dialect("llama"), "", Some(&tools), "7");
    assert_eq!(reader.push("{\"title\": "), [Piece::Content("{\"title\":".into())]);
}

#[test]
fn what_is_no_call_is_text() {
    for (name, text) in [
        ("hermes", "<tool_call>\nnot json\n</tool_call>"),
        ("hermes", "<tool_call>{\"name\": 5}</tool_call>"),
        ("hermes", "<tool_call>{\"nom\": \"now\"}</tool_call>"),
        ("qwen-xml", "Write <tool_call> and then <function=> or <function=a\nb>."),
        ("qwen-xml", "<tool_call>\n<function=now>\nno tag\n</function>\n</tool_call>"),
        ("qwen-xml", "<tool_call>\n<function=now>"),
        ("glm", "<tool_call>two words</tool_call>"),
        ("dsml", "<｜DSML｜tool_calls> <｜DSML｜invoke nome=\"now\">"),
        ("deepseek", "<｜tool▁call▁begin｜>now"),
        ("minimax-m2", "<minimax:tool_call>now</minimax:tool_call>"),
        ("minimax-m3", "]<]minimax[>[<tool_call>now]<]minimax[>[</tool_call>"),
        ("kimi", "<|tool_call_begin|>functions.<|tool_call_argument_begin|>{}"),
        ("gemma", "<|tool_call>now{}<tool_call|>"),
        ("mistral", "[TOOL_CALLS] now"),
        ("lfm", "<|tool_call_start|>now<|tool_call_end|>"),
        ("llama", "{\"nom\": \"now\"} and {\"name\": \"now\", \"parameters\": {}}"),
        ("harmony", "Hello <b>"),
    ] {
        let expected = [Piece::Content(text.into())];
        assert_eq!(read(dialect(name), "", true, [text]), expected, "{name}");
        assert_eq!(
            read(dialect(name), "", true, text.split("").filter(|c| !c.is_empty())),
            expected,
            "{name}"
        );
    }
}

#[test]
fn unknown_functions_are_called_too_but_not_while_thinking() {
    let call = "<tool_call>\n{\"name\": \"fly\", \"arguments\": {}}\n</tool_call>";
    assert_eq!(calls(&answered("hermes", "", call)), [("fly", "{}")]);
    let thought = answered("hermes", "<think>", &format!("{call} is no tool.</think>Yes."));
    assert_eq!((thought.reasoning, thought.content), (format!("{call} is no tool."), "Yes.".into()));
    let meant = answered("hermes", "<think>", &format!("Hm. {}", call.replace("fly", "now")));
    assert_eq!((calls(&meant), meant.reasoning.as_str()), (vec![("now", "{}")], "Hm."));
}

#[test]
fn a_text_may_follow_a_call() {
    let answered =
        answered("hermes", "", "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>\n\nDone.");
    assert_eq!((calls(&answered), answered.content.as_str()), (vec![("now", "{}")], "Done."));
}

#[test]
fn slips_of_models_are_read_as_they_are_meant() {
    for (name, text, arguments) in [
        // Double encoding, arguments first, a line's end in a string, a bracket too few.
        ("hermes", r#"<tool_call>{"name": "now", "arguments": "{\"a\": 1}"}</tool_call>"#, r#"{"a": 1}"#),
        ("hermes", r#"<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>"#, r#"{"a":1}"#),
        (
            "hermes",
            "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"x\ny\"}}</tool_call>",
            r#"{"a": "x\ny"}"#,
        ),
        ("hermes", r#"<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call>"#, r#"{"a": 1}"#),
        ("hermes", r#"<tool_call>{"name": "now"}</tool_call>"#, "{}"),
        ("hermes", r#"<tool_call>{"name": "now", "arguments": null}</tool_call>"#, "{}"),
        // No opener, no ends, tags within a value.
        ("qwen-xml", "<function=now>\n<parameter=a>\nx\n</parameter>\n</function>", r#"{"a": "x"}"#),
        ("qwen-xml", "<tool_call>\n<function=now>\n<parameter=a>\nx\n</parameter>", r#"{"a": "x"}"#),
        (
            "qwen-xml",
            "<tool_call>\n<function=now>\n<parameter=a>\n<parameter=b>\n</parameter> x\n</parameter>\n</function>\n</tool_call>",
            r#"{"a": "<parameter=b>\n</parameter> x"}"#,
        ),
        (
            "glm",
            "<tool_call>now<arg_key>a</arg_key><arg_value>[1]</arg_value><arg_key>b</arg_key><arg_value>x</arg_value></tool_call>",
            r#"{"a": [1], "b": "x"}"#,
        ),
        (
            "gemma",
            "<|tool_call>call:now{a:{b:[true,<|\"|>x<|\"|>],c:null},d:word}<tool_call|>",
            r#"{"a": {"b": [true, "x"], "c": null}, "d": "word"}"#,
        ),
        (
            "lfm",
            "<|tool_call_start|>[now(a={'b': [True, None]}, c=\"it's\")]<|tool_call_end|>",
            r#"{"a": {"b": [true, null]}, "c": "it's"}"#,
        ),
        (
            "minimax-m3",
            "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"now\">]<]minimax[>[<a>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</a>]<]minimax[>[</invoke>",
            r#"{"a": [1]}"#,
        ),
        ("harmony", "<|channel|>analysis to=functions.now code<|message|>{\"a\": 1}", r#"{"a": 1}"#),
        ("harmony", "<|channel|>commentary to=now<|message|>{}<|call|>", "{}"),
    ] {
        let answered = answered(name, "", text);
        assert_eq!(calls(&answered), [("now", arguments)], "{name} {text}");
        assert_eq!(answered.content, "", "{name} {text}");
    }
}

#[test]
fn parameters_are_typed_by_their_schema() {
    let text = "<tool_call>\n<function=get_weather>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\nfive\n</parameter>\n\
                <parameter=options>\n{\"a\": [1]}\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n<parameter=other>\n5\n</parameter>\n\
                </function>\n</tool_call>";
    let arguments = r#"{"city": "5", "days": "five", "options": {"a": [1]}, "hourly": true, "other": "5"}"#;
    assert_eq!(calls(&answered("qwen-xml", "", text)), [("get_weather", arguments)]);
}

#[test]
fn a_cut_call_keeps_what_is_there_and_is_not_valid() {
    for (name, text) in [
        ("hermes", "<tool_call>{\"name\": \"get_weather\", \"arguments\": {\"city\": \"/tmp/a"),
        ("qwen-xml", "<tool_call>\n<function=get_weather>\n<parameter=city>\n/tmp/a"),
        ("gemma", "<|tool_call>call:get_weather{city:<|\"|>/tmp/a"),
        ("harmony", "<|channel|>commentary to=functions.get_weather<|message|>{\"city\": \"/tmp/a"),
    ] {
        let answered = answered(name, "", text);
        assert_eq!(calls(&answered), [("get_weather", "{\"city\": \"/tmp/a")], "{name}");
    }
}

#[test]
fn templates_name_their_dialects() {
    for (source, name) in [
        ("{{ '<|channel|>analysis<|message|>' }}", "harmony"),
        ("<tool_call>\n<function=name>", "qwen-xml"),
        ("<tool_call>{\"name\"", "hermes"),
        ("<tool_call>name<arg_key>", "glm"),
        ("{{ message.content }}", "hermes"),
    ] {
        assert_eq!(Dialect::of_template(source).name(), name, "{source}");
    }
    assert!(Dialect::named("latin").is_none());
}

/// What answers are made of, and how they are cut.
fn soup() -> impl Strategy<Value = Vec<String>> {
    let mut words: Vec<String> =
        ["{", "}", "[", "]", "\"", "\\", "\n", " ", "<", "|", ":", ",", "1", "é", "now", "\"name\": \"now\""]
            .map(String::from)
            .to_vec();
    for (_, text) in ANSWERS {
        words.extend(text.split_inclusive(['>', ']', '\n', '}', ' ']).map(String::from));
    }
    words.sort();
    words.dedup();
    prop::collection::vec(prop::sample::select(words), 0..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_split_gives_the_same(parts in soup(), index: prop::sample::Index, with_tools: bool, thinking: bool) {
        let dialects: Vec<Dialect> = Dialect::all().collect();
        let dialect = *index.get(&dialects);
        let prompt = if thinking { "<think>" } else { "" };
        let text = parts.concat();
        let whole = read(dialect, prompt, with_tools, [text.as_str()]);
        prop_assert_eq!(&read(dialect, prompt, with_tools, parts.iter().map(String::as_str)), &whole);
        prop_assert_eq!(&read(dialect, prompt, with_tools, text.split("").filter(|c| !c.is_empty())), &whole);
    }

    #[test]
    fn a_split_answer_is_the_whole_answer(answer in 0..ANSWERS.len(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6), end: prop::sample::Index) {
        let (name, text) = ANSWERS[answer];
        let mut places: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let end = *end.get(&places);
        places.retain(|&place| place <= end);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| *cut.get(&places)).collect();
        cuts.extend([0, end]);
        cuts.sort_unstable();
        let parts = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]);
        prop_assert_eq!(read(dialect(name), "", true, parts), read(dialect(name), "", true, [&text[..end]]));
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), step in 1usize..9) {
        let text = String::from_utf8_lossy(&bytes);
        let parts: Vec<String> = text.chars().collect::<Vec<_>>().chunks(step).map(String::from_iter).collect();
        for dialect in Dialect::all() {
            let pieces = read(dialect, "", true, parts.iter().map(String::as_str));
            prop_assert_eq!(pieces, read(dialect, "", true, [text.as_ref()]));
        }
    }
}
