//! Compute pipelines, each made once: by kernel, linkage and constants. Made when something is recorded, never in a step.

use std::{collections::HashMap, fs, num::NonZeroU32, path::PathBuf};

use wgpu::{
    BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry, BindingType, BufferBindingType,
    ComputePipeline, ComputePipelineDescriptor, Device, Features, PipelineCache, PipelineCacheDescriptor,
    PipelineCompilationOptions, PipelineLayoutDescriptor, ShaderModule, ShaderModuleDescriptor,
    ShaderRuntimeChecks, ShaderSource, ShaderStages,
};

use crate::kernels::{Chunks, Kernel, Linkage};

/// Values of a kernel's override constants.
pub(crate) type Constants = Vec<(&'static str, u32)>;

/// A pipeline and the layout that its bindings follow.
#[derive(Clone)]
pub(crate) struct Pipeline {
    pub(crate) pipeline: ComputePipeline,
    pub(crate) layout: BindGroupLayout,
}

/// All pipelines of a device.
pub(crate) struct Pipelines {
    modules: HashMap<(&'static str, Linkage), ShaderModule>,
    pipelines: HashMap<(&'static str, Linkage, Constants), Pipeline>,
    disk: Option<(PipelineCache, PathBuf)>,
    /// Pipelines made since the cache was last saved.
    unsaved: usize,
}

impl Pipelines {
    /// None yet; those of earlier processes come from the file, where the device can do that.
    pub(crate) fn new(device: &Device, file: Option<PathBuf>) -> Self {
        let disk = file.filter(|_| device.features().contains(Features::PIPELINE_CACHE));
        let disk = disk.map(|file| (from_disk(device, fs::read(&file).ok()), file));
        Pipelines { modules: HashMap::new(), pipelines: HashMap::new(), disk, unsaved: 0 }
    }

    /// The pipeline of a kernel with these constants.
    pub(crate) fn get(
        &mut self,
        device: &Device,
        kernel: &'static Kernel,
        linkage: Linkage,
        constants: Constants,
    ) -> Pipeline {
        let named = |name: &str| kernel.constants.iter().any(|(known, _)| *known == name);
        assert!(constants.iter().all(|(name, _)| named(name)), "{}: {constants:?}", kernel.name);
        let key = (kernel.name, linkage, constants);
        if let Some(found) = self.pipelines.get(&key) {
            return found.clone();
        }
        let module = self
            .modules
            .entry((kernel.name, linkage))
            .or_insert_with(|| module(device, kernel, linkage))
            .clone();
        let array = match linkage.chunks {
            Chunks::Array(n) => Some(("CHUNKS", n)),
            _ => None,
        };
        let values = key.2.iter().copied().chain(array).map(|(name, value)| (name, f64::from(value)));
        let values: Vec<(&str, f64)> = values.collect();
        let layout = layout(device, kernel, linkage);
        let pipeline_layout = device.create_pipeline_layout(&PipelineLayoutDescriptor {
            label: Some(kernel.name),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 4 * kernel.n_params as u32,
        });
        let pipeline = device.create_compute_pipeline(&ComputePipelineDescriptor {
            label: Some(kernel.name),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: PipelineCompilationOptions {
                constants: &values,
                // Zeroing takes drivers seconds to compile, and our kernels write before they read.
                zero_initialize_workgroup_memory: false,
            },
            cache: self.disk.as_ref().map(|(cache, _)| cache),
        });
        self.unsaved += 1;
        let made = Pipeline { pipeline, layout };
        self.pipelines.insert(key, made.clone());
        made
    }

    /// Writes what was made since the last time to the file. A cache that cannot be written is no error: it is a cache.
    pub(crate) fn save(&mut self) {
        let Some((cache, file)) = self.disk.as_ref().filter(|_| self.unsaved > 0) else { return };
        self.unsaved = 0;
        let Some(bytes) = cache.get_data() else { return };
        let partial = file.with_extension(format!("{}", std::process::id()));
        let made = file.parent().map_or(Ok(()), fs::create_dir_all);
        if made.and_then(|()| fs::write(&partial, bytes)).and_then(|()| fs::rename(&partial, file)).is_err() {
            _ = fs::remove_file(&partial);
        }
    }
}

#[allow(unsafe_code, reason = "a driver's cache comes from a file")]
fn from_disk(device: &Device, data: Option<Vec<u8>>) -> PipelineCache {
    let descriptor = PipelineCacheDescriptor { label: None, data: data.as_deref(), fallback: true };
    // SAFETY: the file is written by `save` alone, from what `get_data` gave; wgpu compares its header with the adapter and the
    // driver, and starts empty where they differ.
    unsafe { device.create_pipeline_cache(&descriptor) }
}

#[allow(unsafe_code, reason = "bounds checks in every inner loop cost more than the loop")]
fn module(device: &Device, kernel: &Kernel, linkage: Linkage) -> ShaderModule {
    let source = ShaderSource::Wgsl(kernel.module(linkage).into());
    let descriptor = ShaderModuleDescriptor { label: Some(kernel.name), source };
    // SAFETY: the shaders are our own and validated by this crate's tests; their indices are bounded by parameters that
    // `Op::check` held against the bindings, and their loops end. Ids, pages and slots in device memory are bounded by whoever
    // writes them, as for every backend.
    unsafe { device.create_shader_module_trusted(descriptor, ShaderRuntimeChecks::unchecked()) }
}

fn layout(device: &Device, kernel: &Kernel, linkage: Linkage) -> BindGroupLayout {
    let n_others = kernel.n_written + kernel.n_read;
    let (n, array) = match linkage.chunks {
        Chunks::None => (n_others, None),
        Chunks::Apart(n) => (n_others + n as usize, None),
        Chunks::Array(n) => (n_others + 1, NonZeroU32::new(n)),
    };
    let entry = |i: usize| BindGroupLayoutEntry {
        binding: i as u32,
        visibility: ShaderStages::COMPUTE,
        ty: BindingType::Buffer {
            ty: BufferBindingType::Storage { read_only: i >= kernel.n_written },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: array.filter(|_| i == n_others),
    };
    let entries: Vec<_> = (0..n).map(entry).collect();
    device
        .create_bind_group_layout(&BindGroupLayoutDescriptor { label: Some(kernel.name), entries: &entries })
}
