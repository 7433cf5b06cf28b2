//! Every chat template of a conformance folder against what Hugging Face `transformers` renders, byte for byte.
//!
//! `FREETOKEN_TEMPLATES` names the folder: `cases.json` and the templates that it speaks of.

use freetoken::chat::template::{ChatTemplate, Prompt, TemplateError};
use serde_json::{Map, Value, json};
use std::{env, fs, path::Path};

/// Cases in the reference folder; fewer mean that the folder is not whole.
const N_CASES: usize = 410;

/// How a case ended that agrees with the reference.
#[derive(Clone, Copy, PartialEq)]
enum Agreement {
    Exact,
    ExpectedError,
    /// The reference is a list or dict in Python's notation, nothing a model was trained on.
    PythonRepr,
}

fn render(folder: &Path, case: &Value) -> Result<String, TemplateError> {
    let file = case["template"].as_str().expect("a case names its template");
    let source = fs::read_to_string(folder.join(file)).expect("the template of a case is in the folder");
    let mut kwargs = case["kwargs"].as_object().expect("kwargs is an object").clone();
    let add_generation_prompt = kwargs.shift_remove("add_generation_prompt").expect("always given") == true;
    ChatTemplate::new(&source, case["bos_token"].as_str(), case["eos_token"].as_str())?.render(&Prompt {
        messages: case["messages"].as_array().expect("messages is a list"),
        tools: case["tools"].as_array().map(Vec::as_slice),
        add_generation_prompt,
        kwargs: &kwargs,
        now: case["now"].as_str().expect("now is a text").parse().expect("now is ISO 8601"),
    })
}

/// Compares one case; the error says what differs.
fn check(folder: &Path, case: &Value) -> Result<Agreement, String> {
    let rendered = render(folder, case);
    let expected = case["output"].as_str();
    match (rendered, case["error_kind"].as_str()) {
        (Ok(text), _) if Some(text.as_str()) == expected => Ok(Agreement::Exact),
        (Ok(text), _) if Some(text.as_str()) == case["output_mutable"].as_str() => Ok(Agreement::Exact),
        (_, None) if case["python_repr"] == true => Ok(Agreement::PythonRepr),
        (Err(TemplateError::Raised { message }), Some("raised")) if case["error"] == message => {
            Ok(Agreement::ExpectedError)
        }
        (Err(_), Some("engine")) => Ok(Agreement::ExpectedError),
        (Ok(text), _) => {
            Err(format!("got      {text:?}\nexpected {:?}", expected.or(case["error"].as_str())))
        }
        (Err(error), _) => {
            Err(format!("got the error {error}\nexpected {:?}", expected.or(case["error"].as_str())))
        }
    }
}

#[test]
fn renders_as_transformers_does() {
    let Some(folder) = env::var_os("FREETOKEN_TEMPLATES") else {
        eprintln!("SKIPPED: FREETOKEN_TEMPLATES is not set; no chat template was compared with transformers");
        return;
    };
    let folder = Path::new(&folder);
    let text = fs::read_to_string(folder.join("cases.json")).expect("FREETOKEN_TEMPLATES holds cases.json");
    let cases: Vec<Value> = serde_json::from_str(&text).expect("cases.json is a list of cases");
    assert_eq!(cases.len(), N_CASES, "cases.json is not the whole reference");

    let mut agreements = Vec::new();
    let mut differences = Vec::new();
    for case in &cases {
        match check(folder, case) {
            Ok(agreement) => agreements.push(agreement),
            Err(difference) => {
                differences.push(format!("{} {}\n{difference}", case["template"], case["case"]))
            }
        }
    }
    let count = |kind| agreements.iter().filter(|&&agreement| agreement == kind).count();
    eprintln!(
        "{N_CASES} cases: {} exact, {} expected errors, {} Python repr not compared, {} different",
        count(Agreement::Exact),
        count(Agreement::ExpectedError),
        count(Agreement::PythonRepr),
        differences.len()
    );
    assert!(differences.is_empty(), "{}", differences.join("\n\n"));
}

/// What Qwen, SmolLM and many more use.
const CHATML: &str = "\
{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}";

/// Renders `source` on one user message.
fn render_source(source: &str, add_generation_prompt: bool) -> Result<String, TemplateError> {
    ChatTemplate::new(source, Some("<s>"), None)?.render(&Prompt {
        messages: &[json!({"role": "user", "content": "Hi"})],
        tools: None,
        add_generation_prompt,
        kwargs: &Map::new(),
        now: "2026-01-05T12:34:56".parse().expect("ISO 8601"),
    })
}

/// What the engine says of a template that must not end well.
fn engine_error(source: &str) -> String {
    match render_source(source, true) {
        Err(TemplateError::Engine { message }) => message,
        other => panic!("{:.80} gave {other:?}", source),
    }
}

#[test]
fn chatml_with_and_without_generation_prompt() {
    let user = "<|im_start|>user\nHi<|im_end|>\n";
    assert_eq!(render_source(CHATML, false).unwrap(), user);
    assert_eq!(render_source(CHATML, true).unwrap(), format!("{user}<|im_start|>assistant\n"));
}

#[test]
fn templates_see_tokens_and_the_clock() {
    let source = "{{ bos_token }}{{ eos_token is defined }} {{ strftime_now('%d %b %Y') }}";
    assert_eq!(render_source(source, true).unwrap(), "<s>False 05 Jan 2026");
}

#[test]
fn generation_blocks_keep_their_variables_to_themselves() {
    let source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}";
    assert_eq!(render_source(source, true).unwrap(), "21");
}

#[test]
fn raise_exception_gives_the_words_of_the_template() {
    let source =
        "{% macro refuse() %}{{ raise_exception('Roles must alternate: ' ~ 1) }}{% endmacro %}{{ refuse() }}";
    match render_source(source, true) {
        Err(TemplateError::Raised { message }) => assert_eq!(message, "Roles must alternate: 1"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_syntax_error_names_its_line() {
    let error = render_source("one\ntwo\n{% if %}", true).unwrap_err();
    assert!(matches!(error, TemplateError::Syntax { line: 3, .. }), "{error:?}");
    assert!(error.to_string().contains("line 3"), "{error}");
}

#[test]
fn endless_work_runs_out_of_fuel() {
    let loops = "{% for i in range(99999) %}".repeat(3) + "x" + &"{% endfor %}".repeat(3);
    assert!(engine_error(&loops).contains("fuel"));
    assert!(engine_error("{% for i in range(10 ** 12) %}{% endfor %}").contains("range"));
    assert_eq!(render_source("{{ 'abc'.count('') }}", true).unwrap(), "4");
}

#[test]
fn recursion_ends() {
    assert!(engine_error("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").contains("recursion"));
    let nest = "{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}";
    assert!(engine_error(&format!("{nest}{{{{ ns.x }}}}")).contains("deeper"));
    assert!(engine_error(&format!("{nest}{{{{ ns.x|tojson }}}}")).contains("deeper"));
    assert_eq!(render_source(nest, true).unwrap(), "");
    assert_eq!(render_source(&format!("{{{{ {}1 }}}}", "-".repeat(60_000)), true).unwrap(), "1");
}

#[test]
fn output_and_source_are_bounded() {
    assert!(engine_error("{{ 'x' * 99999999 }}").contains("bytes"));
    assert!(engine_error("{{ ('x' * 99999999)|tojson|length }}").contains("bytes"));
    let double = "{% set ns = namespace(x=['x' * 99999]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
    assert!(engine_error(&format!("{double}{{{{ ns.x|string }}}}")).contains("bytes"));
    assert!(engine_error(&"x".repeat(1 << 20)).contains("bytes"));
}
