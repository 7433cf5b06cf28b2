//! Host memory that a Vulkan device reads where it lies, made behind wgpu's back: what wgpu gives out is either device memory or
//! cannot stay mapped while the device reads it. Knows nothing of experts.

#![allow(unsafe_code, reason = "memory that both sides see, and an extension that wgpu does not know")]

use std::ptr::NonNull;

use ash::{ext::external_memory_host, vk};
use freetoken_backend::os;
use wgpu::{
    Adapter, BufferDescriptor, BufferUsages, BufferUses, Device, DeviceDescriptor, ExperimentalFeatures,
    Queue, RequestDeviceError,
    hal::{self, Device as _, api::Vulkan},
};

/// What memory of [`import`] is to Vulkan.
const HOST_ALLOCATION: vk::ExternalMemoryHandleTypeFlags =
    vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;
/// What the device may do with host memory.
const USAGE: BufferUsages = BufferUsages::STORAGE.union(BufferUsages::COPY_SRC);

/// Opens an adapter, with what [`import`] needs where the driver has it.
pub(crate) fn open(
    adapter: &Adapter,
    descriptor: &DeviceDescriptor<'_>,
) -> Result<(Device, Queue), RequestDeviceError> {
    // SAFETY: cooperative matrices are all that is used of what wgpu calls experimental, by shaders of our own.
    let experimental_features = unsafe { ExperimentalFeatures::enabled() };
    let descriptor = &DeviceDescriptor { experimental_features, ..descriptor.clone() };
    // SAFETY: the handle is used while `adapter` lives, to read properties and to open it.
    let vulkan = unsafe { adapter.as_hal::<Vulkan>() };
    let imports = |adapter: &hal::vulkan::Adapter| {
        let capabilities = adapter.physical_device_capabilities();
        capabilities.properties().api_version >= vk::API_VERSION_1_1
            && capabilities.supports_extension(external_memory_host::NAME)
    };
    let Some(vulkan) = vulkan.filter(|adapter| imports(adapter)) else {
        return pollster::block_on(adapter.request_device(descriptor));
    };
    // SAFETY: the callback adds an extension that the device has, and takes nothing away.
    let opened = unsafe {
        vulkan.open_with_callback(
            descriptor.required_features,
            &descriptor.required_limits,
            &descriptor.memory_hints,
            Some(Box::new(|device| device.extensions.push(external_memory_host::NAME))),
        )
    };
    match opened {
        // SAFETY: it was opened from this adapter, with these features.
        Ok(opened) => unsafe { adapter.create_device_from_hal::<Vulkan>(opened, descriptor) },
        Err(_) => pollster::block_on(adapter.request_device(descriptor)),
    }
}

/// Host memory that is also a buffer of the device. The buffer owns the memory.
pub(crate) struct SharedMemory {
    buffer: wgpu::Buffer,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the pointer is to memory that nothing else in this process points to, and is followed through `bytes` and `bytes_mut` only.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// What the device binds and copies from.
    pub(crate) fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the memory has this many bytes, all written at least once, and lives as long as `buffer`. The device only reads it:
        // its buffer has no usage that writes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

/// A buffer of a device, and its memory; freed with it.
struct Imported {
    device: ash::Device,
    buffer: vk::Buffer,
    memory: vk::DeviceMemory,
    /// Where it lies; given back to the system last.
    _owner: os::AnonymousMemory,
}

impl Drop for Imported {
    fn drop(&mut self) {
        // SAFETY: both were made on this device, which outlives its buffers; wgpu drops a buffer when the device is done with it, and a
        // null handle is nothing to free.
        unsafe {
            self.device.destroy_buffer(self.buffer, None);
            self.device.free_memory(self.memory, None);
        }
    }
}

/// Zeroed memory of the process that the driver pins and lends to the device; `None` where it refuses, or where the buffer would have more
/// than `most` bytes.
pub(crate) fn import(device: &Device, bytes: usize, most: usize) -> Option<SharedMemory> {
    // SAFETY: the handle is used while `device` lives, and not to destroy anything.
    let vulkan = unsafe { device.as_hal::<Vulkan>() }?;
    if !vulkan.enabled_device_extensions().contains(&external_memory_host::NAME) {
        return None;
    }
    let (instance, raw) = (vulkan.shared_instance().raw_instance(), vulkan.raw_device());
    let physical = vulkan.raw_physical_device();
    let mut limits = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
    let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut limits);
    // SAFETY: the physical device belongs to the instance, and is of Vulkan 1.1 at least: `open` looked.
    let types = unsafe {
        instance.get_physical_device_properties2(physical, &mut properties);
        instance.get_physical_device_memory_properties(physical)
    };
    let align = usize::try_from(limits.min_imported_host_pointer_alignment).ok()?;
    let size = Some(bytes.max(1).next_multiple_of(align)).filter(|size| *size <= most)?;
    let mut owner = os::anonymous(size + align).ok()?;
    let skipped = owner.as_ref().as_ptr().align_offset(align);
    let start = NonNull::from(owner.as_mut().get_mut(skipped..skipped + size)?).cast::<u8>();

    let mut seen = vk::MemoryHostPointerPropertiesEXT::default();
    let extension = external_memory_host::Device::new(instance, raw);
    // SAFETY: the range is aligned and mapped.
    let asked = unsafe {
        (extension.fp().get_memory_host_pointer_properties_ext)(
            raw.handle(),
            HOST_ALLOCATION,
            start.as_ptr().cast(),
            &mut seen,
        )
    };
    asked.result().ok()?;
    let (buffer, memory) = (vk::Buffer::null(), vk::DeviceMemory::null());
    let mut imported = Imported { device: raw.clone(), buffer, memory, _owner: owner };
    let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(HOST_ALLOCATION);
    let created = vk::BufferCreateInfo::default()
        .size(size as u64)
        .usage(vk::BufferUsageFlags::STORAGE_BUFFER | vk::BufferUsageFlags::TRANSFER_SRC)
        .push_next(&mut external);
    // SAFETY: everything is made on this device, from what it said of the pointer; the range stays mapped while `imported` lives, which
    // frees what was made if a later call fails.
    unsafe {
        imported.buffer = raw.create_buffer(&created, None).ok()?;
        let needed = raw.get_buffer_memory_requirements(imported.buffer);
        let kind = coherent_type(&types, seen.memory_type_bits & needed.memory_type_bits)
            .filter(|_| needed.size <= size as u64)?;
        let mut pointer = vk::ImportMemoryHostPointerInfoEXT::default()
            .handle_type(HOST_ALLOCATION)
            .host_pointer(start.as_ptr().cast());
        let allocated = vk::MemoryAllocateInfo::default()
            .allocation_size(size as u64)
            .memory_type_index(kind)
            .push_next(&mut pointer);
        imported.memory = raw.allocate_memory(&allocated, None).ok()?;
        raw.bind_buffer_memory(imported.buffer, imported.memory, 0).ok()?;
    }
    let handle = imported.buffer;
    // SAFETY: wgpu keeps the closure until the buffer is dropped and the device is done with it, and with it the handle.
    let buffer =
        unsafe { hal::vulkan::Buffer::from_raw_externally_owned(handle, Box::new(move || drop(imported))) };
    Some(SharedMemory { buffer: wrap(device, buffer, size), start, bytes })
}

/// A memory type among `allowed` that both sides see without flushes, one that the CPU caches if there is one.
fn coherent_type(types: &vk::PhysicalDeviceMemoryProperties, allowed: u32) -> Option<u32> {
    let visible = vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT;
    let has = |flags: vk::MemoryPropertyFlags| {
        (0..types.memory_type_count).find(|&i| {
            allowed & (1 << i) != 0 && types.memory_types[i as usize].property_flags.contains(flags)
        })
    };
    has(visible | vk::MemoryPropertyFlags::HOST_CACHED).or_else(|| has(visible))
}

/// Zeroed memory of the driver that the CPU caches and that stays mapped; `None` where the driver has none, or where the buffer would have
/// more than `most` bytes.
pub(crate) fn map(device: &Device, bytes: usize, most: usize) -> Option<SharedMemory> {
    // SAFETY: the handle is used while `device` lives, and not to destroy anything that wgpu knows.
    let vulkan = unsafe { device.as_hal::<Vulkan>() }?;
    let size = Some(bytes.max(1).next_multiple_of(256)).filter(|size| *size <= most)?;
    let descriptor = hal::BufferDescriptor {
        label: None,
        size: size as u64,
        // With MAP_WRITE it would lie in device memory where the CPU reaches that.
        usage: BufferUses::MAP_READ | BufferUses::STORAGE_READ_ONLY | BufferUses::COPY_SRC,
        memory_flags: hal::MemoryFlags::empty(),
    };
    // SAFETY: the buffer is ours until wgpu has it. The driver maps its memory when it is made and until it is destroyed, whatever
    // wgpu thinks of it; see `map_buffer` in the pinned version of wgpu-hal.
    unsafe {
        let buffer = vulkan.create_buffer(&descriptor).ok()?;
        let start = match vulkan.map_buffer(&buffer, 0..size as u64) {
            Ok(mapping) if mapping.is_coherent => mapping.ptr,
            _ => {
                vulkan.destroy_buffer(buffer);
                return None;
            }
        };
        start.as_ptr().write_bytes(0, size);
        Some(SharedMemory { buffer: wrap(device, buffer, size), start, bytes })
    }
}

/// Gives a buffer to wgpu, which destroys it after its last use.
fn wrap(device: &Device, buffer: hal::vulkan::Buffer, size: usize) -> wgpu::Buffer {
    let descriptor =
        BufferDescriptor { label: None, size: size as u64, usage: USAGE, mapped_at_creation: false };
    // SAFETY: the callers made it on this device, of this size and for this use, and its memory is zeroed.
    unsafe { device.create_buffer_from_hal::<Vulkan>(buffer, &descriptor) }
}
