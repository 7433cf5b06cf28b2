//! Every device of this machine, opened for a test.

use std::sync::Arc;

use freetoken_backend::{Backend, Precision};
use freetoken_cpu::{Cpu, CpuOptions};

/// Calls `check` with each device in turn: the CPU, NVIDIA cards, adapters. Says what there is none of; software adapters must
/// be there where `FREETOKEN_CI` is 1, a real GPU need not.
pub(crate) fn run(precision: Precision, mut check: impl FnMut(Arc<dyn Backend>)) {
    check(Arc::new(Cpu::new(CpuOptions { threads: Some(2), precision }).unwrap()));
    #[cfg(feature = "cuda")]
    match freetoken_cuda::cards() {
        Err(why) => println!("SKIPPED: cuda: {why}"),
        Ok(cards) => {
            for card in cards {
                let options =
                    freetoken_cuda::CudaOptions { precision, submission: freetoken_cuda::Submission::Graph };
                let card = freetoken_cuda::CardChoice::Uuid(card.uuid);
                check(Arc::new(freetoken_cuda::Cuda::open(&card, options).unwrap()));
            }
        }
    }
    #[cfg(feature = "wgpu")]
    {
        let adapters: Vec<_> =
            freetoken_wgpu::adapters().into_iter().filter(|adapter| adapter.refusal.is_none()).collect();
        let strict = std::env::var_os("FREETOKEN_CI").is_some_and(|value| value == "1");
        assert!(!strict || !adapters.is_empty(), "FREETOKEN_CI=1 and no adapter: install a Vulkan driver");
        if adapters.is_empty() {
            println!("SKIPPED: wgpu: no driver offers an adapter");
        }
        for adapter in adapters {
            let select = freetoken_wgpu::Select::Index(adapter.index);
            let options = freetoken_wgpu::Options::new(precision);
            check(Arc::new(freetoken_wgpu::Wgpu::open(&select, &options).unwrap()));
        }
    }
}
