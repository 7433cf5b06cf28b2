//! Every `freetoken` command that README.md and docs/ show is one that the command line takes.

use std::fs;
use std::iter;
use std::path::{Path, PathBuf};

use clap::Parser;
use freetoken::cli::Cli;

/// How a documented command begins, behind an optional prompt.
const BINARIES: [&str; 2] = ["freetoken ", "cargo run --release -- "];

/// README.md and every Markdown file below docs/, ordered.
fn pages() -> Vec<PathBuf> {
    fn walk(dir: &Path, pages: &mut Vec<PathBuf>) {
        let Ok(entries) = fs::read_dir(dir) else { return };
        for path in entries.map(|entry| entry.expect("a readable entry").path()) {
            if path.is_dir() {
                walk(&path, pages);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                pages.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages = vec![root.join("README.md")];
    walk(&root.join("docs"), &mut pages);
    pages.sort();
    pages
}

/// The arguments of every `freetoken` command in the page's `sh` blocks, each as its line in the page.
fn commands(page: &str) -> Vec<String> {
    let mut commands = Vec::new();
    let mut in_sh = false;
    for line in page.replace("\\\n", " ").lines().map(str::trim) {
        if let Some(language) = line.strip_prefix("```") {
            in_sh = language == "sh";
        } else if in_sh {
            let line = line.strip_prefix("$ ").unwrap_or(line);
            commands.extend(BINARIES.iter().find_map(|binary| line.strip_prefix(binary)).map(str::to_owned));
        }
    }
    commands
}

/// The words that a shell would hand over, up to a comment, a pipe, a redirection or the next command. Knows quotes,
/// and nothing of variables and escapes.
fn words(arguments: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in arguments.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            (None, '#') if word.is_none() => break,
            (None, '|' | '>' | '<' | '&' | ';') => break,
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    assert_eq!(quote, None, "a quote without its end: {arguments}");
    words.extend(word);
    words
}

#[test]
fn documented_commands_are_taken() {
    let mut found = 0;
    let mut refused = Vec::new();
    for path in pages() {
        let page = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for command in commands(&page) {
            found += 1;
            let args = words(&command);
            match Cli::try_parse_from(iter::once("freetoken").chain(args.iter().map(String::as_str))) {
                // `--help` and `--version` are errors to clap, but not to the reader.
                Err(error) if error.use_stderr() => {
                    refused.push(format!("{}: freetoken {command}\n{error}", path.display()));
                }
                _ => {}
            }
        }
    }
    assert!(found > 0, "README.md shows no command");
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

#[test]
fn commands_are_found_in_sh_blocks_only() {
    let page = "freetoken no\n```sh\n$ freetoken run --prompt 'a b' \\\n  --seed 1\ncargo run --release -- devices\nls\n```\n\
                ```text\nfreetoken no\n```\n";
    let words: Vec<_> = commands(page).iter().map(|command| words(command)).collect();
    assert_eq!(words, [vec!["run", "--prompt", "a b", "--seed", "1"], vec!["devices"]]);
}

#[test]
fn words_end_where_the_command_ends() {
    assert_eq!(words("eval --text \"a # 'b'\" '' x  # comment"), ["eval", "--text", "a # 'b'", "", "x"]);
    assert_eq!(words("run a | jq ."), ["run", "a"]);
    assert_eq!(words("serve &"), ["serve"]);
    assert_eq!(words("inspect a>b; ls"), ["inspect", "a"]);
}
