//! Philox4x32-10, the counter-based random number generator of sampling (Salmon et al., "Parallel random
//! numbers: as easy as 1, 2, 3", SC 2011).
//!
//! There is no state: the number for a position of a sequence depends on the seed and that position alone, so
//! a batch, a resumed sequence and a repeated run draw the same. It knows nothing of what the numbers are
//! used for.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// The four random words that belong to `counter` under `key`.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let [high_0, low_0] = wide_product(MULTIPLIERS[0], counter[0]);
        let [high_1, low_1] = wide_product(MULTIPLIERS[1], counter[2]);
        counter = [high_1 ^ counter[1] ^ key[0], low_1, high_0 ^ counter[3] ^ key[1], low_0];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

/// A number in `[0, 1)`, a multiple of 2^-53, for one position of the sequence that `seed` belongs to.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let [high, low, ..] =
        philox4x32([low_word(position), high_word(position), 0, 0], [low_word(seed), high_word(seed)]);
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

fn wide_product(a: u32, b: u32) -> [u32; 2] {
    let product = u64::from(a) * u64::from(b);
    [high_word(product), low_word(product)]
}

fn high_word(value: u64) -> u32 {
    (value >> 32) as u32
}

fn low_word(value: u64) -> u32 {
    value as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with the authors' Random123 library.
    #[test]
    fn known_answers() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32(counter, key), expected, "counter {counter:x?}, key {key:x?}");
        }
    }

    #[test]
    fn uniform_numbers_are_spread_and_repeatable() {
        let numbers: Vec<f64> = (0..10_000).map(|position| uniform(7, position)).collect();
        assert!(numbers.iter().all(|u| (0.0..1.0).contains(u)));
        let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
        assert!((mean - 0.5).abs() < 0.02, "mean {mean}");
        assert_eq!(uniform(7, 123), numbers[123]);
        assert_ne!(uniform(8, 123), numbers[123]);
        assert_ne!(uniform(7, 123 + (1 << 32)), numbers[123]);
    }
}
