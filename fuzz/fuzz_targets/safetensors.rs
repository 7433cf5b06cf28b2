//! Any bytes as a safetensors file: no panic, and what parses lies in bounds and end to end.
#![no_main]

use freetoken::formats::safetensors;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(entries) = safetensors::parse("input", bytes) else { return };
    let mut ranges: Vec<_> = entries.into_values().map(|entry| entry.range).collect();
    ranges.sort_by_key(|range| (range.start, range.end));
    for pair in ranges.windows(2) {
        assert_eq!(pair[0].end, pair[1].start);
    }
    for range in &ranges {
        assert!(bytes.get(range.clone()).is_some());
    }
    assert!(ranges.last().is_none_or(|range| range.end == bytes.len()));
});
