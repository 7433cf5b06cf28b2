//! How an op becomes dispatches: a kernel with its constants, what it binds, its parameters and its grid, all resolved when
//! something is recorded. Encoding one makes nothing.

use std::collections::HashMap;

use freetoken_backend::{Format, View, Weight};
use wgpu::{BindGroup, BindGroupDescriptor, BindGroupEntry, BindingResource, ComputePass, ComputePipeline};

use crate::{
    device::Gpu,
    kernels::{Chunks, Kernel, Linkage},
    memory::{Slot, storage},
    pipelines::Pipelines,
};

/// Most words of parameters: 128 bytes.
const MAX_PARAMS: usize = 32;

/// One dispatch.
pub(crate) struct Dispatch {
    pipeline: ComputePipeline,
    bindings: BindGroup,
    params: [u32; MAX_PARAMS],
    n_params: usize,
    workgroups: [u32; 3],
    /// An estimate of floating-point operations: long submissions are cut by it.
    pub(crate) work: u64,
}

impl Dispatch {
    /// Puts it into a pass.
    pub(crate) fn encode(&self, pass: &mut ComputePass<'_>) {
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &self.bindings, &[]);
        pass.set_immediates(0, bytemuck::cast_slice(&self.params[..self.n_params]));
        let [x, y, z] = self.workgroups;
        pass.dispatch_workgroups(x, y, z);
    }
}

/// Memory between the dispatches of one op. Shared by all ops and programs of a device: they run one after the other.
#[derive(Default)]
pub(crate) struct Scratch(HashMap<&'static str, wgpu::Buffer>);

impl Scratch {
    /// At least `bytes` bytes under this name. A larger wish makes a new buffer; what was recorded keeps the old one.
    pub(crate) fn get(&mut self, gpu: &Gpu, name: &'static str, bytes: usize) -> wgpu::Buffer {
        match self.0.get(name) {
            Some(buffer) if buffer.size() >= bytes as u64 => buffer.clone(),
            _ => {
                let buffer = storage(&gpu.device, bytes);
                self.0.insert(name, buffer.clone());
                buffer
            }
        }
    }
}

/// Collects dispatches.
pub(crate) struct Recorder<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) pipelines: &'a mut Pipelines,
    pub(crate) scratch: &'a mut Scratch,
    pub(crate) dispatches: Vec<Dispatch>,
    /// Of the op that is recorded, for each of its dispatches.
    pub(crate) work: u64,
}

/// A kernel about to be dispatched.
pub(crate) struct Call<'a> {
    pub(crate) kernel: &'static Kernel,
    pub(crate) constants: Vec<(&'static str, u32)>,
    /// Written ones first, as the kernel numbers them; without chunks.
    pub(crate) slots: Vec<Slot>,
    /// A window of experts: a power of two of chunks, at most [`Gpu::max_window`].
    pub(crate) chunks: &'a [Slot],
    pub(crate) params: &'a [u32],
    pub(crate) workgroups: [u32; 3],
}

impl Recorder<'_> {
    /// Adds a dispatch. One with an empty grid is left out.
    pub(crate) fn call(&mut self, call: Call<'_>) {
        let Call { kernel, constants, slots, chunks, params, workgroups } = call;
        if workgroups.contains(&0) {
            return;
        }
        let (name, most) = (kernel.name, self.gpu.limits.max_compute_workgroups_per_dimension);
        assert_eq!(params.len(), kernel.n_params, "{name}: parameters");
        assert_eq!(slots.len(), kernel.n_written + kernel.n_read, "{name}: bindings");
        assert_eq!(kernel.has_chunks(), !chunks.is_empty(), "{name}: chunks");
        assert!(workgroups.iter().all(|&n| n <= most), "{name}: a grid of {workgroups:?}");
        let window = match chunks.len() as u32 {
            0 => Chunks::None,
            n if n > 1 && self.gpu.binds_arrays() => Chunks::Array(n),
            n => Chunks::Apart(n),
        };
        let has_scales = constants.iter().any(|(name, format)| *name == "FORMAT" && *format >= CODES_FORMAT);
        let staged = kernel.has_products() && has_scales;
        let linkage = Linkage { subgroups: self.gpu.subgroups.is_some(), chunks: window, staged };
        let pipeline = self.pipelines.get(&self.gpu.device, kernel, linkage, constants);
        let chunks: Vec<_> = chunks.iter().map(Slot::binding).collect();
        let mut resources: Vec<_> =
            slots.iter().map(|slot| BindingResource::Buffer(slot.binding())).collect();
        match window {
            Chunks::Array(_) => resources.push(BindingResource::BufferArray(&chunks)),
            _ => resources.extend(chunks.iter().cloned().map(BindingResource::Buffer)),
        }
        let entry = |(i, resource)| BindGroupEntry { binding: i as u32, resource };
        let bindings = self.gpu.device.create_bind_group(&BindGroupDescriptor {
            label: Some(name),
            layout: &pipeline.layout,
            entries: &resources.into_iter().enumerate().map(entry).collect::<Vec<_>>(),
        });
        let mut words = [0; MAX_PARAMS];
        words[..params.len()].copy_from_slice(params);
        self.dispatches.push(Dispatch {
            pipeline: pipeline.pipeline,
            bindings,
            params: words,
            n_params: params.len(),
            workgroups,
            work: self.work,
        });
    }

    /// The first `bytes` bytes of a view.
    pub(crate) fn slot(&self, view: &View, bytes: usize) -> Slot {
        Slot::of(view, bytes, self.gpu.align())
    }

    /// The first `n` 32-bit words of a view.
    pub(crate) fn words(&self, view: &View, n: usize) -> Slot {
        self.slot(view, 4 * n)
    }

    /// All of a weight that is codes only.
    pub(crate) fn weight(&self, weight: &Weight) -> Slot {
        self.slot(&weight.view, weight.code_bytes())
    }

    /// A vector of weights that may be missing: what to bind, the offset in elements, and the format's code.
    pub(crate) fn optional(&self, weight: Option<&Weight>) -> (Slot, u32, u32) {
        match weight {
            Some(weight) => {
                let slot = self.weight(weight);
                let at = slot.at(weight.format.row_bytes(1));
                (slot, at, format_code(weight.format))
            }
            None => (self.nothing(), 0, NO_FORMAT),
        }
    }

    /// Something to bind where a kernel has nothing to read.
    pub(crate) fn nothing(&self) -> Slot {
        Slot::whole(&self.gpu.nothing)
    }

    /// A grid of `n` workgroups in the first two dimensions; a little more where `n` is large, which kernels must expect.
    pub(crate) fn grid(&self, n: usize) -> [u32; 3] {
        let most = self.gpu.limits.max_compute_workgroups_per_dimension as usize;
        let rows = n.div_ceil(most).max(1);
        [n.div_ceil(rows) as u32, rows as u32, 1]
    }
}

/// `NONE` of format.wgsl.
const NO_FORMAT: u32 = 3;
/// `FP8` of format.wgsl: it and those behind it have scales.
const CODES_FORMAT: u32 = 4;

/// The format's number in format.wgsl.
pub(crate) fn format_code(format: Format) -> u32 {
    match format {
        Format::F32 => 0,
        Format::Bf16 => 1,
        Format::F16 => 2,
        Format::Fp8 => CODES_FORMAT,
        Format::Nvfp4 => 5,
        Format::Mxfp4 => 6,
    }
}
