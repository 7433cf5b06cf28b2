//! The seam between the engine and a device.
//!
//! A model describes its work as [`Op`]s over [`View`]s of device memory; ops are data, and nothing here runs them.
//! A [`Backend`] runs a list of ops at once, or records [`Stage`]s into a [`Program`] that is replayed once a step.
//! Where a program needs the host (a MoE layer whose experts may be elsewhere) it holds a [`RoutePoint`], and the
//! host answers it through one closure, whichever way the backend reaches the host.
//!
//! This crate knows no device, no model and no file format. [`conformance`] holds the tables that every backend passes.

mod backend;
mod caps;
pub mod conformance;
mod error;
mod experts;
mod filling;
mod format;
mod memory;
mod ops;
pub mod os;
mod program;
mod weight;

pub use backend::{Backend, Event, KernelCosts, Lane};
pub use caps::{Caps, Precision};
pub use error::{Error, Result};
pub use experts::{ExpertPool, ExpertRecord, ExpertWeights, Experts, record};
pub use filling::FillingBank;
pub use format::{Format, e2m1, e4m3, e8m0};
pub use memory::{Buffer, DeviceMemory, HostBuffer, HostBytes, HostMemory, View, ViewCopy};
pub use ops::*;
pub use program::{
    Banked, Fetch, LinkSample, NOWHERE, NoRoutePoints, ON_HOST, Program, RouteAsk, RoutePoint, RouteReply,
    RouteServer, Stage, TableChange, TableRow,
};
pub use weight::{Banks, Matrix, Weight};
