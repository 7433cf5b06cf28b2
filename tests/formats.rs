//! Quantised checkpoints: what their weights are, element by element, and the sentence for each that is wrong.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use freetoken::{
    formats::{Checkpoint, Dtype, FormatError, quantised},
    model_files::ModelFiles,
    models::{Inventory, Synthetic, SyntheticCheckpoint, TensorError, WeightSource, Weights},
};
use freetoken_backend::{
    Activation, Backend, Format, HostBytes, MatMul, MatMulParams, Matrix, Precision, Weight,
};
use freetoken_cpu::{Cpu, CpuOptions};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Tensors in memory.
#[derive(Clone, Default)]
struct Tensors(BTreeMap<String, (Dtype, Vec<usize>, HostBytes)>);

impl Tensors {
    fn with(mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Self {
        let bytes = HostBytes::new(std::sync::Arc::new(bytes.to_vec()));
        self.0.insert(name.into(), (dtype, shape.to_vec(), bytes));
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.0.remove(name).unwrap();
        self
    }
}

impl WeightSource for Tensors {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<(Dtype, HostBytes), TensorError> {
        let missing = || FormatError::MissingTensor {
            dir: "memory".into(),
            tensor: name.into(),
            n_tensors: self.0.len(),
            nearest: None,
        };
        let (dtype, found, bytes) = self.0.get(name).ok_or_else(missing)?;
        if found != shape {
            let (name, found, expected) = (name.into(), found.clone(), shape.to_vec());
            return Err(TensorError::Shape { name, found, expected });
        }
        Ok((*dtype, bytes.clone()))
    }

    fn spec(&self, name: &str) -> Option<(Dtype, Vec<usize>)> {
        self.0.get(name).map(|(dtype, shape, _)| (*dtype, shape.clone()))
    }
}

fn load(source: &dyn WeightSource, names: &[&str], rows: usize, cols: usize) -> Result<Matrix, String> {
    let cpu = Cpu::reference();
    let mut heard = |_| ();
    let pieces: Vec<(String, usize)> = names.iter().map(|name| (name.to_string(), rows)).collect();
    Weights::new(&cpu, source, &mut heard).stacked(&pieces, cols).map_err(|e| e.to_string())
}

fn view(cpu: &Cpu, values: &[f32]) -> freetoken_backend::View {
    let view = cpu.alloc(values.len() * 4).unwrap().whole();
    cpu.write(&view, bytemuck::cast_slice(values)).unwrap();
    view
}

/// The elements of a weight as a device computes with them: its product with the unit matrix, transposed.
fn elements(cpu: &Cpu, weight: &Weight) -> Vec<f32> {
    let Weight { rows, cols, .. } = *weight;
    let mut unit = vec![0.0_f32; cols * cols];
    (0..cols).for_each(|c| unit[c * cols + c] = 1.0);
    let out = cpu.alloc(cols * rows * 4).unwrap().whole();
    let op = MatMul {
        out: out.clone(),
        x: view(cpu, &unit),
        rows: None,
        norm: None,
        weight: weight.clone().into(),
        bias: None,
        p: MatMulParams {
            n_rows: cols as u32,
            in_features: cols as u32,
            out_features: rows as u32,
            activation: Activation::None as u32,
            accumulate: 0,
            eps: 0.0,
        },
    };
    cpu.run(&[op.into()]).unwrap();
    let mut columns = vec![0.0_f32; cols * rows];
    cpu.read(&out, bytemuck::cast_slice_mut(&mut columns)).unwrap();
    (0..rows * cols).map(|i| columns[i % cols * rows + i / cols]).collect()
}

/// The value of a number of a sign, `exponent_bits` and `mantissa_bits`, by definition.
fn minifloat(code: u8, exponent_bits: u32, mantissa_bits: u32, bias: i32) -> f64 {
    let mantissa = u32::from(code) & ((1 << mantissa_bits) - 1);
    let exponent = (u32::from(code) >> mantissa_bits & ((1 << exponent_bits) - 1)) as i32;
    let fraction = mantissa as f64 / f64::from(1 << mantissa_bits);
    let magnitude = match exponent {
        0 => fraction * 2_f64.powi(1 - bias),
        _ => (1.0 + fraction) * 2_f64.powi(exponent - bias),
    };
    if u32::from(code) >> (exponent_bits + mantissa_bits) & 1 == 1 { -magnitude } else { magnitude }
}

/// Element `(row, col)` of a weight in a checkpoint, from the raw bytes of its tensors.
fn element(checkpoint: &Checkpoint, module: &str, cols: usize, row: usize, col: usize) -> f64 {
    let tensor = |end: &str| checkpoint.tensor(&format!("{module}{end}")).ok();
    let packed = |codes: &[u8]| minifloat(codes[(row * cols + col) / 2] >> (col % 2 * 4) & 15, 2, 1, 1);
    let e8m0 = |code: u8| 2_f64.powi(i32::from(code) - 127);
    let block = |shape: &[usize]| row / 128 * shape[1] + col / 128;
    if let Some(codes) = tensor(".weight_packed") {
        let scale = tensor(".weight_scale").unwrap().bytes.as_slice()[row * (cols / 16) + col / 16];
        let divisor: f32 =
            bytemuck::pod_read_unaligned(tensor(".weight_global_scale").unwrap().bytes.as_slice());
        return packed(codes.bytes.as_slice()) * minifloat(scale, 4, 3, 7) / divisor as f64;
    }
    let codes = tensor(".weight").unwrap();
    let bytes = codes.bytes.as_slice();
    match codes.dtype {
        Dtype::BF16 => {
            half::bf16::from_le_bytes([bytes[2 * (row * cols + col)], bytes[2 * (row * cols + col) + 1]])
                .to_f64()
        }
        Dtype::U8 => {
            let scale = tensor(".weight_scale").unwrap().bytes.as_slice()[row * (cols / 16) + col / 16];
            let factor: f32 =
                bytemuck::pod_read_unaligned(tensor(".weight_scale_2").unwrap().bytes.as_slice());
            packed(bytes) * minifloat(scale, 4, 3, 7) * factor as f64
        }
        Dtype::I8 => {
            packed(bytes) * e8m0(tensor(".scale").unwrap().bytes.as_slice()[row * (cols / 32) + col / 32])
        }
        Dtype::F8_E4M3 => {
            let scale = match tensor(".weight_scale_inv").or_else(|| tensor(".weight_scale")) {
                Some(scale) if scale.shape.is_empty() => {
                    f64::from(bytemuck::pod_read_unaligned::<f32>(scale.bytes.as_slice()))
                }
                Some(scale) => {
                    let at = 2 * block(&scale.shape);
                    half::bf16::from_le_bytes([scale.bytes.as_slice()[at], scale.bytes.as_slice()[at + 1]])
                        .to_f64()
                }
                None => {
                    let scale = tensor(".scale").unwrap();
                    e8m0(scale.bytes.as_slice()[block(&scale.shape)])
                }
            };
            minifloat(bytes[row * cols + col], 4, 3, 7) * scale
        }
        other => panic!("{module}: {other}"),
    }
}

/// Every matrix of a checkpoint is what the definition of its format says, on the reference and on every instruction set.
fn check_checkpoint(dir: &Path) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let mut cpus = Cpu::every_isa(CpuOptions { threads: Some(2), precision: Precision::F32 }).unwrap();
    cpus.push(Cpu::reference());
    let mut n_quantised = 0;
    for name in checkpoint.tensor_names() {
        let Some(module) = name.strip_suffix(".weight").or_else(|| name.strip_suffix(".weight_packed"))
        else {
            continue;
        };
        let tensor = checkpoint.tensor(name).unwrap();
        let [rows, width] = tensor.shape[..] else { continue };
        let cols = if matches!(tensor.dtype, Dtype::U8 | Dtype::I8) { 2 * width } else { width };
        let weight = load(&checkpoint, &[&format!("{module}.weight")], rows, cols).unwrap();
        n_quantised += usize::from(weight.format().group().is_some());
        let expected: Vec<f64> =
            (0..rows * cols).map(|i| element(&checkpoint, module, cols, i / cols, i % cols)).collect();
        for cpu in &cpus {
            let got = elements(cpu, &weight.pieces()[0]);
            for (i, (got, want)) in got.iter().zip(&expected).enumerate() {
                let detail = &cpu.caps().detail;
                assert!(
                    (*got as f64 - want).abs() <= 3e-7 * want.abs(),
                    "{name} {i} on {detail}: {got}, {want}"
                );
            }
        }
    }
    assert!(n_quantised > 0, "{}", dir.display());
}

#[test]
fn weights_are_what_their_format_defines() {
    for family in ["qwen3_moe", "qwen3_5_moe"] {
        for layout in ["fp8-block", "nvfp4-ct", "nvfp4-modelopt"] {
            check_checkpoint(&golden(&format!("{family}-{layout}")));
        }
    }
}

/// DeepSeek's e4m3 with power-of-two blocks, and its 4-bit experts; and gpt-oss's blocks, which are rows cut in pieces of 16 bytes.
#[test]
fn weights_outside_of_the_project() {
    let Some(folder) = std::env::var_os("FREETOKEN_GOLDEN").map(PathBuf::from) else {
        eprintln!(
            "SKIPPED: FREETOKEN_GOLDEN is not set: DeepSeek V4's and gpt-oss's weights were not checked"
        );
        return;
    };
    check_checkpoint(&folder.join("deepseek_v4-fp8-fp4"));

    let checkpoint = Checkpoint::open(&folder.join("gpt_oss-mxfp4")).unwrap();
    let part = |end: &str| checkpoint.tensor(&format!("model.layers.1.mlp.experts.down_proj_{end}")).unwrap();
    let (blocks, scales) = (part("blocks"), part("scales"));
    let [n_experts, rows, groups, 16] = blocks.shape[..] else { panic!("{:?}", blocks.shape) };
    let (cpu, cols) = (Cpu::reference(), 32 * groups);
    for expert in 0..n_experts {
        let of = |bytes: &HostBytes| {
            let size = bytes.len() / n_experts;
            bytes.slice(expert * size..(expert + 1) * size)
        };
        let (codes, scales) = (of(&blocks.bytes), of(&scales.bytes));
        let place = |bytes: &HostBytes| cpu.import(bytes).unwrap().whole();
        let weight = Weight {
            view: place(&codes),
            scales: Some(place(&scales)),
            globals: None,
            format: Format::Mxfp4,
            rows,
            cols,
        };
        for (i, got) in elements(&cpu, &weight).iter().enumerate() {
            let scale = 2_f64.powi(i32::from(scales.as_slice()[i / 32]) - 127);
            let code = codes.as_slice()[i / 2] >> (i % 2 * 4) & 15;
            assert_eq!(*got as f64, minifloat(code, 2, 1, 1) * scale, "expert {expert} element {i}");
        }
    }
}

#[test]
fn a_scale_may_be_of_the_whole_matrix_or_of_a_row() {
    // Codes of 1.0 and 2.0.
    let codes: Vec<u8> = (0..6).map(|i| if i % 2 == 0 { 0x38 } else { 0x40 }).collect();
    let base = Tensors::default().with("a.weight", Dtype::F8_E4M3, &[2, 3], &codes);
    let floats = |values: &[f32]| bytemuck::cast_slice::<_, u8>(values).to_vec();
    for (shape, scales, expected) in [
        (&[][..], vec![0.5], [0.5, 1.0, 0.5, 1.0, 0.5, 1.0]),
        (&[1], vec![0.5], [0.5, 1.0, 0.5, 1.0, 0.5, 1.0]),
        (&[2], vec![1.0, 3.0], [1.0, 2.0, 1.0, 6.0, 3.0, 6.0]),
        (&[2, 1], vec![1.0, 3.0], [1.0, 2.0, 1.0, 6.0, 3.0, 6.0]),
    ] {
        let source = base.clone().with("a.weight_scale", Dtype::F32, shape, &floats(&scales));
        let weight = load(&source, &["a.weight"], 2, 3).unwrap();
        assert_eq!(elements(&Cpu::reference(), &weight.pieces()[0]), expected, "{shape:?}");
    }
}

/// Row blocks and column blocks that do not come out even.
#[test]
fn blocks_are_spread_to_rows() {
    let (rows, cols) = (130, 300);
    let scales: Vec<f32> = (1..=6).map(|v| v as f32).collect();
    let source = Tensors::default()
        .with("a.weight", Dtype::F8_E4M3, &[rows, cols], &vec![0x38; rows * cols])
        .with("a.weight_scale_inv", Dtype::F32, &[2, 3], bytemuck::cast_slice(&scales));
    let weight = load(&source, &["a.weight"], rows, cols).unwrap();
    for cpu in Cpu::every_isa(CpuOptions { threads: Some(2), precision: Precision::F32 }).unwrap() {
        for (i, element) in elements(&cpu, &weight.pieces()[0]).iter().enumerate() {
            let (row, col) = (i / cols, i % cols);
            assert_eq!(*element, scales[row / 128 * 3 + col / 128], "{row} {col}");
        }
    }
}

#[test]
fn what_is_wrong_with_a_quantised_weight_is_said() {
    let ones = |n: usize| bytemuck::cast_slice::<f32, u8>(&vec![1.0; n]).to_vec();
    let number = |value: f32| value.to_le_bytes().to_vec();
    let fp8 = Tensors::default().with("a.weight", Dtype::F8_E4M3, &[128, 256], &[0x38; 128 * 256]).with(
        "a.weight_scale_inv",
        Dtype::F32,
        &[1, 2],
        &ones(2),
    );
    let nvfp4 = Tensors::default()
        .with("a.weight", Dtype::U8, &[128, 128], &[0x22; 128 * 128])
        .with("a.weight_scale", Dtype::F8_E4M3, &[128, 16], &[0x38; 128 * 16])
        .with("a.weight_scale_2", Dtype::F32, &[], &ones(1));
    let packed = Tensors::default()
        .with("a.weight_packed", Dtype::U8, &[128, 128], &[0x22; 128 * 128])
        .with("a.weight_scale", Dtype::F8_E4M3, &[128, 16], &[0x38; 128 * 16])
        .with("a.weight_global_scale", Dtype::F32, &[1], &ones(1));
    for good in [&fp8, &nvfp4, &packed] {
        load(good, &["a.weight"], 128, 256).unwrap();
    }
    let mut codes = [0x38; 128 * 16];
    let wrong_code = |code: u8, codes: &mut [u8]| {
        codes[5] = code;
        codes.to_vec()
    };
    let cases = [
        (fp8.clone().without("a.weight_scale_inv"), "no tensor `a.weight_scale_inv`"),
        (
            fp8.clone().with("a.weight_scale_inv", Dtype::F32, &[2, 2], &ones(4)),
            "tensor `a.weight_scale_inv` has shape [2, 2], but config.json asks for [1, 2]",
        ),
        (
            fp8.clone().with("a.weight_scale_inv", Dtype::F32, &[1, 2], &[number(1.0), number(0.0)].concat()),
            "tensor `a.weight_scale_inv` holds 0 at place 1, and scales are positive numbers",
        ),
        (
            fp8.clone().with(
                "a.weight_scale_inv",
                Dtype::F32,
                &[1, 2],
                &[number(-1.0), number(1.0)].concat(),
            ),
            "tensor `a.weight_scale_inv` holds -1 at place 0",
        ),
        (
            fp8.clone().with("a.weight_scale_inv", Dtype::BF16, &[1, 2], &[0xc0, 0x7f, 0, 0x3f]),
            "tensor `a.weight_scale_inv` holds NaN at place 0",
        ),
        (
            fp8.with("a.weight_scale_inv", Dtype::I32, &[1, 2], &ones(2)),
            "tensor `a.weight_scale_inv` holds I32, and scales of fp8 weights are F32, BF16",
        ),
        (nvfp4.clone().without("a.weight_scale"), "no tensor `a.weight_scale`"),
        (nvfp4.clone().without("a.weight_scale_2"), "no tensor `a.weight_scale_2`"),
        (
            nvfp4.clone().with("a.weight_scale", Dtype::F8_E4M3, &[128, 16], &wrong_code(0x7f, &mut codes)),
            "tensor `a.weight_scale` holds NaN at place 5",
        ),
        (
            nvfp4.clone().with("a.weight_scale", Dtype::F8_E4M3, &[128, 16], &wrong_code(0xb8, &mut codes)),
            "tensor `a.weight_scale` holds -1 at place 5",
        ),
        (
            nvfp4.clone().with("a.weight_scale", Dtype::U8, &[128, 16], &codes),
            "tensor `a.weight_scale` holds U8, and scales of nvfp4 weights are F8_E4M3",
        ),
        (
            nvfp4.with("a.weight_scale_2", Dtype::F32, &[], &number(f32::INFINITY)),
            "tensor `a.weight_scale_2` holds inf at place 0",
        ),
        (packed.clone().without("a.weight_global_scale"), "no tensor `a.weight_global_scale`"),
        (
            packed.with("a.weight_global_scale", Dtype::F32, &[1], &number(0.0)),
            "tensor `a.weight_global_scale` holds 0",
        ),
    ];
    for (source, part) in cases {
        let sentence = load(&source, &["a.weight"], 128, 256).unwrap_err();
        assert!(sentence.contains(part), "{part}: {sentence}");
    }
}

#[test]
fn a_group_that_is_zero_is_zero() {
    let mut scales = [0x38; 4 * 2];
    scales[3] = 0;
    let source = Tensors::default()
        .with("a.weight", Dtype::U8, &[4, 16], &[0x22; 64])
        .with("a.weight_scale", Dtype::F8_E4M3, &[4, 2], &scales)
        .with("a.weight_scale_2", Dtype::F32, &[1], &1_f32.to_le_bytes());
    let weight = load(&source, &["a.weight"], 4, 32).unwrap();
    for (i, element) in elements(&Cpu::reference(), &weight.pieces()[0]).iter().enumerate() {
        assert_eq!(*element, if i / 16 == 3 { 0.0 } else { 1.0 }, "{i}");
    }
}

#[test]
fn widths_that_no_group_divides_and_mixed_formats_are_refused() {
    let source = Tensors::default()
        .with("a.weight", Dtype::U8, &[4, 12], &[0; 48])
        .with("b.weight", Dtype::BF16, &[4, 32], &[0; 256])
        .with("c.weight", Dtype::U8, &[4, 16], &[0; 64])
        .with("c.weight_scale", Dtype::F8_E4M3, &[4, 2], &[0x38; 8])
        .with("c.weight_scale_2", Dtype::F32, &[], &1_f32.to_le_bytes());
    let sentence = load(&source, &["a.weight"], 4, 24).unwrap_err();
    assert!(
        sentence.contains("tensor `a.weight` has rows of 24 columns, and nvfp4 takes whole groups of 16"),
        "{sentence}"
    );
    let sentence = load(&source, &["b.weight", "c.weight"], 4, 32).unwrap_err();
    assert!(
        sentence.contains("`b.weight` and `c.weight` are stored in different formats, bf16 and nvfp4"),
        "{sentence}"
    );

    let cpu = Cpu::reference();
    let mut heard = |_| ();
    let table = Weights::new(&cpu, &source, &mut heard).plain_matrix("c.weight", 4, 16);
    let sentence = table.unwrap_err().to_string();
    assert!(
        sentence.contains("tensor `c.weight` holds U8; this weight must be BF16, F16 or F32"),
        "{sentence}"
    );
}

/// Made-up weights have the deviation of their kind in every format, made in one piece or in many.
#[test]
fn made_up_weights_have_the_same_deviation_in_every_format() {
    let (synthetic, [rows, cols]) = (Synthetic::new(7), [64, 256]);
    for format in [Format::Fp8, Format::Nvfp4, Format::Mxfp4] {
        for (module, deviation) in [
            ("model.layers.1.self_attn.o_proj", 4e-4),
            ("model.layers.1.mlp.experts.3.gate_proj", 0.02),
            ("model.layers.0.mlp.experts.15.down_proj", 1e-3),
        ] {
            let tensors = quantised::tensors(format, module, [rows, cols]);
            let checkpoint = SyntheticCheckpoint::generate(&synthetic, &tensors, &mut |_| ()).unwrap();
            for tensor in &tensors {
                let (_, whole) = checkpoint.tensor(&tensor.name, &tensor.shape).unwrap();
                let mut pieces = vec![0; tensor.bytes()];
                for (i, out) in pieces.chunks_mut(104).enumerate() {
                    synthetic.fill_parallel(tensor, 104 * i, out);
                }
                assert!(whole.as_slice() == pieces, "{}", tensor.name);
            }
            let weight = load(&checkpoint, &[&format!("{module}.weight")], rows, cols).unwrap();
            assert_eq!(weight.format(), format);
            let values = elements(&Cpu::reference(), &weight.pieces()[0]);
            let n = values.len() as f32;
            let found = (values.iter().map(|v| v * v).sum::<f32>() / n).sqrt();
            // The scale of mxfp4 is the nearest power of two.
            let slack = if format == Format::Mxfp4 { 0.42 } else { 0.03 };
            assert!((found / deviation - 1.0).abs() < slack, "{module} in {format}: {found}");
            let mean = values.iter().sum::<f32>() / n;
            assert!(mean.abs() < 0.05 * deviation, "{module} in {format}: mean {mean}");
        }
    }
}

/// Sizes of the golden checkpoints, whatever stores them.
#[test]
fn quantised_checkpoints_are_counted_by_their_weights() {
    let inventory = |name: &str| {
        let files = ModelFiles::open(Some(&golden(name))).unwrap();
        Inventory::of_checkpoint(&files.config(), files.checkpoint(), &Cpu::reference()).unwrap()
    };
    let bf16 = inventory("qwen3_moe-bf16");
    for (name, format) in [
        ("qwen3_moe-nvfp4-ct", Format::Nvfp4),
        ("qwen3_moe-nvfp4-modelopt", Format::Nvfp4),
        ("qwen3_moe-fp8-block", Format::Fp8),
    ] {
        let found = inventory(name);
        assert_eq!(found.expert_format, Some(format), "{name}");
        let (moe, sizes) = (found.sizes.moe.unwrap(), &found.sizes);
        let weights = (3 * sizes.hidden * moe.intermediate) as u64;
        let expert_bytes = match format {
            // Two blocks of 128 columns or rows in each of three matrices, their scales in bf16.
            Format::Fp8 => weights + 3 * 2 * 2,
            _ => weights / 2 + weights / 16 + 3 * 4,
        };
        assert_eq!(found.expert_bytes(), Some(expert_bytes), "{name}");
        let kv = 2 * sizes.n_kv_heads * sizes.head_dim;
        let attention = sizes.hidden * (2 * sizes.n_heads * sizes.head_dim + kv) + 2 * sizes.head_dim;
        let layer = attention + 2 * sizes.hidden + moe.n_experts * (sizes.hidden + weights as usize);
        let ends = 2 * sizes.vocab * sizes.hidden + sizes.hidden;
        assert_eq!(found.n_params(), (sizes.n_layers * layer + ends) as u64, "{name}");
    }
    assert_eq!(bf16.expert_format, Some(Format::Bf16));
}
