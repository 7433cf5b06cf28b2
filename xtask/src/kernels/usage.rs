//! What the assembler says about kernels: registers, spills, shared memory.

use super::Target;

/// One kernel on one target.
pub(super) struct Usage {
    pub(super) kernel: String,
    pub(super) target: Target,
    pub(super) registers: u32,
    pub(super) spilled_bytes: u32,
    pub(super) shared_bytes: u32,
}

/// Reads a compiler's log.
pub(super) fn read(log: &str, target: Target) -> Vec<Usage> {
    let mut all = Vec::new();
    let (mut kernel, mut spilled_bytes) = (String::new(), 0);
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            spilled_bytes = 0;
        }
        let before = |word: &str| {
            let (front, _) = line.split_once(word)?;
            front.split_whitespace().last()?.parse::<u32>().ok()
        };
        if let Some(stores) = before(" bytes spill stores") {
            spilled_bytes += stores + before(" bytes spill loads").unwrap_or(0);
        }
        if let Some(registers) = before(" registers") {
            let shared_bytes = before(" bytes smem").unwrap_or(0);
            all.push(Usage { kernel: kernel.clone(), target, registers, spilled_bytes, shared_bytes });
        }
    }
    all
}

/// Name of a target as the compiler takes it.
pub(super) fn name(target: Target) -> String {
    match target {
        Target::Cubin(major, minor) => format!("sm_{major}{minor}"),
        Target::Ptx(major, minor) => format!("compute_{major}{minor}"),
    }
}

/// Prints a line a kernel: registers on each target, spilled bytes and static shared memory where there are any.
pub(super) fn print(all: &[Usage]) {
    println!("registers of each kernel");
    for of_kernel in all.chunk_by(|a, b| a.kernel == b.kernel) {
        let mut line = format!("{:<36}", of_kernel[0].kernel);
        for usage in of_kernel {
            line += &format!(" {}:{}", name(usage.target), usage.registers);
            if usage.spilled_bytes > 0 {
                line += &format!(" SPILLS {} bytes", usage.spilled_bytes);
            }
        }
        let shared = of_kernel.iter().map(|usage| usage.shared_bytes).max().unwrap_or(0);
        if shared > 0 {
            line += &format!("  shared {shared}");
        }
        println!("{line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_read() {
        let log = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
    8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 8 bytes cumulative stack size, 256 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_90'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 22 registers, used 0 barriers
";
        let all = read(log, Target::Cubin(9, 0));
        let of = |u: &Usage| (u.kernel.clone(), u.registers, u.spilled_bytes, u.shared_bytes);
        assert_eq!(
            all.iter().map(of).collect::<Vec<_>>(),
            [("one".into(), 64, 12, 256), ("two".into(), 22, 0, 0)]
        );
    }
}
