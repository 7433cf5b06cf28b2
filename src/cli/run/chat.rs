//! A conversation on a terminal. Lines are edited and remembered while it lasts; nothing is written to a file.

use anyhow::{Context, Result};
use rustyline::{Behavior, Config, DefaultEditor, error::ReadlineError};

use super::{conversation::Conversation, generate::Generator, note, stream};
use crate::{chat::answer::FinishReason, cli::sentence, engine::sampling::SamplingParams};

const HELP: &str = "\
/clear   forget what was said
/help    this list
/quit    end, as Ctrl-D does
Ctrl-C stops an answer; arrow keys bring back and edit what was typed.";

/// One part in so many of the context is kept free for an answer, as far as the oldest turns can make room for it.
const ANSWER_SHARE: usize = 4;

/// Talks until the user ends it. `fresh_params` says how the next conversation draws its tokens.
pub(super) fn run(
    model: &str,
    conversation: &mut Conversation<'_>,
    generator: &mut Generator<'_>,
    fresh_params: &dyn Fn() -> Result<SamplingParams>,
) -> Result<()> {
    let config = Config::builder().auto_add_history(true).behavior(Behavior::PreferTerm).build();
    let mut editor =
        DefaultEditor::with_config(config).context("this terminal cannot be used: give --prompt TEXT")?;
    note(&format!("{model}: /help lists the commands, Ctrl-D ends"));
    if !conversation.has_template() {
        note("each text is continued on its own, without a chat template");
    }
    loop {
        let line = match editor.readline("> ") {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => {
                note("Ctrl-D or /quit ends");
                continue;
            }
            Err(ReadlineError::Eof) => return Ok(()),
            Err(error) => return Err(error).context("cannot read from the terminal"),
        };
        match line.trim() {
            "" => {}
            "/help" => note(HELP),
            "/quit" => return Ok(()),
            "/clear" => {
                conversation.clear();
                generator.restart(fresh_params()?);
                note("what was said is forgotten");
            }
            word if is_command(word) => note(&format!("there is no command {word}: /help lists them")),
            _ => turn(&line, conversation, generator)?,
        }
    }
}

/// Whether a line is meant for this file: a path, say, is not.
fn is_command(line: &str) -> bool {
    line.strip_prefix('/').is_some_and(|word| word.chars().all(char::is_alphabetic))
}

/// One question and its answer. What the model cannot be asked is said and taken back; an error ends the conversation.
fn turn(text: &str, conversation: &mut Conversation<'_>, generator: &mut Generator<'_>) -> Result<()> {
    conversation.ask(text);
    let tokens = match fitting_tokens(conversation, generator) {
        Ok(tokens) => tokens,
        Err(error) => {
            conversation.unsay();
            note(&sentence(&error));
            return Ok(());
        }
    };
    let reply = stream(generator, &tokens)?;
    note(&reply.stats(generator.params()));
    if reply.finish_reason == FinishReason::Cancelled && reply.text.is_empty() {
        conversation.unsay();
    } else {
        conversation.answered(&reply.text, &reply.reasoning);
    }
    if reply.finish_reason == FinishReason::Length && reply.fills(generator.context()) {
        note(&format!("the context of {} tokens is full: the answer ends here", generator.context()));
    }
    Ok(())
}

/// The tokens of the conversation, for which as many of its oldest turns are forgotten as it takes to leave room for an
/// answer.
fn fitting_tokens(conversation: &mut Conversation<'_>, generator: &Generator<'_>) -> Result<Vec<u32>> {
    let context = generator.context();
    let room = generator.max_tokens().min(context / ANSWER_SHARE);
    let mut n_left_out = 0;
    let mut tokens = conversation.tokens(n_left_out)?;
    while tokens.len() + room > context && n_left_out < conversation.n_turns() {
        n_left_out += 1;
        tokens = conversation.tokens(n_left_out)?;
    }
    generator.check_fits(tokens.len())?;
    if n_left_out > 0 {
        conversation.forget(n_left_out);
        note(&format!(
            "to fit the context of {context} tokens, the oldest turns are forgotten: {n_left_out}"
        ));
    }
    Ok(tokens)
}
