//! From a prompt's tokens to an answer, and how long it took. It knows no conversation and no terminal but for the bar while
//! a long prompt is computed.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::interrupt::Interrupt;
use crate::{
    chat::{
        answer::{Answer, FinishReason},
        dialect::Dialect,
        reader::{Answered, Piece, Reader},
        stop::StopStrings,
    },
    cli::terminal::Progress,
    engine::{Engine, Sequence, sampling::SamplingParams},
    formats::tokenizer::Tokenizer,
    model_files::ModelFiles,
};

/// A prompt of more tokens is computed in more than one step, so that a bar has something to show.
const LONG_PROMPT: usize = 512;
/// Tokens at a prompt's end that may begin the model's thinking.
const PROMPT_TAIL: usize = 32;

/// A model that answers one prompt after the other, and computes of each only what the one before did not begin with.
pub(super) struct Generator<'m> {
    tokenizer: &'m Tokenizer,
    eos: &'m [u32],
    engine: Engine,
    sequence: Sequence,
    stop: StopStrings,
    /// How the model sets off its thinking; `None` where all that it writes is the answer.
    dialect: Option<Dialect>,
    max_tokens: usize,
    interrupt: Interrupt,
}

/// An answer and what it took.
pub(super) struct Reply {
    pub(super) text: String,
    /// What the model thought before it.
    pub(super) reasoning: String,
    pub(super) finish_reason: FinishReason,
    prompt_tokens: usize,
    completion_tokens: usize,
    /// From the prompt to the first token, where there is one.
    to_first_token: Option<Duration>,
    /// `None` where nothing was timed.
    prefill_tokens_per_second: Option<f64>,
    decode_tokens_per_second: Option<f64>,
}

impl<'m> Generator<'m> {
    /// Takes over Ctrl-C: there can be one.
    pub(super) fn new(
        files: &'m ModelFiles,
        engine: Engine,
        params: SamplingParams,
        stop: StopStrings,
        dialect: Option<Dialect>,
        max_tokens: usize,
    ) -> Result<Self> {
        Ok(Generator {
            tokenizer: files.tokenizer()?,
            eos: &files.generation().eos_token_ids,
            sequence: Sequence::new(&[], params, engine.context()),
            engine,
            stop,
            dialect,
            max_tokens,
            interrupt: Interrupt::listen()?,
        })
    }

    /// Forgets what is computed and draws otherwise from now on.
    pub(super) fn restart(&mut self, params: SamplingParams) {
        self.engine.release(&mut self.sequence);
        self.sequence = Sequence::new(&[], params, self.engine.context());
    }

    /// What computes.
    pub(super) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// How tokens are drawn.
    pub(super) fn params(&self) -> &SamplingParams {
        self.sequence.params()
    }

    /// Tokens that prompt and answer may have together.
    pub(super) fn context(&self) -> usize {
        self.engine.context()
    }

    /// The most tokens of an answer, whatever the context holds.
    pub(super) fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Refuses a prompt of `n_tokens` tokens that leaves no room for an answer.
    pub(super) fn check_fits(&self, n_tokens: usize) -> Result<()> {
        let context = self.context();
        ensure!(n_tokens > 0, "the prompt has no tokens: give a text");
        ensure!(
            n_tokens < context,
            "the prompt has {n_tokens} tokens and the context holds {context}, the answer included: shorten it, or raise \
             --context"
        );
        Ok(())
    }

    /// Answers a prompt that [fits](Self::check_fits). `show` gets it piece by piece.
    pub(super) fn answer(
        &mut self,
        prompt: &[u32],
        show: &mut dyn FnMut(&Piece) -> Result<()>,
    ) -> Result<Reply> {
        self.interrupt.forget();
        let max_tokens = self.max_tokens.min(self.context() - prompt.len());
        let mut answer = Answer::new(self.eos, self.stop.clone(), max_tokens);
        let mut reader = None;
        if let Some(dialect) = self.dialect {
            let tail = self.tokenizer.decode(&prompt[prompt.len().saturating_sub(PROMPT_TAIL)..], false)?;
            answer = answer.showing(dialect.tokens(self.tokenizer));
            reader = Some(Reader::new(dialect, &tail, None, ""));
        }
        let mut answered = Answered::default();
        let mut show = |pieces: Vec<Piece>| {
            pieces.iter().try_for_each(&mut *show)?;
            answered.extend(pieces);
            anyhow::Ok(())
        };
        let mut read = |text: &str| match &mut reader {
            Some(reader) => reader.push(text),
            None => vec![Piece::Content(text.into())],
        };
        self.engine.rebase(&mut self.sequence, prompt);
        let n_reused = self.sequence.n_computed();
        let start = Instant::now();
        let mut drawn = self.prefill()?;
        let prefill_time = start.elapsed();
        let n_prefilled = self.sequence.n_computed() - n_reused;
        let first_token = Instant::now();
        let to_first_token = drawn.map(|_| prefill_time);
        while let Some(token) = drawn {
            show(read(answer.push(self.tokenizer, token)?))?;
            if answer.finish_reason().is_some() || self.interrupt.asked() {
                break;
            }
            self.sequence.push(token);
            let mut next = [0];
            self.engine.decode(&mut [&mut self.sequence], &mut next)?;
            drawn = Some(next[0]);
        }
        let n_decoded = answer.n_tokens().saturating_sub(1);
        let decode_time = first_token.elapsed();
        show(read(answer.cut(FinishReason::Cancelled)))?;
        show(reader.as_mut().map(Reader::finish).unwrap_or_default())?;
        Ok(Reply {
            text: answered.content,
            reasoning: answered.reasoning,
            finish_reason: answer.finish_reason().expect("an answer that was cut has ended"),
            prompt_tokens: prompt.len(),
            completion_tokens: answer.n_tokens(),
            to_first_token,
            prefill_tokens_per_second: rate(n_prefilled, prefill_time),
            decode_tokens_per_second: rate(n_decoded, decode_time),
        })
    }

    /// Computes the prompt and draws the first token, `None` where Ctrl-C came first.
    fn prefill(&mut self) -> Result<Option<u32>> {
        let (n_reused, n_pending) = (self.sequence.n_computed(), self.sequence.pending().len());
        let progress = (n_pending > LONG_PROMPT).then(|| Progress::tokens("reading", n_pending as u64));
        let drawn = self.engine.prefill(&mut self.sequence, &mut |n_computed| {
            progress.iter().for_each(|bar| bar.set((n_computed - n_reused) as u64));
            !self.interrupt.asked()
        });
        progress.iter().for_each(Progress::finish);
        Ok(drawn?)
    }
}

impl Reply {
    /// Whether prompt and answer fill a context.
    pub(super) fn fills(&self, context: usize) -> bool {
        self.prompt_tokens + self.completion_tokens >= context
    }

    /// What `--json` prints. A speed that was not timed is null.
    pub(super) fn json(&self) -> Value {
        json!({
            "text": self.text,
            "reasoning": (!self.reasoning.is_empty()).then_some(&self.reasoning),
            "finish_reason": self.finish_reason.to_string(),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_seconds": self.to_first_token.map(|time| time.as_secs_f64()),
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        })
    }

    /// One line for the user: speeds, and what it takes to draw the same answer again.
    pub(super) fn stats(&self, params: &SamplingParams) -> String {
        let speed = |what: &str, rate: Option<f64>| rate.map(|rate| format!("{what} {rate:.1} tok/s"));
        let parts = [
            Some(format!(
                "{} + {} tokens ({})",
                self.prompt_tokens, self.completion_tokens, self.finish_reason
            )),
            self.to_first_token.map(|time| format!("ttft {:.3} s", time.as_secs_f64())),
            speed("prefill", self.prefill_tokens_per_second),
            speed("decode", self.decode_tokens_per_second),
            (!params.is_greedy()).then(|| format!("seed {}", params.seed)),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// Tokens a second, where there were any.
fn rate(n_tokens: usize, time: Duration) -> Option<f64> {
    (n_tokens > 0).then(|| n_tokens as f64 / time.as_secs_f64().max(1e-9))
}
