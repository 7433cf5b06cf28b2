//! Opens each adapter of this machine in turn; says loudly when there is none, and fails then where CI runs.

use freetoken_wgpu::{Options, Select, Wgpu, adapters};

/// Calls `test` with each adapter.
pub(crate) fn run(options: &Options, mut test: impl FnMut(&Wgpu)) {
    let usable: Vec<_> = adapters().into_iter().filter(|adapter| adapter.refusal.is_none()).collect();
    if usable.is_empty() {
        eprintln!("SKIPPED: no adapter: install a Vulkan driver (Mesa's software driver will do)");
        assert!(std::env::var_os("FREETOKEN_CI").is_none(), "CI runs on software adapters");
    }
    for adapter in usable {
        test(&Wgpu::open(&Select::Index(adapter.index), options).unwrap());
    }
}
