//! Any bytes as a configuration: no panic, and what has no repeated key is read as the plain parser reads it.
#![no_main]

use freetoken::formats::json::{self, UniqueValue};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|bytes: &[u8]| {
    let Ok(UniqueValue(unique)) = json::parse("config.json", bytes) else { return };
    let plain: Value = json::parse("config.json", bytes).expect("the plain parser accepts more");
    assert_eq!(unique, plain);
});
