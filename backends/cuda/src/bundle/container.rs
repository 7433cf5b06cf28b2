//! The file that compiled kernels travel in: an index of images, then each image deflated. Knows no device.
//!
//! Little endian: 8 bytes magic, u32 number of images; for each image 32 bytes name (padded with zeros), u32 target, u32
//! bytes, u32 deflated bytes, u64 FNV-1a of the image; then the deflated images one after the other.

/// Start of the file; the digit is the version.
pub(crate) const MAGIC: &[u8; 8] = b"ftkernl1";
/// Bytes of an image's name.
pub(crate) const NAME_BYTES: usize = 32;
/// Bytes of an entry of the index.
const ENTRY_BYTES: usize = NAME_BYTES + 20;
/// No image is larger.
const MAX_IMAGE_BYTES: usize = 16 << 20;
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

/// One module for one target, still deflated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Image<'a> {
    /// Stem of the source file.
    pub(crate) module: &'a str,
    /// What it was compiled for.
    pub(crate) target: Target,
    /// [`hash`] of the image.
    pub(crate) hash: u64,
    bytes: usize,
    deflated: &'a [u8],
}

/// FNV-1a.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The index of a bundle.
///
/// # Errors
/// What is wrong with the file.
pub(crate) fn images(bundle: &[u8]) -> Result<Vec<Image<'_>>, String> {
    let broken = || "the bundle of kernels is broken".to_owned();
    let rest = bundle.strip_prefix(MAGIC).ok_or_else(broken)?;
    let (n, rest) = rest.split_first_chunk::<4>().ok_or_else(broken)?;
    let index_bytes = (u32::from_le_bytes(*n) as usize).checked_mul(ENTRY_BYTES).ok_or_else(broken)?;
    let (index, mut data) = rest.split_at_checked(index_bytes).ok_or_else(broken)?;
    let mut images = Vec::new();
    for entry in index.chunks_exact(ENTRY_BYTES) {
        let (name, numbers) = entry.split_at(NAME_BYTES);
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        let number = |at: usize| {
            let bytes = numbers[at..at + 4].try_into().expect("four bytes of twenty");
            u32::from_le_bytes(bytes)
        };
        let (deflated, rest) = data.split_at_checked(number(8) as usize).ok_or_else(broken)?;
        data = rest;
        images.push(Image {
            module: std::str::from_utf8(name).map_err(|_| broken())?,
            target: Target::from_code(number(0)),
            hash: u64::from(number(12)) | u64::from(number(16)) << 32,
            bytes: number(4) as usize,
            deflated,
        });
    }
    if data.is_empty() { Ok(images) } else { Err(broken()) }
}

impl Image<'_> {
    /// Inflates the image.
    ///
    /// # Errors
    /// The bundle is broken here.
    pub(crate) fn inflate(&self) -> Result<Vec<u8>, String> {
        let limit = self.bytes.min(MAX_IMAGE_BYTES);
        miniz_oxide::inflate::decompress_to_vec_with_limit(self.deflated, limit)
            .ok()
            .filter(|image| image.len() == self.bytes && hash(image) == self.hash)
            .ok_or_else(|| format!("the bundle of kernels is broken in `{}`", self.module))
    }
}
