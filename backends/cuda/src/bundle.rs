//! The kernels that this binary carries, compiled by `cargo xtask kernels`, and which of them a card takes.

mod container;

use container::{Target, packs};

/// Compiled kernels: cubins for every generation that was known, PTX for those to come.
const BUNDLE: &[u8] = include_bytes!("../kernels.bundle");

/// The images that a card of this compute capability (major, minor) loads, one a module: machine code of the same major and
/// the nearest minor below, else PTX, which the driver compiles when it loads it.
///
/// # Errors
/// The card is older than all of them, or the bundle is broken.
pub(crate) fn pick(compute: (u32, u32)) -> Result<Vec<Vec<u8>>, String> {
    pick_from(BUNDLE, compute)
}

/// Whether what [`pick`] gives such a card has the instructions by which a kernel waits for the one before it.
pub(crate) fn kernels_wait(compute: (u32, u32)) -> bool {
    packs(BUNDLE).is_ok_and(|packs| {
        packs.iter().any(|pack| matches!(pack.target, Target::Cubin(9.., _)) && runs(pack.target, compute))
    })
}

fn pick_from(bundle: &[u8], compute: (u32, u32)) -> Result<Vec<Vec<u8>>, String> {
    let packs = packs(bundle)?;
    let best = packs.iter().filter(|pack| runs(pack.target, compute)).max_by_key(|pack| rank(pack.target));
    let Some(best) = best else {
        let (major, minor) = compute;
        return Err(format!("compute capability {major}.{minor} is too old: 8.0 or newer is needed"));
    };
    best.unpack()
}

fn runs(target: Target, compute: (u32, u32)) -> bool {
    match target {
        Target::Cubin(major, minor) => major == compute.0 && minor <= compute.1,
        Target::Ptx(major, minor) => (major, minor) <= compute,
    }
}

/// Machine code before PTX, then the newest.
fn rank(target: Target) -> (bool, u32) {
    (matches!(target, Target::Cubin(..)), target.code())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(compute: (u32, u32)) -> Option<Target> {
        let packs = packs(BUNDLE).unwrap();
        packs
            .iter()
            .map(|pack| pack.target)
            .filter(|&target| runs(target, compute))
            .max_by_key(|&target| rank(target))
    }

    #[test]
    fn each_card_gets_the_nearest_code() {
        assert_eq!(target((7, 5)), None);
        assert_eq!(target((8, 0)), Some(Target::Cubin(8, 0)));
        assert_eq!(target((8, 6)), Some(Target::Cubin(8, 6)));
        assert_eq!(target((8, 7)), Some(Target::Cubin(8, 6)));
        assert_eq!(target((8, 9)), Some(Target::Cubin(8, 9)));
        assert_eq!(target((9, 0)), Some(Target::Cubin(9, 0)));
        assert_eq!(target((10, 3)), Some(Target::Cubin(10, 0)));
        assert_eq!(target((11, 0)), Some(Target::Ptx(8, 0)));
        assert_eq!(target((12, 1)), Some(Target::Cubin(12, 0)));
        assert_eq!(target((13, 0)), Some(Target::Ptx(8, 0)));
    }

    #[test]
    fn kernels_wait_where_their_code_can() {
        assert!([(9, 0), (10, 3), (12, 0)].into_iter().all(kernels_wait));
        assert!(![(8, 6), (8, 9), (11, 0), (13, 0)].into_iter().any(kernels_wait));
    }

    #[test]
    fn all_targets_hold_the_same_modules() {
        let modules: Vec<(Target, Vec<&str>)> = packs(BUNDLE)
            .unwrap()
            .iter()
            .map(|pack| (pack.target, pack.images.iter().map(|image| image.module).collect()))
            .collect();
        let (_, first) = &modules[0];
        assert!(first.contains(&"matmul_mma"), "{first:?}");
        for (target, modules) in &modules {
            assert_eq!(modules, first, "{target:?}");
        }
    }

    #[test]
    fn images_are_what_the_driver_loads() {
        assert!(pick((9, 0)).unwrap().iter().all(|image| image.starts_with(b"\x7fELF")));
        assert!(pick((13, 0)).unwrap().iter().all(|image| image.ends_with(b"\0")), "PTX is a C string");
        assert!(pick((7, 5)).unwrap_err().contains("7.5"));
    }

    #[test]
    fn a_broken_bundle_is_an_error() {
        for end in [0, 7, 11, 40, BUNDLE.len() - 1] {
            assert!(pick_from(&BUNDLE[..end], (9, 0)).is_err(), "{end} bytes");
        }
        let mut flipped = BUNDLE.to_vec();
        let last = flipped.len() - 100;
        flipped[last] ^= 1;
        let is_whole = |compute| pick_from(&flipped, compute).is_ok();
        assert!(![(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0)].into_iter().all(is_whole));
    }
}
