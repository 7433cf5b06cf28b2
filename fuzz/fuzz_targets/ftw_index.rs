//! Any bytes as an FTW index: no panic, and what parses is in bounds, aligned and disjoint.
#![no_main]

use freetoken::formats::ftw::index;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(index) = index::parse("input", bytes) else { return };
    let total = index.shards.last().map_or(0, |shard| shard.range.end);
    for pair in index.shards.windows(2) {
        assert_eq!(pair[0].range.end, pair[1].range.start);
    }
    for pair in index.entries.windows(2) {
        assert!(pair[0].range.end <= pair[1].range.start);
    }
    for entry in &index.entries {
        assert!(entry.range.start % index::ALIGN == 0 && entry.range.end <= total);
    }
});
