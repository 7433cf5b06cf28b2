//! `trace`, and `bench cache`, which replays what it wrote.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use freetoken::moe::Trace;
use serde_json::{Value, json};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo");
const FRANCE: &str = "What is the capital of France?";
/// Tokens of that question in the chat template of the demo model, and of the answer without its end.
const N_FRANCE: usize = 15 + 7;

fn freetoken(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_freetoken")).current_dir(dir).args(args).output().unwrap()
}

fn trace(dir: &Path, args: &[&str]) -> Output {
    let cpu = ["trace", "--backend", "cpu", "--threads", "2"];
    freetoken(dir, &[&cpu[..], args].concat())
}

/// What a command that succeeds prints.
fn stdout(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Asserts that a command ends with this code and says why.
fn refused(output: Output, code: i32, reason: &str) {
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(output.stdout.is_empty() && message.starts_with("error: "), "{message}");
    assert!(message.contains(reason), "{reason} in: {message}");
}

fn replay(dir: &Path, args: &[&str]) -> Value {
    let json = stdout(freetoken(dir, &[&["bench", "cache", "--json"], args].concat()));
    serde_json::from_str(&json).unwrap()
}

fn column(table: &Value, key: &str) -> Vec<f64> {
    table["rows"].as_array().unwrap().iter().map(|row| row[key].as_f64().unwrap()).collect()
}

#[test]
fn an_answer_is_traced_and_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let line = stdout(trace(dir, &["--model", DEMO, "--prompt", FRANCE, "--out", "routes.trace"]));
    assert!(line.starts_with("routes.trace: 22 steps of 6 layers, top 4, "), "{line}");
    let routes = Trace::read(&dir.join("routes.trace")).unwrap();
    assert_eq!((routes.n_steps(), routes.routing().n_experts), (N_FRANCE, 32));
    for step in 0..N_FRANCE {
        assert_eq!(routes.n_rows(step), 1);
        for layer in 0..6 {
            let mut row = routes.ids(step, layer).to_vec();
            row.sort_unstable();
            row.dedup();
            assert!(row.len() == 4 && row[0] >= 0, "four experts: {row:?}");
        }
    }

    let table = replay(dir, &["routes.trace", "--cache", "100,0,50"]);
    assert_eq!((&table["steps"], &table["warm_up_steps"]), (&json!(22), &json!(5)));
    assert_eq!(column(&table, "slots"), [0.0, 96.0, 192.0]);
    let best = column(&table, "belady");
    assert!(best[0] == 0.0 && best[1] > 0.0 && best[2] >= best[1], "{table}");
    for policy in ["lru", "lfu_8", "lfu_32"] {
        let hits = column(&table, policy);
        assert!(hits.iter().zip(&best).all(|(hits, best)| hits <= best), "{policy}: {table}");
        assert_eq!(hits[2], best[2], "with a slot for each expert, no policy has a choice");
    }
}

#[test]
fn a_text_is_traced_token_by_token() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let text = "Once upon a time, there was a kind girl named Rose.";
    fs::write(dir.join("story.txt"), text).unwrap();
    let of_text = |context: &str, out: &str| {
        let args = ["--model", DEMO, "--text", "story.txt", "--context", context, "--out", out];
        stdout(trace(dir, &args));
        Trace::read(&dir.join(out)).unwrap()
    };
    let whole = of_text("64", "whole.trace");
    let windows = of_text("8", "windows.trace");
    assert_eq!(whole.n_steps(), windows.n_steps());
    assert!((10..30).contains(&whole.n_steps()), "{}", whole.n_steps());
    let same = |step| (0..6).all(|layer| whole.ids(step, layer) == windows.ids(step, layer));
    assert!((0..8).all(same), "the first window is the beginning of the text");
    assert!(!(8..whole.n_steps()).all(same), "the next one has forgotten it");

    let raw = ["--model", DEMO, "--raw", "--prompt", text, "--max-tokens", "3", "--out", "raw.trace"];
    stdout(trace(dir, &raw));
    let raw = Trace::read(&dir.join("raw.trace")).unwrap();
    assert_eq!(raw.n_steps(), whole.n_steps() + 3);
    let begins_alike = |step| (0..6).all(|layer| raw.ids(step, layer) == whole.ids(step, layer));
    assert!((0..whole.n_steps()).all(begins_alike));
}

#[test]
fn a_full_cache_always_hits_and_a_split_beats_either_side() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let table = replay(dir, &["uniform", "--cache", "25,100", "--csv", "rows.csv"]);
    for hits in ["lru", "lfu_8", "lfu_32", "belady"] {
        let hits = column(&table, hits);
        assert!((0.2..0.7).contains(&hits[0]) && hits[1] == 1.0, "{table}");
    }
    let [fetch, cpu, q_star] =
        ["fetch_per_second", "cpu_per_second", "q_star_per_second"].map(|key| column(&table, key));
    assert!(q_star[0] > 1.1 * fetch[0].max(cpu[0]), "{table}");
    assert_eq!((q_star[1], cpu[1]), (fetch[1], fetch[1]), "without misses there is nothing to split");
    assert_eq!(fs::read_to_string(dir.join("rows.csv")).unwrap().lines().count(), 3);
}

#[test]
fn rates_of_another_machine_decide() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut rates = replay(dir, &["zipf:1.0", "--cache", "25"])["rates"].clone();
    let at = |file: &str| replay(dir, &["zipf:1.0", "--cache", "25", "--rates", file]);
    for key in ["link_alone", "link_shared"] {
        rates[key] = (rates[key].as_f64().unwrap() / 10.0).into();
    }
    fs::write(dir.join("slow.json"), rates.to_string()).unwrap();
    let slow = at("slow.json");
    assert!(column(&slow, "cpu_per_second") > column(&slow, "fetch_per_second"), "{slow}");
    rates["host_alone"] = 1.0.into();
    fs::write(dir.join("alone.json"), rates.to_string()).unwrap();
    rates["host_alone"] = 0.into();
    fs::write(dir.join("none.json"), rates.to_string()).unwrap();
    fs::write(dir.join("other.json"), "{}").unwrap();
    let with = |rates| freetoken(dir, &["bench", "cache", "uniform", "--rates", rates]);
    refused(with("none.json"), 1, "none.json has a rate that is not above zero");
    refused(with("alone.json"), 1, "alone.json was measured without the CPU's experts");
    refused(with("other.json"), 1, "other.json does not hold rates");
    refused(with("nowhere.json"), 1, "cannot read nowhere.json");
}

/// Whether every element of a text is closed in order, and there is one around all others.
fn is_one_element(xml: &str) -> bool {
    let mut open = Vec::new();
    let mut n_roots = 0;
    for tag in xml.split('<').skip(1).map(|part| part.split_once('>').unwrap().0) {
        let name = tag.split_whitespace().next().unwrap();
        assert!(tag.matches('"').count() % 2 == 0, "{tag}");
        n_roots += usize::from(open.is_empty());
        match name.strip_prefix('/') {
            Some(name) if open.pop() != Some(name) => return false,
            None if !tag.ends_with('/') => open.push(name),
            _ => {}
        }
    }
    open.is_empty() && n_roots == 1
}

#[test]
fn the_picture_is_xml_that_names_the_policies() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    stdout(freetoken(dir, &["bench", "cache", "drift:1.0", "--cache", "10,50", "--plot", "hits.svg"]));
    let svg = fs::read_to_string(dir.join("hits.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && is_one_element(&svg), "{svg}");
    for name in ["LRU", "LFU, half-life 8", "LFU, half-life 32", "bound (Belady)"] {
        assert!(svg.contains(&format!(">{name}<")), "{name}: {svg}");
    }
    assert_eq!(svg.matches("<circle ").count(), 2 * 4);
}

#[test]
fn what_cannot_be_traced_or_replayed_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("text.trace"), "not a trace").unwrap();
    stdout(trace(dir, &["--model", DEMO, "--prompt", FRANCE, "--out", "whole.trace"]));
    let whole = fs::read(dir.join("whole.trace")).unwrap();
    fs::write(dir.join("cut.trace"), &whole[..whole.len() - 1]).unwrap();
    fs::write(dir.join("no_steps.trace"), &whole[..whole.len() - N_FRANCE * (4 + 6 * 4 * 2)]).unwrap();
    let bench = |args: &[&str]| freetoken(dir, &[&["bench", "cache"], args].concat());
    for (source, reason) in [
        ("text.trace", "text.trace is not a routing trace"),
        ("cut.trace", "cut.trace ends inside of step 21"),
        ("no_steps.trace", "no_steps.trace has no steps"),
        ("nowhere.trace", "nowhere.trace does not exist"),
    ] {
        refused(bench(&[source]), 1, reason);
    }
    refused(bench(&["zipf:9"]), 2, "S is from 0 to 4, as in zipf:1.0");
    refused(bench(&["uniform", "--cache", "101"]), 2, "a share is from 0 to 100");
    refused(bench(&["--cache", "50"]), 2, "<FILE|LAW>");

    let demo = ["--model", DEMO, "--out", "new.trace"];
    let demo = |args: &[&str]| trace(dir, &[&demo[..], args].concat());
    refused(demo(&["--prompt", FRANCE, "--context", "8"]), 1, "tokens and the context holds 8");
    fs::write(dir.join("latin.txt"), b"caf\xe9").unwrap();
    refused(demo(&["--text", "latin.txt"]), 1, "latin.txt is not UTF-8 text");
    refused(demo(&[]), 2, "--prompt");
    let config = fs::read_to_string(Path::new(DEMO).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["model_type"] = "qwen3".into();
    config["architectures"] = json!(["Qwen3ForCausalLM"]);
    fs::write(dir.join("dense.json"), config.to_string()).unwrap();
    stdout(freetoken(dir, &["synth", "dense", "--config", "dense.json", "--tokenizer", DEMO]));
    let dense = ["--model", "dense", "--prompt", FRANCE, "--out", "new.trace"];
    refused(trace(dir, &dense), 1, "dense is a dense model, which routes nothing");
    assert!(!dir.join("new.trace").exists());
}
