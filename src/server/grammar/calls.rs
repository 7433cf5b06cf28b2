//! Grammars of tool calls: what a model writes to call one of some functions, by the dialect that its template teaches.

use serde_json::{Value, json};

use super::json_rule;
use crate::{
    chat::dialect::Dialect,
    server::{
        error::{ApiError, Kind},
        model::ServedModel,
    },
};

/// The tag in front of a call, in most dialects.
const OPENER: &str = "<tool_call>";
const CLOSER: &str = "</tool_call>";

/// Writes grammars of one dialect.
pub(super) struct Writer<'m> {
    form: Form,
    model: &'m ServedModel,
}

#[derive(Clone, Copy)]
enum Form {
    /// `<tool_call>` JSON `</tool_call>`
    Hermes,
    /// `<tool_call><function=NAME><parameter=KEY>` text
    QwenXml,
    /// `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>` text
    Glm,
    /// JSON alone.
    Llama,
}

impl<'m> Writer<'m> {
    /// That of a dialect.
    ///
    /// # Errors
    /// A dialect whose calls have no grammar here.
    pub(super) fn of(dialect: Dialect, model: &'m ServedModel) -> Result<Self, ApiError> {
        let form = match dialect.name() {
            "hermes" => Form::Hermes,
            "qwen-xml" => Form::QwenXml,
            "glm" => Form::Glm,
            "llama" => Form::Llama,
            other => {
                let message = format!(
                    "calls cannot be forced, and \"strict\" not be kept, in the way in which this model writes them ({other})"
                );
                return Err(ApiError {
                    param: Some("tools".into()),
                    ..ApiError::new(Kind::Invalid, message)
                });
            }
        };
        Ok(Writer { form, model })
    }

    /// An answer that is a call of one of `tools`, or several, or JSON of a schema instead. `lead` may stand in front.
    pub(super) fn whole(&self, lead: &str, tools: &[&Value], parallel: bool, json: Option<&Value>) -> String {
        let more = match self.form {
            Form::Llama => "",
            _ if parallel => " (\"\\n\" call)*",
            _ => "",
        };
        let call = match self.form {
            Form::Llama => "behind".to_owned(),
            _ => format!("{} behind", self.tag(OPENER)),
        };
        let rules = format!("call: {call}\n{}", self.behind(tools));
        match json {
            None => format!("start: {lead}call{more}\n{rules}"),
            Some(schema) => {
                format!("start: {lead}(json | call{more})\njson: {}\n{rules}", json_rule(schema))
            }
        }
    }

    /// The opener of a call, and what must follow it.
    ///
    /// # Errors
    /// A dialect without an opener.
    pub(super) fn behind_opener(&self, tools: &[&Value]) -> Result<(&'static str, String), ApiError> {
        if matches!(self.form, Form::Llama) {
            let message = "\"strict\" cannot be kept for this model, whose calls begin like any text: set tool_choice to \
                           \"required\", or leave it out";
            return Err(ApiError::field("tools", message));
        }
        Ok((OPENER, format!("start: behind\n{}", self.behind(tools))))
    }

    /// The rule `behind`, which is a call without its opener, and those below it.
    fn behind(&self, tools: &[&Value]) -> String {
        let tools = tools.iter().map(|tool| &tool["function"]).enumerate();
        let (mut names, mut rules) = (Vec::new(), String::new());
        for (i, function) in tools {
            names.push(format!("f{i}"));
            let name = function["name"].as_str().unwrap_or_default();
            rules.push_str(&self.function(i, name, &function["parameters"]));
        }
        let body = format!("body: {}\n{rules}", names.join(" | "));
        let close = self.tag(CLOSER);
        match self.form {
            Form::Hermes => format!("behind: \"\\n\" body \"\\n\" {close}\n{body}"),
            Form::QwenXml => format!("behind: \"\\n\" body \"\\n\" {close}\n{body}"),
            Form::Glm => format!("behind: body {close}\n{body}"),
            Form::Llama => format!("behind: body\n{body}"),
        }
    }

    /// The rules of one function.
    fn function(&self, i: usize, name: &str, parameters: &Value) -> String {
        let schema = arguments_schema(parameters);
        let object = |arguments: &str| {
            let head = quoted(&format!("{{\"name\": {}, \"{arguments}\": ", Value::from(name)));
            format!("f{i}: {head} a{i} \"}}\"\na{i}: {}\n", json_rule(&schema))
        };
        let keys = || {
            let keys = schema["properties"].as_object().into_iter().flatten().map(|(key, _)| quoted(key));
            keys.collect::<Vec<_>>().join(" | ")
        };
        match self.form {
            Form::Hermes => object("arguments"),
            Form::Llama => object("parameters"),
            Form::QwenXml => {
                let head = quoted(&format!("<function={name}>\n"));
                match keys() {
                    keys if keys.is_empty() => format!("f{i}: {head} \"</function>\"\n"),
                    keys => format!(
                        "f{i}: {head} p{i}* \"</function>\"\n\
                         p{i}: \"<parameter=\" k{i} \">\\n\" v{i}\nk{i}: {keys}\n\
                         v{i}[suffix=\"</parameter>\\n\"]: /(?s:.*)/\n"
                    ),
                }
            }
            Form::Glm => {
                let head = quoted(&format!("{name}\n"));
                match keys() {
                    keys if keys.is_empty() => format!("f{i}: {head}\n"),
                    keys => {
                        let [key, key_end, value] =
                            ["<arg_key>", "</arg_key>", "<arg_value>"].map(|tag| self.tag(tag));
                        format!(
                            "f{i}: {head} p{i}*\np{i}: {key} k{i} {key_end} \"\\n\" {value} v{i} {} \"\\n\"\nk{i}: {keys}\n\
                             v{i}: /(?s:[^<]*)/\n",
                            self.tag("</arg_value>")
                        )
                    }
                }
            }
        }
    }

    /// A tag, as the token that it is where it is a special one.
    fn tag(&self, tag: &str) -> String {
        let tokenizer = self.model.tokenizer();
        match tokenizer.token_to_id(tag) {
            Some(id) if tokenizer.is_special(id) => format!("<[{id}]>"),
            _ => quoted(tag),
        }
    }
}

/// The schema of a function's arguments, by the parameters that it declares; none are none.
pub(super) fn arguments_schema(parameters: &Value) -> Value {
    let declares_none = parameters["properties"] == json!({}) && parameters["additionalProperties"].is_null();
    if parameters.is_object() && !declares_none {
        parameters.clone()
    } else {
        json!({ "type": "object", "properties": {}, "additionalProperties": false })
    }
}

/// A text as a grammar writes it.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}
