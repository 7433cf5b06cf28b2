//! The WGSL backend: runs ops on every GPU with a Vulkan, Metal or DX12 driver, and on software rasterizers.
//!
//! Pipelines, bind groups and parameters are made when a program is recorded; a replay encodes dispatches and waits. Kernels are the
//! files in `shaders/`, specialised by override constants and picked by what the adapter has; this crate knows no model.

mod adapter;
mod commands;
mod device;
mod dispatch;
mod host;
mod kernels;
mod memory;
mod ops;
mod pipelines;
mod places;
mod program;
mod queue;
mod route_point;
mod staging;
mod timing;
#[cfg(not(target_vendor = "apple"))]
mod vulkan;
#[cfg(target_vendor = "apple")]
#[path = "no_vulkan.rs"]
mod vulkan;

pub use adapter::{AdapterFacts, Select, adapters};
pub use device::{Options, Wgpu};
pub use host::HostPath;
