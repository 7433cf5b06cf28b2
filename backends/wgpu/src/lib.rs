//! The WGSL backend: runs ops on every GPU with a Vulkan, Metal or DX12 driver, and on software rasterizers.
//!
//! Pipelines, bind groups and parameters are made when a program is recorded; a replay encodes dispatches and waits. Kernels are the
//! files in `shaders/`, specialised by override constants and picked by what the adapter has; this crate knows no model.

mod adapter;
mod device;
mod dispatch;
mod kernels;
mod memory;
mod ops;
mod pipelines;
mod program;
mod queue;
mod route_point;
mod staging;
mod timing;

pub use adapter::{AdapterFacts, Select, adapters};
pub use device::{Options, Wgpu};
