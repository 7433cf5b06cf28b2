//! Which adapters there are, and which one `--backend wgpu` means. Opens none of them.

use std::{fmt, str::FromStr};

use freetoken_backend::{Error, Result, os};
use wgpu::{
    Adapter, CooperativeScalarType, DeviceType, Features, Instance, InstanceDescriptor, InstanceFlags,
};

/// Bytes of parameters that every dispatch may carry.
pub(crate) const IMMEDIATE_BYTES: u32 = 128;
/// Storage buffers that one dispatch of our kernels binds at least.
pub(crate) const MIN_STORAGE_BUFFERS: u32 = 8;

/// Which adapter to open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Select {
    /// The fastest kind there is: a discrete GPU, an integrated or a virtual one, software at last.
    Any,
    /// The same without software.
    Hardware,
    /// By its place in [`adapters`].
    Index(usize),
    /// The first whose name contains this, in any case.
    Name(String),
}

impl FromStr for Select {
    type Err = String;

    /// What follows `wgpu:` in `--backend`: a number, or part of a name.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match (text.trim(), text.trim().parse()) {
            ("", _) => Err("`wgpu:` wants the number or a part of the name of an adapter".into()),
            (_, Ok(index)) => Ok(Select::Index(index)),
            (name, _) => Ok(Select::Name(name.to_string())),
        }
    }
}

impl fmt::Display for Select {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Select::Any | Select::Hardware => f.write_str("wgpu"),
            Select::Index(index) => write!(f, "wgpu:{index}"),
            Select::Name(name) => write!(f, "wgpu:{name}"),
        }
    }
}

/// What an adapter says about itself.
#[derive(Debug, Clone)]
pub struct AdapterFacts {
    /// Its place in the list.
    pub index: usize,
    /// Name of the device.
    pub name: String,
    /// The interface it is reached through: `Vulkan`, `Metal`, `Dx12`.
    pub api: String,
    /// Name and version of the driver.
    pub driver: String,
    /// `discrete`, `integrated`, `virtual`, `software` or `other`.
    pub kind: &'static str,
    /// Whether a CPU does the work.
    pub software: bool,
    /// Its memory, in bytes; `None` where the interface does not tell.
    pub memory_bytes: Option<u64>,
    /// Largest range that a dispatch may bind, in bytes.
    pub max_binding_bytes: u64,
    /// Largest buffer, in bytes.
    pub max_buffer_bytes: u64,
    /// Buffers that a dispatch may bind.
    pub max_storage_buffers: u32,
    /// Threads of a workgroup.
    pub max_workgroup_threads: u32,
    /// Smallest and largest subgroup, where it has subgroups.
    pub subgroups: Option<(u32, u32)>,
    /// Whether shaders may compute in f16.
    pub f16: bool,
    /// Whether subgroups, of 32 lanes, multiply matrices of 16 x 16 halves and add them up in f32.
    pub cooperative: bool,
    /// Why it cannot be used, if so.
    pub refusal: Option<String>,
}

/// Every adapter of every driver, in the order in which `wgpu:INDEX` counts them.
pub fn adapters() -> Vec<AdapterFacts> {
    enumerate().iter().enumerate().map(|(index, adapter)| facts(index, adapter)).collect()
}

fn enumerate() -> Vec<Adapter> {
    let descriptor = InstanceDescriptor {
        flags: InstanceFlags::empty(),
        ..InstanceDescriptor::new_without_display_handle()
    };
    pollster::block_on(Instance::new(descriptor).enumerate_adapters(wgpu::Backends::PRIMARY))
}

fn facts(index: usize, adapter: &Adapter) -> AdapterFacts {
    let (info, limits, features) = (adapter.get_info(), adapter.limits(), adapter.features());
    let kind = match info.device_type {
        DeviceType::DiscreteGpu => "discrete",
        DeviceType::IntegratedGpu => "integrated",
        DeviceType::VirtualGpu => "virtual",
        DeviceType::Cpu => "software",
        DeviceType::Other => "other",
    };
    let software = info.device_type == DeviceType::Cpu;
    AdapterFacts {
        index,
        api: info.backend.to_string(),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_string(),
        kind,
        software,
        memory_bytes: if software { os::total_memory() } else { device_memory(adapter) },
        max_binding_bytes: limits.max_storage_buffer_binding_size,
        max_buffer_bytes: limits.max_buffer_size,
        max_storage_buffers: limits.max_storage_buffers_per_shader_stage,
        max_workgroup_threads: limits.max_compute_invocations_per_workgroup,
        subgroups: features
            .contains(Features::SUBGROUP)
            .then_some((info.subgroup_min_size, info.subgroup_max_size)),
        f16: features.contains(Features::SHADER_F16),
        cooperative: is_cooperative(adapter),
        refusal: refusal(&limits, features),
        name: info.name,
    }
}

/// What shaders need to multiply cooperative matrices.
pub(crate) const COOPERATIVE: Features =
    Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(Features::SHADER_F16).union(Features::SUBGROUP);

fn is_cooperative(adapter: &Adapter) -> bool {
    let info = adapter.get_info();
    adapter.features().contains(COOPERATIVE)
        && (info.subgroup_min_size, info.subgroup_max_size) == (32, 32)
        && adapter.cooperative_matrix_properties().iter().any(|matrix| {
            (matrix.m_size, matrix.n_size, matrix.k_size) == (16, 16, 16)
                && (matrix.ab_type, matrix.cr_type)
                    == (CooperativeScalarType::F16, CooperativeScalarType::F32)
        })
}

/// What our kernels need and the adapter lacks.
fn refusal(limits: &wgpu::Limits, features: Features) -> Option<String> {
    if !features.contains(Features::IMMEDIATES) || limits.max_immediate_size < IMMEDIATE_BYTES {
        return Some(format!("the driver gives shaders fewer than {IMMEDIATE_BYTES} bytes of parameters"));
    }
    if limits.max_storage_buffers_per_shader_stage < MIN_STORAGE_BUFFERS {
        let n = limits.max_storage_buffers_per_shader_stage;
        return Some(format!("a shader may use {n} buffers, and {MIN_STORAGE_BUFFERS} are needed"));
    }
    if limits.max_compute_invocations_per_workgroup < 256 || limits.max_compute_workgroup_storage_size < 16384
    {
        return Some("its workgroups are smaller than 256 threads and 16 KiB".into());
    }
    None
}

/// Bytes of the heaps that lie on the device.
#[cfg(not(target_vendor = "apple"))]
#[allow(unsafe_code, reason = "wgpu does not tell how much memory a device has; Vulkan does")]
fn device_memory(adapter: &Adapter) -> Option<u64> {
    const DEVICE_LOCAL: u32 = 1;
    // SAFETY: the handle is used while `adapter` lives, to read properties only.
    let vulkan = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let instance = vulkan.shared_instance().raw_instance();
    // SAFETY: the physical device belongs to this instance, and both live as long as `adapter`.
    let memory = unsafe { instance.get_physical_device_memory_properties(vulkan.raw_physical_device()) };
    let heaps = &memory.memory_heaps[..memory.memory_heap_count as usize];
    Some(heaps.iter().filter(|heap| heap.flags.as_raw() & DEVICE_LOCAL != 0).map(|heap| heap.size).sum())
}

#[cfg(target_vendor = "apple")]
fn device_memory(_adapter: &Adapter) -> Option<u64> {
    os::total_memory()
}

/// The adapter that `select` means.
///
/// # Errors
/// [`Error::Unsupported`] when there is none, or when it lacks what our kernels need.
pub(crate) fn find(select: &Select) -> Result<(Adapter, AdapterFacts)> {
    let all: Vec<_> = enumerate()
        .into_iter()
        .enumerate()
        .map(|(index, adapter)| {
            let facts = facts(index, &adapter);
            (adapter, facts)
        })
        .collect();
    if all.is_empty() {
        return Err(unsupported(
            "no driver offers an adapter: install a Vulkan driver, or use --backend cpu".into(),
        ));
    }
    let names = all.iter().map(|(_, facts)| format!("{} {}", facts.index, facts.name));
    let names = names.collect::<Vec<_>>().join(", ");
    let best = |all: Vec<(Adapter, AdapterFacts)>, software: bool| {
        let usable = |facts: &AdapterFacts| facts.refusal.is_none() && (software || !facts.software);
        all.into_iter().filter(|(_, facts)| usable(facts)).min_by_key(|(_, facts)| rank(facts))
    };
    let found = match select {
        Select::Any => best(all, true),
        Select::Hardware => best(all, false),
        Select::Index(index) => all.into_iter().nth(*index),
        Select::Name(name) => {
            let name = name.to_lowercase();
            all.into_iter().find(|(_, facts)| facts.name.to_lowercase().contains(&name))
        }
    };
    let Some((adapter, facts)) = found else {
        if *select == Select::Hardware {
            return Err(unsupported(format!("there are software adapters only: {names}")));
        }
        return Err(unsupported(format!("no adapter answers to `{select}`: there are {names}")));
    };
    match &facts.refusal {
        Some(why) => Err(unsupported(format!("{} cannot be used: {why}", facts.name))),
        None => Ok((adapter, facts)),
    }
}

fn unsupported(why: String) -> Error {
    Error::Unsupported { backend: "wgpu", op: "open", why }
}

/// Lower is faster.
fn rank(facts: &AdapterFacts) -> usize {
    ["discrete", "integrated", "virtual", "other", "software"]
        .iter()
        .position(|&kind| kind == facts.kind)
        .expect("a kind that `facts` gives")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_the_colon() {
        let select = |text: &str| text.parse::<Select>().unwrap();
        assert!("".parse::<Select>().is_err());
        assert_eq!(select("2"), Select::Index(2));
        assert_eq!(select("llvmpipe"), Select::Name("llvmpipe".into()));
        assert_eq!(select("2").to_string(), "wgpu:2");
    }

    #[test]
    fn an_adapter_that_does_not_exist_is_named_in_the_error() {
        let error = find(&Select::Name("no such adapter".into())).err().unwrap().to_string();
        assert!(
            error.contains("no adapter answers to `wgpu:no such adapter`") || error.contains("no driver"),
            "{error}"
        );
    }
}
