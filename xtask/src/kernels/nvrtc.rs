//! NVIDIA's run-time compiler as a library: found or fetched, opened, called. The only file of the chores with `unsafe`.
#![allow(unsafe_code, reason = "a C library")]

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use anyhow::{Context, Result, bail, ensure};
use libloading::Library;

use super::Target;

/// The package that holds the library, and its version: the bundle's bytes depend on it.
const PACKAGE: &str = "nvidia-cuda-nvrtc-cu12==12.8.93";
/// Where it is put.
const FETCHED: &str = "target/nvrtc";
/// The library in the package.
const LIBRARY: &str = if cfg!(windows) {
    "nvidia/cuda_nvrtc/bin/nvrtc64_120_0.dll"
} else {
    "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
};

/// A file as the compiler takes it.
pub(super) struct Source {
    /// Name without a folder.
    pub(super) name: String,
    file_name: CString,
    text: CString,
}

impl Source {
    /// Reads a file.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = fs::read(path).with_context(|| format!("{} cannot be read", path.display()))?;
        let name =
            path.file_name().and_then(|name| name.to_str()).context("a file name in UTF-8")?.to_owned();
        Ok(Source { file_name: CString::new(name.as_str())?, text: CString::new(text)?, name })
    }
}

/// What the compiler gives.
pub(super) struct Compiled {
    /// A cubin, or PTX as a C string.
    pub(super) image: Vec<u8>,
    /// What the assembler said; empty for PTX.
    pub(super) log: String,
}

type Handle = *mut c_void;
type Size = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
type Bytes = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;

/// The functions of the library that are used; they are valid while the library is open.
pub(super) struct Compiler {
    create: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Handle) -> c_int,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    log: (Size, Bytes),
    cubin: (Size, Bytes),
    ptx: (Size, Bytes),
    _library: Library,
}

impl Compiler {
    /// Opens the library.
    pub(super) fn open() -> Result<Self> {
        let path = find()?;
        // SAFETY: loading NVRTC runs no code but its initialisers.
        let library =
            unsafe { Library::new(&path) }.with_context(|| format!("{} cannot be loaded", path.display()))?;
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the name belongs to the function of this type in nvrtc.h of version 12.
                *unsafe { library.get($name) }.with_context(|| format!("{} is no NVRTC", path.display()))?
            };
        }
        let compiler = Compiler {
            create: function!(b"nvrtcCreateProgram\0"),
            compile: function!(b"nvrtcCompileProgram\0"),
            destroy: function!(b"nvrtcDestroyProgram\0"),
            error: function!(b"nvrtcGetErrorString\0"),
            log: (function!(b"nvrtcGetProgramLogSize\0"), function!(b"nvrtcGetProgramLog\0")),
            cubin: (function!(b"nvrtcGetCUBINSize\0"), function!(b"nvrtcGetCUBIN\0")),
            ptx: (function!(b"nvrtcGetPTXSize\0"), function!(b"nvrtcGetPTX\0")),
            _library: library,
        };
        Ok(compiler)
    }

    /// Compiles one file for one target.
    pub(super) fn compile(&self, source: &Source, headers: &[Source], target: Target) -> Result<Compiled> {
        let texts: Vec<*const c_char> = headers.iter().map(|header| header.text.as_ptr()).collect();
        let names: Vec<*const c_char> = headers.iter().map(|header| header.file_name.as_ptr()).collect();
        let mut program = Program { compiler: self, handle: ptr::null_mut() };
        // SAFETY: all strings end in zero and outlive the call; the arrays have as many elements as are announced.
        let code = unsafe {
            (self.create)(
                &mut program.handle,
                source.text.as_ptr(),
                source.file_name.as_ptr(),
                headers.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        self.check(code)?;
        let architecture = CString::new(format!("--gpu-architecture={}", super::usage::name(target)))?;
        let options = [architecture.as_ptr(), c"--std=c++17".as_ptr(), c"--ptxas-options=-v".as_ptr()];
        // PTX is not assembled, so there is nothing to report.
        let n_options = if matches!(target, Target::Ptx(..)) { 2 } else { 3 };
        // SAFETY: the program was created above; at least `n_options` strings, which outlive the call.
        let code = unsafe { (self.compile)(program.handle, n_options, options.as_ptr()) };
        let log = program.read(self.log)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        if code != 0 {
            bail!("{} for {}:\n{log}", source.name, super::usage::name(target));
        }
        let image = program.read(if matches!(target, Target::Ptx(..)) { self.ptx } else { self.cubin })?;
        Ok(Compiled { image, log })
    }

    fn check(&self, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the function answers any code with a string that lives for ever.
        let what = unsafe { CStr::from_ptr((self.error)(code)) };
        bail!("the CUDA compiler: {}", what.to_string_lossy())
    }
}

/// A program of the compiler, destroyed with this.
struct Program<'a> {
    compiler: &'a Compiler,
    handle: Handle,
}

impl Program<'_> {
    fn read(&self, (size, bytes): (Size, Bytes)) -> Result<Vec<u8>> {
        let mut n = 0;
        // SAFETY: the program is alive, and the size is written to `n`.
        self.compiler.check(unsafe { size(self.handle, &mut n) })?;
        let mut out = vec![0_u8; n];
        // SAFETY: the program is alive, and the library writes as many bytes as it just announced.
        self.compiler.check(unsafe { bytes(self.handle, out.as_mut_ptr().cast()) })?;
        Ok(out)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: created by this library and destroyed once.
            unsafe { (self.compiler.destroy)(&mut self.handle) };
        }
    }
}

/// The library: below the folder that the user names, or fetched.
fn find() -> Result<PathBuf> {
    if let Some(folder) = env::var_os("FREETOKEN_NVRTC").map(PathBuf::from) {
        let file = Path::new(LIBRARY).file_name().context("the library has a name")?;
        let places = [folder.join(LIBRARY), folder.join("lib").join(file), folder.join(file)];
        let found = places.into_iter().find(|path| path.is_file());
        return found
            .with_context(|| format!("FREETOKEN_NVRTC: no {} in {}", file.display(), folder.display()));
    }
    let path = Path::new(FETCHED).join(LIBRARY);
    if !path.is_file() {
        let python = if cfg!(windows) { "python" } else { "python3" };
        let arguments =
            ["-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--target", FETCHED];
        let status = Command::new(python)
            .args(arguments)
            .arg(PACKAGE)
            .status()
            .context("python3 cannot be started")?;
        ensure!(
            status.success(),
            "pip could not fetch {PACKAGE}; FREETOKEN_NVRTC may name a folder that has it"
        );
    }
    fs::canonicalize(&path).with_context(|| format!("{} is not in {PACKAGE}", path.display()))
}
