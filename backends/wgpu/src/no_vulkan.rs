//! Where there is no Vulkan: the same functions, which share nothing. See `vulkan`.

use wgpu::{Adapter, Device, DeviceDescriptor, Queue, RequestDeviceError};

/// Opens an adapter.
pub(crate) fn open(
    adapter: &Adapter,
    descriptor: &DeviceDescriptor<'_>,
) -> Result<(Device, Queue), RequestDeviceError> {
    pollster::block_on(adapter.request_device(descriptor))
}

/// Host memory that is also a buffer of the device: there is none.
pub(crate) enum SharedMemory {}

impl SharedMemory {
    pub(crate) fn buffer(&self) -> &wgpu::Buffer {
        match *self {}
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match *self {}
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match *self {}
    }
}

pub(crate) fn import(_device: &Device, _bytes: usize, _most: usize) -> Option<SharedMemory> {
    None
}

pub(crate) fn map(_device: &Device, _bytes: usize, _most: usize) -> Option<SharedMemory> {
    None
}
