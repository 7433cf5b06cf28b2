//! The parameters of a launch, packed once when an op is recorded: every replay hands the driver the same bytes.

use crate::{driver::MAX_ARGS, launch::Arg};

/// Parameters of one launch, each at a multiple of eight bytes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Args {
    words: Box<[u64]>,
    /// Start in words and size in bytes of each.
    places: Box<[(usize, usize)]>,
}

impl Args {
    /// Packs `args`; `address` answers for those that are addresses. Asserts that a launch can take so many.
    pub(crate) fn pack<E>(args: &[Arg], mut address: impl FnMut(&Arg) -> Result<u64, E>) -> Result<Self, E> {
        assert!(args.len() <= MAX_ARGS, "a kernel with {} parameters", args.len());
        let (mut words, mut places) = (Vec::new(), Vec::new());
        for arg in args {
            let start = words.len();
            let bytes = match arg {
                Arg::Params(params) => {
                    words.resize(start + params.len().div_ceil(8), 0);
                    bytemuck::cast_slice_mut(&mut words[start..])[..params.len()].copy_from_slice(params);
                    params.len()
                }
                Arg::U32(number) => {
                    words.push(0);
                    bytemuck::cast_slice_mut(&mut words[start..])[..4].copy_from_slice(&number.to_ne_bytes());
                    4
                }
                other => {
                    words.push(address(other)?);
                    8
                }
            };
            places.push((start, bytes));
        }
        Ok(Args { words: words.into(), places: places.into() })
    }

    /// The bytes of each, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.places.iter().map(|&(start, bytes)| &bytemuck::cast_slice(&self.words[start..])[..bytes])
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn pack(args: &[Arg]) -> Args {
        let address = |arg: &Arg| match arg {
            Arg::Scratch(bytes) => Ok::<_, Infallible>(0x7000 + *bytes as u64),
            Arg::Null => Ok(0),
            other => unreachable!("{other:?}"),
        };
        Args::pack(args, address).unwrap()
    }

    #[test]
    fn parameters_keep_their_order_and_their_sizes() {
        let params: Vec<u8> = (1..=28).collect();
        let args = pack(&[Arg::Scratch(256), Arg::Params(params.clone()), Arg::U32(7), Arg::Null]);
        let bytes: Vec<&[u8]> = args.iter().collect();
        let expected: [&[u8]; 4] = [&0x7100_u64.to_ne_bytes(), &params, &7_u32.to_ne_bytes(), &[0; 8]];
        assert_eq!(bytes, expected);
        assert!(bytes.iter().all(|arg| arg.as_ptr().addr() % 8 == 0));
    }

    #[test]
    fn a_kernel_has_a_bounded_number_of_parameters() {
        assert_eq!(pack(&vec![Arg::Null; MAX_ARGS]).iter().count(), MAX_ARGS);
        assert!(std::panic::catch_unwind(|| pack(&vec![Arg::Null; MAX_ARGS + 1])).is_err());
    }
}
