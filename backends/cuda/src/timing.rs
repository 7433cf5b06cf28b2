//! The time of each op of a step: a graph with a time stamp behind every op, so that no launch of the host is in between.

use freetoken_backend::{Op, Result, View};

use crate::{
    Cuda, State, kernels,
    memory::{WAIT_LIMIT, no_answer},
    recorder::{Plan, Resolver, plan},
};

/// Runs ops once; seconds of each.
pub(crate) fn time(cuda: &Cuda, state: &mut State, ops: &[Op]) -> Result<Vec<f64>> {
    ops.iter().for_each(Op::check);
    let plans = ops.iter().map(|op| plan(cuda, op)).collect::<Result<Vec<_>>>()?;
    time_plans(cuda, state, plans)
}

/// Reads a view once; seconds.
pub(crate) fn time_read(cuda: &Cuda, state: &mut State, view: &View) -> Result<f64> {
    let plan = Plan { launches: vec![kernels::read(view, cuda.facts())], scratch_bytes: size_of::<u32>() };
    Ok(time_plans(cuda, state, vec![plan])?[0])
}

fn time_plans(cuda: &Cuda, state: &mut State, plans: Vec<Plan>) -> Result<Vec<f64>> {
    let device = cuda.device();
    let (driver, stream) = (&device.driver, &device.compute);
    let n_plans = plans.len();
    let scratch = device.alloc(plans.iter().map(|plan| plan.scratch_bytes).max().unwrap_or(0))?;
    let mut resolver = Resolver::new(device, state, scratch.span());
    let mut work = Vec::new();
    for plan in plans {
        work.push(resolver.work(plan)?.collect::<Vec<_>>());
    }
    let stamps = (0..=n_plans).map(|_| driver.timing_event()).collect::<Result<Vec<_>>>()?;
    let done = driver.event()?;
    let graph = driver.capture(stream, || {
        driver.stamp(&stamps[0], stream)?;
        for (work, stamp) in work.iter().zip(&stamps[1..]) {
            work.iter().try_for_each(|work| work.queue(device))?;
            driver.stamp(stamp, stream)?;
        }
        Ok(())
    })?;
    driver.launch_graph(&graph)?;
    driver.record(&done, stream)?;
    let reached = driver.wait(WAIT_LIMIT, || driver.reached(&done))?;
    device.bury_graph(graph);
    if !reached {
        return Err(no_answer());
    }
    stamps.windows(2).map(|pair| driver.seconds(&pair[0], &pair[1])).collect()
}
