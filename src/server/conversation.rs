//! [`Conversation`]: what a chat request says, in the words of no protocol, and the way from there to a prompt.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::{
    Server,
    answers::Answers,
    ask::{Ask, Drawing, Prompt, ReadingPlan},
    blocking,
    error::{ApiError, Kind},
    grammar::{Format, GuidePlan},
    journal::Ticket,
    model::ServedModel,
};

/// Messages, tools, and how the model is to answer.
#[derive(Debug)]
pub(super) struct Conversation {
    /// Messages in the form of OpenAI's API, oldest first.
    pub(super) messages: Vec<Value>,
    /// Tool definitions in the same form.
    pub(super) tools: Vec<Value>,
    /// Whether it may call them.
    pub(super) tool_choice: ToolChoice,
    /// Whether it may call several at once.
    pub(super) parallel: bool,
    /// What its content looks like.
    pub(super) format: Format,
    /// Whether and how long it thinks.
    pub(super) thinking: Thinking,
    /// Further variables of the template; they win.
    pub(super) kwargs: Map<String, Value>,
}

/// Whether tools are called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ToolChoice {
    /// As the model likes.
    Auto,
    /// Never.
    None,
    /// One at least.
    Required,
    /// This one.
    Named(String),
}

/// Whether and how long a model thinks before it answers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Thinking {
    /// On or off, where somebody says so.
    pub(super) on: Option<bool>,
    /// How hard, in the words of templates.
    pub(super) effort: Option<String>,
    /// Tokens of thinking at most.
    pub(super) budget: Option<usize>,
}

impl Thinking {
    /// What a word for effort means; `None` for a word that nobody knows.
    pub(super) fn of_effort(word: &str) -> Option<Self> {
        match word {
            "none" => Some(Thinking { on: Some(false), ..Thinking::default() }),
            "minimal" | "low" | "medium" | "high" | "xhigh" | "max" => {
                Some(Thinking { on: Some(true), effort: Some(word.into()), budget: None })
            }
            _ => None,
        }
    }

    /// The variables by which templates know it.
    fn kwargs(&self) -> Map<String, Value> {
        let mut kwargs = Map::new();
        if let Some(on) = self.on {
            kwargs.insert("enable_thinking".into(), on.into());
            kwargs.insert("thinking".into(), on.into());
        }
        if let Some(effort) = &self.effort {
            kwargs.insert("reasoning_effort".into(), effort.as_str().into());
        }
        kwargs
    }
}

impl Conversation {
    /// Asks the service to answer it.
    ///
    /// # Errors
    /// What template, grammar, tokenizer or service refuse.
    pub(super) async fn ask(
        self,
        drawing: Drawing,
        server: &Arc<Server>,
        ticket: Arc<Ticket>,
    ) -> Result<Answers, ApiError> {
        let asked = server.clone();
        blocking(move || self.prepare(asked.model(), drawing)).await?.submit(server, ticket)
    }

    /// Renders and tokenizes it. This may take long.
    ///
    /// # Errors
    /// What template, grammar or tokenizer refuse.
    fn prepare(self, model: &ServedModel, drawing: Drawing) -> Result<Ask, ApiError> {
        self.check_tools()?;
        let (prompt, text) = self.prompt(model)?;
        let dialect = model.dialect()?;
        let offered = self.offered();
        let constraint = GuidePlan::new(&self, dialect, &text, model)?;
        let reading = ReadingPlan {
            dialect,
            prompt: text,
            tools: offered.map(<[Value]>::to_vec),
            one_call: !self.parallel,
        };
        Ok(Ask { prompts: vec![prompt], drawing, reading: Some(reading), constraint })
    }

    /// The prompt alone, in tokens and as text.
    ///
    /// # Errors
    /// As [`Conversation::prepare`].
    pub(super) fn prompt(&self, model: &ServedModel) -> Result<(Prompt, String), ApiError> {
        let mut kwargs = self.thinking.kwargs();
        kwargs.extend(self.kwargs.clone());
        model.prompt(&self.messages, self.offered(), &kwargs)
    }

    /// The tools that the model sees.
    pub(super) fn offered(&self) -> Option<&[Value]> {
        (!self.tools.is_empty() && self.tool_choice != ToolChoice::None).then_some(&self.tools)
    }

    fn check_tools(&self) -> Result<(), ApiError> {
        let none = self.tools.is_empty();
        match &self.tool_choice {
            ToolChoice::Required if none => {
                Err(ApiError::field("tool_choice", "tool_choice demands a call, but there are no tools"))
            }
            ToolChoice::Named(name) if !self.tools.iter().any(|tool| tool["function"]["name"] == **name) => {
                Err(ApiError::field(
                    "tool_choice",
                    "tool_choice names a function that is not among the tools",
                ))
            }
            _ => Ok(()),
        }
    }
}

/// Checks a word for effort, and that the model's template makes a difference of it.
///
/// # Errors
/// An unknown word, or a template without a switch.
pub(super) fn effort(param: &str, word: &str, model: &ServedModel) -> Result<Thinking, ApiError> {
    let thinking = Thinking::of_effort(word).ok_or_else(|| {
        let words = "\"none\", \"minimal\", \"low\", \"medium\", \"high\", \"xhigh\" or \"max\"";
        super::fields::wrong(param, &super::fields::shown(&Value::from(word)), words)
    })?;
    let off = Thinking { on: Some(false), ..Thinking::default() };
    let on = Thinking { on: Some(true), ..Thinking::default() };
    let other = if thinking.on == Some(false) { &on } else { &off };
    if model.tells_apart(&thinking.kwargs(), &other.kwargs()) {
        return Ok(thinking);
    }
    let message =
        format!("{param} cannot be honoured: this model's chat template knows no way to change its thinking");
    Err(ApiError { param: Some(param.into()), ..ApiError::new(Kind::Invalid, message) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn efforts_become_variables_of_templates() {
        let kwargs = |word| Value::from(Thinking::of_effort(word).expect("a known word").kwargs());
        assert_eq!(kwargs("none"), json!({ "enable_thinking": false, "thinking": false }));
        assert_eq!(
            kwargs("low"),
            json!({ "enable_thinking": true, "thinking": true, "reasoning_effort": "low" })
        );
        assert_eq!(Thinking::of_effort("some"), None);
    }
}
