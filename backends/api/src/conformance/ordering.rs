//! Memory order: what is queued earlier is seen later, within a lane, across lanes through events, and from replay to replay.
//! Weights are permutations and values small integers, so results are exact on any device and in any precision.

use std::sync::Arc;

use super::Failure;
use crate::{
    Activation, Backend, Embed, EmbedParams, Format, Lane, MatMul, MatMulParams, Matrix, NoRoutePoints, Op,
    Stage, View, ViewCopy, Weight,
};

type Check = fn(&dyn Backend) -> Result<f64, Failure>;

/// The checks, by name.
pub(super) const CHECKS: [(&str, Check); 4] = [
    ("order/chain of dependent ops", chain),
    ("order/writes between replays", writes_between_replays),
    ("order/uploads behind events", uploads_behind_events),
    ("order/copies between replays", copies_between_replays),
];

const WIDTH: usize = 64;
const CHAIN: usize = 24;

fn values(start: usize) -> Vec<f32> {
    (0..WIDTH).map(|i| ((i * 7 + start) % 100) as f32).collect()
}

fn rotated(mut values: Vec<f32>, by: usize) -> Vec<f32> {
    values.rotate_left(by % WIDTH);
    values
}

/// A matrix that rotates a vector by one place.
fn rotation(device: &dyn Backend) -> crate::Result<Weight> {
    let mut w = vec![0.0_f32; WIDTH * WIDTH];
    for row in 0..WIDTH {
        w[row * WIDTH + (row + 1) % WIDTH] = 1.0;
    }
    let view = device.alloc(w.len() * 4)?.whole();
    device.write(&view, bytemuck::cast_slice(&w))?;
    Ok(Weight::plain(view, Format::F32, WIDTH, WIDTH))
}

fn rotate(weight: &Weight, x: &View, out: &View) -> Op {
    MatMul {
        out: out.clone(),
        x: x.clone(),
        rows: None,
        norm: None,
        weight: Matrix::from(weight.clone()),
        bias: None,
        p: MatMulParams {
            n_rows: 1,
            in_features: WIDTH as u32,
            out_features: WIDTH as u32,
            activation: Activation::None as u32,
            accumulate: 0,
            eps: 0.0,
        },
    }
    .into()
}

/// Two buffers written and read in turn, in one program.
fn rotate_chain(device: &dyn Backend) -> crate::Result<(View, Vec<Op>)> {
    let weight = rotation(device)?;
    let (a, b) = (device.alloc(WIDTH * 4)?.whole(), device.alloc(WIDTH * 4)?.whole());
    let ops = (0..CHAIN).map(|i| if i % 2 == 0 { rotate(&weight, &a, &b) } else { rotate(&weight, &b, &a) });
    Ok((a.clone(), ops.collect()))
}

fn expect(got: &[u32], want: &[f32], what: &str) -> Result<(), Failure> {
    if got == bytemuck::cast_slice::<f32, u32>(want) {
        return Ok(());
    }
    Err(Failure::Wrong(format!("{what}: the device saw other values than were queued")))
}

fn read(device: &dyn Backend, view: &View) -> crate::Result<Vec<u32>> {
    let mut words = vec![0; WIDTH];
    device.read(view, bytemuck::cast_slice_mut(&mut words))?;
    Ok(words)
}

fn chain(device: &dyn Backend) -> Result<f64, Failure> {
    let (a, ops) = rotate_chain(device)?;
    device.write(&a, bytemuck::cast_slice(&values(0)))?;
    device.run(&ops)?;
    expect(&read(device, &a)?, &rotated(values(0), CHAIN), "eager")?;
    let mut program = device.record(&[Stage::Ops(ops)], std::slice::from_ref(&a))?;
    for replay in 2..5 {
        program.replay(&mut NoRoutePoints)?;
        expect(program.output(0), &rotated(values(0), CHAIN * replay), "replay")?;
    }
    Ok(0.0)
}

fn writes_between_replays(device: &dyn Backend) -> Result<f64, Failure> {
    let (a, ops) = rotate_chain(device)?;
    let mut program = device.record(&[Stage::Ops(ops)], std::slice::from_ref(&a))?;
    for start in 0..50 {
        device.write(&a, bytemuck::cast_slice(&values(start)))?;
        program.replay(&mut NoRoutePoints)?;
        expect(program.output(0), &rotated(values(start), CHAIN), "replay")?;
    }
    Ok(0.0)
}

/// A table that the copy lane replaces while the compute lane looks rows up in it.
fn uploads_behind_events(device: &dyn Backend) -> Result<f64, Failure> {
    let table = device.alloc(WIDTH * 4)?.whole();
    let ids = device.alloc(4)?.whole();
    let out = device.alloc(WIDTH * 4)?.whole();
    let lookup = Op::from(Embed {
        out: out.clone(),
        ids,
        table: Weight::plain(table.clone(), Format::F32, 1, WIDTH),
        p: EmbedParams { n_rows: 1, hidden: WIDTH as u32, vocab: 1 },
    });
    for start in 0..20 {
        let mut staging = device.alloc_host(WIDTH * 4)?;
        staging.as_mut_slice()[..WIDTH * 4].copy_from_slice(bytemuck::cast_slice(&values(start)));
        device.after(Lane::Copy, device.event(Lane::Compute)?)?;
        let arrived = device.upload(Lane::Copy, &Arc::new(staging), 0, &table)?;
        device.after(Lane::Compute, arrived)?;
        device.run(std::slice::from_ref(&lookup))?;
        expect(&read(device, &out)?, &values(start), "lookup")?;
        device.wait(arrived)?;
        if !device.reached(arrived)? {
            return Err(Failure::Wrong("an event that was awaited is not reached".into()));
        }
    }
    Ok(0.0)
}

/// What a chain leaves is put aside, and brought back behind more replays. Nobody waits in between.
fn copies_between_replays(device: &dyn Backend) -> Result<f64, Failure> {
    let (a, ops) = rotate_chain(device)?;
    let mut program = device.record(&[Stage::Ops(ops)], std::slice::from_ref(&a))?;
    let shelf = device.alloc(3 * WIDTH * 4)?.whole();
    device.write(&shelf, bytemuck::cast_slice(&[values(90), values(91), values(92)].concat()))?;
    let place = shelf.slice(WIDTH * 4..2 * WIDTH * 4);
    for start in 0..20 {
        device.write(&a, bytemuck::cast_slice(&values(start)))?;
        let parts = [0..WIDTH, WIDTH..4 * WIDTH]
            .map(|part| ViewCopy { src: a.slice(part.clone()), dst: place.slice(part) });
        device.copy(&parts)?;
        program.replay(&mut NoRoutePoints)?;
        device.copy(&[ViewCopy { src: place.clone(), dst: a.clone() }])?;
        expect(&read(device, &a)?, &values(start), "a copy brought back")?;
        program.replay(&mut NoRoutePoints)?;
        expect(program.output(0), &rotated(values(start), CHAIN), "replay behind a copy")?;
    }
    let mut around = vec![0; 3 * WIDTH];
    device.read(&shelf, bytemuck::cast_slice_mut(&mut around))?;
    expect(&around[..WIDTH], &values(90), "before a copy")?;
    expect(&around[2 * WIDTH..], &values(92), "behind a copy")?;
    device.copy(&[])?;
    Ok(0.0)
}
