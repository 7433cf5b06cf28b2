//! [`Tools`]: the functions that a request offers, as far as it takes to read calls of them: names, and the schema of each
//! parameter. It checks no arguments.

use std::{collections::HashMap, sync::Arc};

use serde_json::Value;

/// Offered functions.
pub(super) struct Tools(HashMap<String, Parameters>);

/// The parameters of a function, by the JSON schema that was sent. Nothing is known of those of an unknown function.
#[derive(Clone, Default)]
pub(super) struct Parameters(Arc<Value>);

impl Tools {
    /// Reads definitions: `{type: "function", function: {name, parameters}}`, or the inner object alone.
    pub(super) fn new(definitions: &[Value]) -> Self {
        let functions = definitions.iter().map(|tool| tool.get("function").unwrap_or(tool));
        let named = functions.filter_map(|function| {
            let schema = function.get("parameters").or(function.get("input_schema"));
            let parameters = Parameters(Arc::new(schema.cloned().unwrap_or_default()));
            Some((function["name"].as_str()?.to_owned(), parameters))
        });
        Tools(named.collect())
    }

    /// Whether there is such a function.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// The parameters of a function.
    pub(super) fn parameters(&self, name: &str) -> Parameters {
        self.0.get(name).cloned().unwrap_or_default()
    }
}

impl Parameters {
    /// The schema of the whole object.
    pub(super) fn schema(&self) -> &Value {
        &self.0
    }

    /// The schema of one parameter, where it is declared.
    pub(super) fn of(&self, name: &str) -> Option<&Value> {
        property(&self.0, name)
    }
}

/// The schema of a field of the objects that `schema` describes.
pub(super) fn property<'s>(schema: &'s Value, name: &str) -> Option<&'s Value> {
    schema.get("properties")?.get(name).or(schema.get("additionalProperties").filter(|more| more.is_object()))
}
