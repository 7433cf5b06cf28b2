//! How fast this machine reads memory: the roof above every kernel that is bound by bytes.

use crate::isa::{Isa, xor_words};
use crate::pool::Pool;
use std::sync::atomic::{AtomicU64, Ordering};

/// One task: long enough to hide its start, short enough that all workers end together.
const PIECE_BYTES: usize = 1 << 20;

/// Reads all of `bytes` once, in order, on all workers. Returns the exclusive or of its little-endian words: a checksum
/// that no order of the pieces changes, and proof that every byte arrived.
pub(crate) fn stream_read(pool: &Pool, bytes: &[u8]) -> u64 {
    let (isa, checksum) = (Isa::detect(), AtomicU64::new(0));
    let pieces = bytes.len().div_ceil(PIECE_BYTES);
    pool.run(pieces, &|_, piece| {
        let bytes = &bytes[piece * PIECE_BYTES..];
        let words = xor_words(isa, &bytes[..bytes.len().min(PIECE_BYTES)]);
        checksum.fetch_xor(words, Ordering::Relaxed);
    });
    checksum.into_inner()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::SPIN;

    #[test]
    fn the_checksum_covers_every_byte() {
        let pool = Pool::new(Some(2), SPIN).unwrap();
        let mut bytes: Vec<u8> = (0..2 * PIECE_BYTES + 13).map(|i| (i % 251) as u8).collect();
        let expected = xor_words(Isa::SCALAR, &bytes);
        assert_eq!(stream_read(&pool, &bytes), expected);
        for at in [0, PIECE_BYTES, 2 * PIECE_BYTES + 12] {
            bytes[at] ^= 1;
            assert_ne!(stream_read(&pool, &bytes), expected, "byte {at}");
            bytes[at] ^= 1;
        }
        assert_eq!(stream_read(&pool, &[]), 0);
    }
}
