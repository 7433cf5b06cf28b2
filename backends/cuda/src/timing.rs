//! The time of each op of a step: a graph with a time stamp behind every op, so that no launch of the host is in between.

use freetoken_backend::{KernelCosts, Op, Result, View};

use crate::{
    Cuda, State, kernels,
    memory::{WAIT_LIMIT, no_answer},
    recorder::{Plan, Resolver, plan},
    segment,
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

/// Measurements of which the best counts.
const TRIES: usize = 5;

/// What kernels cost, and how many of them the ops are.
pub(crate) fn kernel_costs(cuda: &Cuda, state: &mut State, ops: &[Op]) -> Result<KernelCosts> {
    let counts = ops.iter().map(|op| Ok(plan(cuda, op)?.launches.len()));
    let n_kernels = counts.sum::<Result<usize>>()?;
    let empty = |n: usize| Plan { launches: vec![kernels::empty(); n], scratch_bytes: 0 };
    let mut chain = |n| best_of(|| Ok(time_plans(cuda, state, vec![empty(n)])?[0]));
    let [few, many] = KernelCosts::CHAINS;
    let empty_kernel = KernelCosts::of_one([chain(few)?, chain(many)?]);
    let mut alone = || {
        let times = time_plans(cuda, state, (0..few).map(|_| empty(1)).collect())?;
        Ok(times.iter().sum::<f64>() / few as f64)
    };
    let empty_op = best_of(&mut alone)?;
    Ok(KernelCosts { n_kernels, empty_kernel, empty_op })
}

/// Floating-point operations a second of products out of registers.
pub(crate) fn product_rate(cuda: &Cuda, state: &mut State) -> Result<f64> {
    let (_, flops) = kernels::products(cuda.facts());
    let seconds = best_of(|| {
        let (launch, _) = kernels::products(cuda.facts());
        let plan = Plan { launches: vec![launch], scratch_bytes: size_of::<f32>() };
        Ok(time_plans(cuda, state, vec![plan])?[0])
    })?;
    Ok(flops / seconds)
}

fn best_of(mut measure: impl FnMut() -> Result<f64>) -> Result<f64> {
    (0..TRIES).try_fold(f64::INFINITY, |best, _| Ok(measure()?.min(best)))
}

fn time_plans(cuda: &Cuda, state: &mut State, plans: Vec<Plan>) -> Result<Vec<f64>> {
    let device = cuda.device();
    let (driver, stream) = (&device.driver, &device.compute);
    let n_plans = plans.len();
    let scratch = device.alloc(plans.iter().map(|plan| plan.scratch_bytes).max().unwrap_or(0))?;
    let mut resolver = Resolver::new(cuda, state, scratch.span());
    let mut work = Vec::new();
    for plan in plans {
        work.push(resolver.work(plan)?.collect::<Vec<_>>());
    }
    let stamps = (0..=n_plans).map(|_| driver.timing_event()).collect::<Result<Vec<_>>>()?;
    let done = driver.event()?;
    let graph = driver.capture(stream, || {
        driver.stamp(&stamps[0], stream)?;
        for (work, stamp) in work.iter().zip(&stamps[1..]) {
            segment::queue(device, work)?;
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
