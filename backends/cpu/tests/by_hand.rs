//! The ops whose fast path is the reference itself, against values computed by hand: the conformance suite would compare
//! them with themselves.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use freetoken_backend::{
    Backend, Combine, CombineParams, EditLogits, EditLogitsParams, Format, KvCache, LogitEdit, Op,
    PAGE_TOKENS, RopeCache, RopeCacheParams, SharedExpert, View, Weight,
};
use freetoken_cpu::Cpu;

fn with<T: bytemuck::NoUninit>(cpu: &Cpu, values: &[T]) -> View {
    let view = cpu.alloc(size_of_val(values)).unwrap().whole();
    cpu.write(&view, bytemuck::cast_slice(values)).unwrap();
    view
}

fn floats(cpu: &Cpu, view: &View) -> Vec<f32> {
    let mut values = vec![0.0; view.bytes() / 4];
    cpu.read(view, bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

fn run(cpu: &Cpu, op: impl Into<Op>) {
    cpu.run(&[op.into()]).unwrap();
}

#[test]
fn combine_adds_live_routes_to_their_row() {
    let cpu = Cpu::reference();
    let x = with(&cpu, &[1.0_f32, 2.0, 3.0, 4.0]);
    let parts = with(&cpu, &[10.0_f32, 20.0, 100.0, 200.0, f32::NAN, f32::NAN, 1000.0, 2000.0]);
    let ids = with(&cpu, &[0, 5, -1, 7]);
    let p = CombineParams { n_rows: 2, top_k: 2, hidden: 2 };
    let combine = Combine { x: x.clone(), parts, ids, shared: None, p };
    run(&cpu, combine.clone());
    assert_eq!(floats(&cpu, &x), [111.0, 222.0, 1003.0, 2004.0]);
    let rows = with(&cpu, &[1.0_f32, 2.0, 3.0, 4.0]);
    let shared = Some(SharedExpert { rows, gates: with(&cpu, &[0.5_f32, 0.0]) });
    run(&cpu, Combine { shared, ids: with(&cpu, &[-1; 4]), ..combine });
    assert_eq!(floats(&cpu, &x), [111.5, 223.0, 1003.0, 2004.0]);
}

#[test]
fn edit_logits_ends_at_the_first_empty_row() {
    let cpu = Cpu::reference();
    let logits = with(&cpu, &[4.0_f32, -4.0, 1.0, 2.0, 3.0, -3.0]);
    let edit = |row, id, repetition, subtract| LogitEdit { row, id, repetition, subtract };
    let edits = with(
        &cpu,
        &[
            edit(0, 0, 2.0, 0.5),
            edit(1, 2, 2.0, 0.0),
            edit(0, 1, 2.0, 0.0),
            LogitEdit::END,
            edit(0, 2, 1.0, 9.0),
        ],
    );
    run(
        &cpu,
        EditLogits {
            logits: logits.clone(),
            edits,
            p: EditLogitsParams { n_rows: 2, vocab: 3, capacity: 5 },
        },
    );
    assert_eq!(floats(&cpu, &logits), [1.5, -8.0, 1.0, 2.0, 3.0, -6.0]);
}

#[test]
fn rope_cache_turns_halves_and_stores_by_page() {
    let cpu = Cpu::reference();
    // One query head, one key-value head of four dimensions, all rotated, by a quarter turn and by none.
    let (q, k, v) = ([1.0_f32, 2.0, 3.0, 4.0], [5.0_f32, 6.0, 7.0, 8.0], [9.0_f32, 10.0, 11.0, 12.0]);
    let qkv = with(&cpu, &[q, k, v].concat());
    let pages = vec![0.0_f32; 2 * KvCache::page_bytes(Format::F32, 1, 4) / 4];
    let kv = KvCache { view: with(&cpu, &pages), format: Format::F32, n_pages: 2 };
    let out = with(&cpu, &[0.0_f32; 4]);
    let k_norm = Weight::plain(with(&cpu, &[2.0_f32; 4]), Format::F32, 1, 4);
    run(
        &cpu,
        RopeCache {
            q: out.clone(),
            kv: kv.clone(),
            qkv,
            gated: false,
            q_norm: None,
            k_norm: Some(k_norm),
            rotary: with(&cpu, &[1.0_f32, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]),
            positions: with(&cpu, &[1]),
            kv_slots: with(&cpu, &[PAGE_TOKENS as i32 + 3]),
            p: RopeCacheParams {
                n_rows: 1,
                n_heads: 1,
                n_kv_heads: 1,
                head_dim: 4,
                rotary_dim: 4,
                max_positions: 2,
                eps: 0.0,
            },
        },
    );
    // (1, 3) turns to (-3, 1); (2, 4) stays.
    assert_eq!(floats(&cpu, &out), [-3.0, 2.0, 1.0, 4.0]);
    let cache = floats(&cpu, &kv.view);
    let page = &cache[2 * PAGE_TOKENS * 4..];
    let scale = 2.0 / (174.0_f32 / 4.0).sqrt();
    let key = &page[3 * 4..][..4];
    for (got, want) in key.iter().zip([-7.0 * scale, 6.0 * scale, 5.0 * scale, 8.0 * scale]) {
        assert!((got - want).abs() < 1e-5, "{key:?}");
    }
    assert_eq!(&page[PAGE_TOKENS * 4 + 3 * 4..][..4], &v);
    assert_eq!(cache.iter().filter(|v| **v != 0.0).count(), 8, "nothing else was written");
}
