//! The file that compiled kernels travel in: an index of images, then the images of each target packed together, since one
//! kernel's machine code is much like another's. Knows no device.
//!
//! Little endian: 8 bytes magic, u32 number of images; for each image 32 bytes name (padded with zeros), u32 target, u32
//! bytes, u64 FNV-1a of the image, images of a target following each other; then for each target u32 packed bytes and an LZMA
//! file of its images one after the other.

use std::io::Read;

use lzma_rust2::LzmaReader;

/// Start of the file; the digit is the version.
pub(crate) const MAGIC: &[u8; 8] = b"ftkernl2";
/// Bytes of an image's name.
pub(crate) const NAME_BYTES: usize = 32;
/// Bytes of an entry of the index.
const ENTRY_BYTES: usize = NAME_BYTES + 16;
/// No image is larger.
const MAX_IMAGE_BYTES: usize = 16 << 20;
/// Memory that unpacking may take: the packer's window and little more.
const MAX_WINDOW_KIB: u32 = 32 << 10;
/// Added to the compute capability of a target that is PTX.
const PTX: u32 = 1 << 16;

/// What an image was compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Target {
    /// Machine code of a compute capability, major and minor: runs on cards of this major and at least this minor.
    Cubin(u32, u32),
    /// PTX of a compute capability: the driver compiles it for cards of at least this one.
    Ptx(u32, u32),
}

impl Target {
    /// As the index holds it.
    pub(crate) fn code(self) -> u32 {
        match self {
            Target::Cubin(major, minor) => major * 10 + minor,
            Target::Ptx(major, minor) => PTX + major * 10 + minor,
        }
    }

    fn from_code(code: u32) -> Self {
        let (major, minor) = (code % PTX / 10, code % PTX % 10);
        if code >= PTX { Target::Ptx(major, minor) } else { Target::Cubin(major, minor) }
    }
}

/// One module for one target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Image<'a> {
    /// Stem of the source file.
    pub(crate) module: &'a str,
    /// [`hash`] of the image.
    pub(crate) hash: u64,
    bytes: usize,
}

/// All modules for one target, still packed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pack<'a> {
    /// What they were compiled for.
    pub(crate) target: Target,
    /// The modules.
    pub(crate) images: Vec<Image<'a>>,
    packed: &'a [u8],
}

/// FNV-1a.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// What a bundle holds.
///
/// # Errors
/// What is wrong with the file.
pub(crate) fn packs(bundle: &[u8]) -> Result<Vec<Pack<'_>>, String> {
    let broken = || "the bundle of kernels is broken".to_owned();
    let rest = bundle.strip_prefix(MAGIC).ok_or_else(broken)?;
    let (n, rest) = rest.split_first_chunk::<4>().ok_or_else(broken)?;
    let index_bytes = (u32::from_le_bytes(*n) as usize).checked_mul(ENTRY_BYTES).ok_or_else(broken)?;
    let (index, mut data) = rest.split_at_checked(index_bytes).ok_or_else(broken)?;
    let mut packs: Vec<Pack<'_>> = Vec::new();
    for entry in index.chunks_exact(ENTRY_BYTES) {
        let (name, numbers) = entry.split_at(NAME_BYTES);
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        let number = |at: usize| {
            let bytes = numbers[at..at + 4].try_into().expect("four bytes of sixteen");
            u32::from_le_bytes(bytes)
        };
        let target = Target::from_code(number(0));
        if packs.last().is_none_or(|pack| pack.target != target) {
            packs.push(Pack { target, images: Vec::new(), packed: &[] });
        }
        packs.last_mut().expect("pushed above").images.push(Image {
            module: std::str::from_utf8(name).map_err(|_| broken())?,
            hash: u64::from(number(8)) | u64::from(number(12)) << 32,
            bytes: number(4) as usize,
        });
    }
    for pack in &mut packs {
        let (bytes, rest) = data.split_first_chunk::<4>().ok_or_else(broken)?;
        (pack.packed, data) =
            rest.split_at_checked(u32::from_le_bytes(*bytes) as usize).ok_or_else(broken)?;
    }
    if data.is_empty() { Ok(packs) } else { Err(broken()) }
}

impl Pack<'_> {
    /// Unpacks the images, in order.
    ///
    /// # Errors
    /// The bundle is broken here.
    pub(crate) fn unpack(&self) -> Result<Vec<Vec<u8>>, String> {
        let broken = |module: &str| format!("the bundle of kernels is broken in `{module}`");
        let mut reader =
            LzmaReader::new_mem_limit(self.packed, MAX_WINDOW_KIB, None).map_err(|_| broken("its head"))?;
        let read = |image: &Image<'_>| {
            let mut bytes = vec![0; image.bytes.min(MAX_IMAGE_BYTES)];
            let whole = reader.read_exact(&mut bytes).is_ok() && hash(&bytes) == image.hash;
            if whole { Ok(bytes) } else { Err(broken(image.module)) }
        };
        self.images.iter().map(read).collect()
    }
}
