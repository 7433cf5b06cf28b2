//! `freetoken run`: one answer to a prompt, or a conversation on a terminal. Standard output carries answers alone.

mod chat;
mod conversation;
mod generate;
mod interrupt;
mod sampling;

use std::io::{self, IsTerminal, Read};

use anyhow::{Context, Result, ensure};
use clap::Args;

pub(super) use self::conversation::Conversation;
use self::{
    generate::{Generator, Reply},
    sampling::SamplingArgs,
};
use super::{
    memory,
    model::ModelArgs,
    terminal::{note, print, print_line, whisper},
};
use crate::chat::{reader::Piece, stop::StopStrings};

/// More than a context holds: a pipe that does not end is refused before it eats the memory.
const MAX_PROMPT_BYTES: u64 = 256 << 20;

/// Answer a prompt, or chat.
///
/// Without --prompt, standard input is the prompt where it is a pipe or a file, and a conversation where it is a terminal.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  freetoken run\n  freetoken run --prompt \"What is the capital of France?\" --temperature 0\n  \
                  freetoken run --model DIR --json < question.txt"
)]
pub(super) struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The prompt.
    #[arg(long, short, value_name = "TEXT")]
    prompt: Option<String>,
    /// What the model is told before the conversation.
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Continue the text as it is, without the model's chat template.
    #[arg(long)]
    raw: bool,
    /// Tokens of an answer [default: the model's own limit, or what the context holds].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// End an answer before this text; may be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Print one JSON object: text, reasoning, finish_reason, token counts and speeds.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
}

pub(super) fn run(args: RunArgs) -> Result<()> {
    let prompt = args.prompt()?;
    let stop = StopStrings::new(args.stop.clone()).context("--stop")?;
    let files = args.model.files()?;
    let params = args.sampling.params(files.generation().defaults())?;
    let mut conversation = Conversation::new(&files, args.system.as_deref(), args.raw)?;
    let tokens = prompt.map(|prompt| {
        conversation.ask(&prompt);
        conversation.tokens(0)
    });
    let tokens = tokens.transpose()?;
    let max_tokens = args.max_tokens.or(files.generation().max_new_tokens).map_or(usize::MAX, |n| n as usize);
    let engine = args.model.engine(&files, 1)?;
    let mut generator = Generator::new(&files, engine, params, stop, conversation.dialect(), max_tokens)?;
    let Some(tokens) = tokens else {
        let fresh_params = || args.sampling.params(files.generation().defaults());
        return chat::run(&files.name(), &mut conversation, &mut generator, &fresh_params);
    };
    generator.check_fits(tokens.len())?;
    answer(&mut generator, &tokens, args.json)
}

fn answer(generator: &mut Generator<'_>, tokens: &[u32], json: bool) -> Result<()> {
    let reply = if json {
        let reply = generator.answer(tokens, &mut |_| Ok(()))?;
        let mut json = reply.json();
        json["experts"] = memory::summary_json(generator.engine());
        print_line(&json.to_string())?;
        reply
    } else {
        stream(generator, tokens)?
    };
    note(&reply.stats(generator.params()));
    memory::summary(generator.engine()).iter().for_each(|line| note(line));
    Ok(())
}

/// Prints an answer as it is made, and the end of its last line. What the model thinks is shown beside it, on a terminal.
fn stream(generator: &mut Generator<'_>, tokens: &[u32]) -> Result<Reply> {
    let mut thinking = false;
    let reply = generator.answer(tokens, &mut |piece| match piece {
        Piece::Reasoning(text) => {
            thinking = true;
            whisper(text);
            Ok(())
        }
        Piece::Content(text) => {
            if std::mem::take(&mut thinking) {
                whisper("\n\n");
            }
            print(text)
        }
        // No tools are offered.
        Piece::ToolCallBegin { .. } | Piece::ToolCallArguments { .. } | Piece::ToolCallEnd { .. } => Ok(()),
    })?;
    if thinking {
        whisper("\n");
    }
    if !reply.text.ends_with('\n') {
        print("\n")?;
    }
    Ok(reply)
}

impl RunArgs {
    /// The prompt; `None` asks for a conversation on the terminal. Line ends behind a piped text are no part of it, since
    /// `echo` adds one, but with `--raw` every byte counts.
    fn prompt(&self) -> Result<Option<String>> {
        let text = match &self.prompt {
            Some(text) => text.clone(),
            None if io::stdin().is_terminal() => {
                ensure!(!self.json, "--json answers one prompt: give it with --prompt TEXT, or pipe it in");
                return Ok(None);
            }
            None => {
                let mut text = piped()?;
                if !self.raw {
                    text.truncate(text.trim_end_matches(['\r', '\n']).len());
                }
                text
            }
        };
        ensure!(
            !text.is_empty(),
            "the prompt is empty: give --prompt TEXT, pipe a text in, or run this on a terminal to chat"
        );
        Ok(Some(text))
    }
}

fn piped() -> Result<String> {
    let mut bytes = Vec::new();
    let n = io::stdin()
        .lock()
        .take(MAX_PROMPT_BYTES + 1)
        .read_to_end(&mut bytes)
        .context("cannot read standard input")?;
    ensure!(
        n as u64 <= MAX_PROMPT_BYTES,
        "standard input has more than {} MiB, which no context holds: pipe in less",
        MAX_PROMPT_BYTES >> 20
    );
    String::from_utf8(bytes).ok().context("standard input is not UTF-8 text: convert it")
}
