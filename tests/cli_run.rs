//! `freetoken run`, as a user starts it.

use std::{
    ffi::{OsStr, OsString},
    io::Write,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo");
const FRANCE: &str = "What is the capital of France?";
const STORY: &str = "Tell me a story about a fox named Rusty who lost a red kite.";

fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_freetoken"));
    command.args(["run", "--threads", "2"]);
    // What a start measures is kept for the next one.
    command.env("FREETOKEN_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/home"));
    let mut args: Vec<OsString> = args.into_iter().map(|arg| arg.as_ref().to_owned()).collect();
    // A GPU of this machine may be slow or busy, and what is said of it is not what is tested here.
    if !args.iter().any(|arg| arg == "--backend") {
        args.extend(["--backend", "cpu"].map(OsString::from));
    }
    command.args(args);
    command
}

fn demo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    let model = ["--model", DEMO].map(OsString::from);
    let args = args.into_iter().map(|arg| arg.as_ref().to_owned());
    run(model.into_iter().chain(args)).output().expect("the binary starts")
}

fn piped(input: &[u8], args: &[&str]) -> Output {
    let mut command = run(["--model", DEMO].iter().chain(args));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    child.stdin.take().expect("a pipe").write_all(input).expect("the input is read");
    child.wait_with_output().expect("the binary ends")
}

fn stdout(output: &Output) -> &str {
    assert!(output.status.success(), "{}", stderr(output));
    std::str::from_utf8(&output.stdout).expect("answers are UTF-8")
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("messages are UTF-8")
}

/// The one object that `--json` prints.
fn json<'a>(args: impl IntoIterator<Item = &'a str>) -> Value {
    let output = demo(args.into_iter().chain(["--json"]));
    serde_json::from_str(stdout(&output)).expect("one JSON object")
}

/// Asserts that a run ends with `code` and one line that says why.
fn refused(output: &Output, code: i32, reasons: &[&str]) {
    let message = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(output.stdout.is_empty());
    assert!(reasons.iter().all(|reason| message.contains(reason)), "{reasons:?} in: {message}");
    assert!(message.starts_with("error: "), "{message}");
    if code == 1 {
        assert_eq!(message.trim_end().lines().count(), 1, "{message}");
    }
}

#[test]
fn a_greedy_answer_is_right_and_repeats() {
    let outputs = [(); 2].map(|()| demo(["--prompt", FRANCE, "--temperature", "0"]));
    assert_eq!(stdout(&outputs[0]), "The capital of France is Paris.\n");
    assert_eq!(stdout(&outputs[0]), stdout(&outputs[1]));
    let stats = stderr(&outputs[0]);
    assert!(stats.contains("prefill") && stats.contains("decode") && !stats.contains("seed"), "{stats}");
}

#[test]
fn experts_behind_a_cache_give_the_same_answer_and_say_what_was_done() {
    let resident = json(["--prompt", STORY, "--temperature", "0", "--max-tokens", "40"]);
    assert!(resident["experts"].is_null(), "{resident}");
    for cache in ["25%", "2slots", "3MiB"] {
        let reply =
            json(["--prompt", STORY, "--temperature", "0", "--max-tokens", "40", "--expert-cache", cache]);
        assert_eq!(reply["text"], resident["text"], "{cache}");
        let experts = &reply["experts"];
        let count = |name: &str| experts[name].as_u64().unwrap_or_else(|| panic!("{name} in {experts}"));
        assert!(
            count("slots") < count("experts") && count("bank_bytes") > count("device_bytes"),
            "{experts}"
        );
        assert!(count("in_place") + count("fetched") > 0, "{experts}");
    }
    let output = demo(["--prompt", FRANCE, "--temperature", "0", "--expert-cache", "25%"]);
    assert_eq!(stdout(&output), "The capital of France is Paris.\n");
    let said = stderr(&output);
    assert!(said.contains("experts: 48 of 192 in slots") && said.contains("% hits in decode"), "{said}");
}

#[test]
fn a_division_that_cannot_be_is_refused() {
    let asked = |args: &[&str]| demo(["--prompt", FRANCE].iter().chain(args));
    refused(&asked(&["--expert-cache", "200%"]), 2, &["200%", "96slots"]);
    refused(&asked(&["--vram", "6 apples"]), 2, &["6 apples", "6GiB"]);
    refused(&asked(&["--vram", "6GiB"]), 1, &["--vram", "--backend"]);
    refused(&asked(&["--experts", "hybrid"]), 1, &["--experts", "--backend"]);
}

#[test]
fn json_has_every_field() {
    let reply = json(["--prompt", FRANCE, "--temperature", "0"]);
    assert_eq!(reply["text"], "The capital of France is Paris.");
    assert_eq!(reply["finish_reason"], "stop");
    assert_eq!((&reply["prompt_tokens"], &reply["completion_tokens"]), (&15.into(), &8.into()));
    for speed in ["ttft_seconds", "prefill_tokens_per_second", "decode_tokens_per_second"] {
        assert!(reply[speed].as_f64().is_some_and(|speed| speed > 0.0), "{speed}: {reply}");
    }
    assert_eq!(reply["reasoning"], Value::Null);
    assert_eq!(reply.as_object().map(|fields| fields.len()), Some(9));
}

#[test]
fn what_is_thought_is_no_part_of_the_answer() {
    let dir = tempfile::tempdir().expect("a folder");
    for file in std::fs::read_dir(DEMO).expect("the demo model is there") {
        let file = file.expect("is listed");
        std::fs::copy(file.path(), dir.path().join(file.file_name())).expect("is copied");
    }
    let chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n";
    for (tail, thought) in [("{% if false %}<think>{% endif %}", false), ("{{ '<think>' }}", true)] {
        std::fs::write(dir.path().join("chat_template.jinja"), format!("{chatml}{tail}"))
            .expect("is written");
        let args =
            ["--prompt", FRANCE, "--temperature", "0", "--max-tokens", "9", "--json"].map(OsString::from);
        let model = [OsString::from("--model"), dir.path().into()];
        let output = run(model.into_iter().chain(args)).output().expect("the binary starts");
        let reply: Value = serde_json::from_str(stdout(&output)).expect("JSON");
        assert_eq!(reply["text"] == "", thought, "{reply}");
        assert_eq!(reply["reasoning"].is_string(), thought, "{reply}");
    }
}

#[test]
fn standard_input_is_the_prompt() {
    for input in [FRANCE, "What is the capital of France?\n", "What is the capital of France?\r\n"] {
        let output = piped(input.as_bytes(), &["--temperature", "0"]);
        assert_eq!(stdout(&output), "The capital of France is Paris.\n");
    }
}

#[test]
fn a_text_goes_on_with_raw() {
    let output = demo([
        "--raw",
        "--prompt",
        "Once upon a time, there was a",
        "--temperature",
        "0",
        "--max-tokens",
        "12",
    ]);
    assert_eq!(stdout(&output), " kind girl named Rose. Rose had just moved to a new\n");
}

#[test]
fn a_stop_string_ends_the_answer_before_it() {
    let reply = json(["--prompt", FRANCE, "--temperature", "0", "--stop", "nowhere", "--stop", " is Par"]);
    assert_eq!((&reply["text"], &reply["finish_reason"]), (&"The capital of France".into(), &"stop".into()));
}

#[test]
fn max_tokens_and_the_context_bound_the_answer() {
    let reply = json(["--prompt", STORY, "--temperature", "0", "--max-tokens", "5"]);
    assert_eq!((&reply["finish_reason"], &reply["completion_tokens"]), (&"length".into(), &5.into()));
    let reply = json(["--prompt", STORY, "--temperature", "0", "--context", "40"]);
    assert_eq!((&reply["finish_reason"], &reply["completion_tokens"]), (&"length".into(), &17.into()));
    let one = json(["--prompt", STORY, "--temperature", "0", "--max-tokens", "1"]);
    assert_eq!((&one["completion_tokens"], &one["decode_tokens_per_second"]), (&1.into(), &Value::Null));
}

#[test]
fn a_seed_repeats_an_answer() {
    let story = |seed: &str| {
        let args = ["--prompt", STORY, "--temperature", "1", "--max-tokens", "40", "--seed", seed];
        let output = demo(args);
        assert!(stderr(&output).contains(&format!("seed {seed}")), "{}", stderr(&output));
        stdout(&output).to_owned()
    };
    assert_eq!(story("7"), story("7"));
    assert_ne!(story("7"), story("8"));
}

#[test]
fn penalties_change_the_answer() {
    let args = ["--prompt", STORY, "--temperature", "0", "--max-tokens", "40"];
    let plain = stdout(&demo(args)).to_owned();
    for penalty in ["--repeat-penalty=1.5", "--presence-penalty=2", "--frequency-penalty=2"] {
        assert_ne!(stdout(&demo(args.into_iter().chain([penalty]))), plain, "{penalty}");
    }
}

#[test]
fn a_system_message_is_seen() {
    let with = json(["--prompt", FRANCE, "--system", "Be kind.", "--max-tokens", "1"]);
    let without = json(["--prompt", FRANCE, "--max-tokens", "1"]);
    assert!(with["prompt_tokens"].as_u64() > without["prompt_tokens"].as_u64());
    refused(&demo(["--prompt", FRANCE, "--system", "Be kind.", "--raw"]), 2, &["--system", "--raw"]);
}

#[test]
fn what_cannot_be_answered_is_refused() {
    refused(&demo(["--prompt", ""]), 1, &["the prompt is empty", "--prompt TEXT"]);
    refused(&piped(b"", &[]), 1, &["the prompt is empty"]);
    refused(&piped(b"\n", &[]), 1, &["the prompt is empty"]);
    refused(&piped(b"caf\xe9", &[]), 1, &["not UTF-8"]);
    let long = "all work and no play ".repeat(40);
    refused(&demo(["--prompt", &long, "--context", "32"]), 1, &["tokens and the context holds 32"]);
}

#[test]
fn flags_out_of_range_are_refused_by_name() {
    for (flag, value, reason) in [
        ("--top-p", "0", "--top-p is 0, but must be above 0"),
        ("--top-p", "1.5", "--top-p is 1.5"),
        ("--temperature", "nan", "--temperature is NaN"),
        ("--temperature", "-1", "--temperature is -1"),
        ("--min-p", "2", "--min-p is 2"),
        ("--repeat-penalty", "0", "--repeat-penalty is 0"),
        ("--presence-penalty", "-3", "--presence-penalty is -3"),
        ("--frequency-penalty", "inf", "--frequency-penalty is inf"),
        ("--stop", "", "--stop: stop string 0 is empty"),
    ] {
        refused(&demo(["--prompt", FRANCE, flag, value]), 1, &[reason]);
    }
    for (flag, value) in
        [("--backend", "abacus"), ("--max-tokens", "0"), ("--top-k", "-1"), ("--context", "0")]
    {
        refused(&demo(["--prompt", FRANCE, flag, value]), 2, &[flag, value]);
    }
}

#[test]
fn a_model_that_is_not_there_is_refused() {
    let here = std::env::temp_dir().join("no-such-folder").join("model");
    for model in [here.as_os_str(), OsStr::new("no-such-model")] {
        let output = run([OsStr::new("--prompt"), OsStr::new("hi"), OsStr::new("--model"), model]).output();
        refused(&output.expect("the binary starts"), 1, &["no-such-"]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_one_sentence_and_a_reader_that_left_is_none() {
    for json in [&[][..], &["--json"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("Linux has one");
        let mut command = run(["--model", DEMO, "--prompt", FRANCE]);
        let output = command.args(json).stdout(full).output().expect("the binary starts");
        refused(&output, 1, &["cannot write the output"]);

        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = run(["--model", DEMO, "--prompt", FRANCE]);
        let output = command.args(json).stdout(writer).output().expect("the binary starts");
        assert_eq!((output.status.code(), stderr(&output)), (Some(0), ""));
    }
}
