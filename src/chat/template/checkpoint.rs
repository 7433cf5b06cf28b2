//! Where a checkpoint keeps its chat template: `chat_template.jinja`, else `tokenizer_config.json`. Reads no files.

use serde_json::Value;

/// A template as the checkpoint spells it, not yet parsed.
#[derive(Debug, PartialEq)]
pub struct CheckpointTemplate<'a> {
    /// Jinja source.
    pub source: &'a str,
    /// The token that begins a text, if the checkpoint names one.
    pub bos_token: Option<&'a str>,
    /// The token that ends a turn or a text, if the checkpoint names one.
    pub eos_token: Option<&'a str>,
}

/// The template of a checkpoint, `None` where it has none.
///
/// `chat_template_jinja` is the text of `chat_template.jinja` and wins. In the parsed `tokenizer_config.json`,
/// `chat_template` is a string or a list of `{name, template}`, of which `default` is taken, else the first.
pub fn checkpoint_template<'a>(
    tokenizer_config: &'a Value,
    chat_template_jinja: Option<&'a str>,
) -> Option<CheckpointTemplate<'a>> {
    let source = chat_template_jinja.or_else(|| match &tokenizer_config["chat_template"] {
        Value::String(source) => Some(source),
        Value::Array(named) => {
            named.iter().find(|entry| entry["name"] == "default").or(named.first())?["template"].as_str()
        }
        _ => None,
    })?;
    let token = |field: &str| match &tokenizer_config[field] {
        Value::String(token) => Some(token.as_str()),
        added_token => added_token["content"].as_str(),
    };
    Some(CheckpointTemplate { source, bos_token: token("bos_token"), eos_token: token("eos_token") })
}

#[cfg(test)]
mod tests {
    use super::{CheckpointTemplate, checkpoint_template};
    use serde_json::json;

    #[test]
    fn the_file_wins_over_the_config() {
        let config = json!({"chat_template": "config", "bos_token": null, "eos_token": {"content": "</s>"}});
        let file = CheckpointTemplate { source: "file", bos_token: None, eos_token: Some("</s>") };
        assert_eq!(checkpoint_template(&config, Some("file")), Some(file));
        assert_eq!(checkpoint_template(&config, None).map(|template| template.source), Some("config"));
    }

    #[test]
    fn default_is_preferred_among_named_templates() {
        let named = |names: [&str; 2]| {
            let list: Vec<_> = names.iter().map(|name| json!({"name": name, "template": name})).collect();
            json!({"chat_template": list, "bos_token": "<s>"})
        };
        let source = |config| checkpoint_template(&config, None).map(|template| template.source.to_owned());
        assert_eq!(source(named(["tool_use", "default"])), Some("default".into()));
        assert_eq!(source(named(["tool_use", "rag"])), Some("tool_use".into()));
    }

    #[test]
    fn no_template_is_none() {
        for config in
            [json!({}), json!(null), json!({"chat_template": []}), json!({"chat_template": [{"name": "x"}]})]
        {
            assert_eq!(checkpoint_template(&config, None), None);
        }
    }
}
