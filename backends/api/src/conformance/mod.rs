//! One table of cases that every backend passes: each case runs on the device and on a reference (the scalar CPU) and the
//! outputs are compared by normalised error. Each runs eagerly once and by record and replay twice with changed inputs;
//! outputs lie between sentinels, so that a stray write is seen. A backend's test is
//! `assert!(run_suite(&device, &reference, "").passed())`, and `freetoken selftest` prints the same report.

mod arena;
mod cases;
mod ordering;
mod route_point;
mod weights;

use std::{fmt, time::Instant};

pub use arena::{Arena, Fill, Rng};
pub use cases::cases;

use crate::{Backend, Error, Format, NoRoutePoints, Precision, Stage};

/// One row of the table.
pub struct Case {
    /// `op/variant`: what `--only` matches.
    pub name: String,
    /// Largest normalised mean squared error in f32; integers must be equal.
    pub bound: f64,
    /// The same in [`Precision::Auto`], where activations and the cache may be bf16.
    pub bound_auto: f64,
    /// Makes inputs and outputs in the arena and returns the work over them.
    pub build: Box<Build>,
}

/// How a case is made on a backend.
pub type Build = dyn Fn(&mut Arena<'_>) -> crate::Result<Vec<Stage>>;

/// How a case ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// Within the bound; the largest normalised mean squared error seen.
    Passed(f64),
    /// The backend says that it cannot run this.
    Unsupported(String),
    /// It ran and was wrong, or ended in an error.
    Failed(String),
}

/// A case and how it ended.
#[derive(Debug, Clone)]
pub struct Row {
    /// Name of the case.
    pub name: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Time it took.
    pub seconds: f64,
}

/// What a suite found.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// A row a case, in the table's order.
    pub rows: Vec<Row>,
}

impl Report {
    /// Whether nothing failed and something ran.
    pub fn passed(&self) -> bool {
        self.count(|o| matches!(o, Outcome::Passed(_))) > 0
            && self.count(|o| matches!(o, Outcome::Failed(_))) == 0
    }

    fn count(&self, f: impl Fn(&Outcome) -> bool) -> usize {
        self.rows.iter().filter(|row| f(&row.outcome)).count()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in &self.rows {
            let (word, detail) = match &row.outcome {
                Outcome::Passed(error) => ("ok", format!("error {error:.1e}")),
                Outcome::Unsupported(why) => ("unsupported", why.clone()),
                Outcome::Failed(why) => ("FAILED", why.clone()),
            };
            writeln!(f, "{word:<12} {:<44} {detail}", row.name)?;
        }
        let passed = self.count(|o| matches!(o, Outcome::Passed(_)));
        let unsupported = self.count(|o| matches!(o, Outcome::Unsupported(_)));
        let failed = self.count(|o| matches!(o, Outcome::Failed(_)));
        write!(f, "{passed} passed, {unsupported} unsupported, {failed} failed")
    }
}

/// Runs every case whose name contains `only` on `device` and compares with `reference`.
pub fn run_suite(device: &dyn Backend, reference: &dyn Backend, only: &str) -> Report {
    let timed = |name: String, check: &dyn Fn() -> Outcome| {
        let start = Instant::now();
        let outcome = check();
        Row { name, outcome, seconds: start.elapsed().as_secs_f64() }
    };
    let mut report = Report::default();
    for case in cases().into_iter().filter(|case| case.name.contains(only)) {
        report.rows.push(timed(case.name.clone(), &|| run_case(&case, device, reference)));
    }
    for (name, check) in ordering::CHECKS.iter().filter(|(name, _)| name.contains(only)) {
        report.rows.push(timed(name.to_string(), &|| outcome(check(device))));
    }
    for case in route_point::cases().into_iter().filter(|case| case.name.contains(only)) {
        report.rows.push(timed(case.name.clone(), &|| outcome(route_point::run(&case, device))));
    }
    for (format, n_rows, in_place) in [
        (Format::Bf16, 1, false),
        (Format::Bf16, 1, true),
        (Format::Bf16, 7, true),
        (Format::Bf16, 40, false),
        (Format::Bf16, 40, true),
        (Format::Nvfp4, 1, true),
        (Format::Nvfp4, 40, false),
        (Format::Nvfp4, 40, true),
    ] {
        let place = if in_place { "read in place" } else { "left alone" };
        let name = format!("expert_mlp/{format} without slots, {place} n={n_rows}");
        if name.contains(only) {
            let check = || outcome(route_point::without_slots(device, format, n_rows, in_place));
            report.rows.push(timed(name, &check));
        }
    }
    type Check = fn(&dyn Backend) -> Result<f64, Failure>;
    let checks: [(&str, Check); 2] = [
        ("route_point/a host that breaks off", route_point::break_off),
        ("route_point/a reply that leaves an expert out", route_point::left_out),
    ];
    for (name, check) in checks.iter().filter(|(name, _)| name.contains(only)) {
        report.rows.push(timed(name.to_string(), &|| outcome(check(device))));
    }
    report
}

/// Why a check did not pass.
enum Failure {
    Backend(Error),
    Wrong(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Backend(error)
    }
}

fn outcome(result: Result<f64, Failure>) -> Outcome {
    match result {
        Ok(error) => Outcome::Passed(error),
        Err(Failure::Backend(error @ Error::Unsupported { .. })) => Outcome::Unsupported(error.to_string()),
        Err(Failure::Backend(error)) => Outcome::Failed(error.to_string()),
        Err(Failure::Wrong(why)) => Outcome::Failed(why),
    }
}

fn run_case(case: &Case, device: &dyn Backend, reference: &dyn Backend) -> Outcome {
    outcome(compare(case, device, reference))
}

/// The largest error over one eager run and two replays.
fn compare(case: &Case, device: &dyn Backend, reference: &dyn Backend) -> Result<f64, Failure> {
    let mut here = Arena::new(device);
    let mut there = Arena::new(reference);
    let stages = (case.build)(&mut here)?;
    let expected = (case.build)(&mut there)?;
    for op in ops(&stages) {
        device.supports(op)?;
    }
    let bound = match device.caps().precision {
        Precision::F32 => case.bound,
        Precision::Auto => case.bound_auto,
    };
    let mut program = None;
    let mut worst = 0.0_f64;
    for round in 0..3 {
        here.fill(round)?;
        there.fill(round)?;
        reference.run(&ops(&expected).cloned().collect::<Vec<_>>())?;
        if round == 0 {
            device.run(&ops(&stages).cloned().collect::<Vec<_>>())?;
        } else {
            if program.is_none() {
                program = Some(device.record(&stages, &[])?);
            }
            program.as_mut().expect("recorded above").replay(&mut NoRoutePoints)?;
        }
        let error = here.compare(&there).map_err(|why| Failure::Wrong(format!("round {round}: {why}")))?;
        worst = worst.max(error);
        if worst.is_nan() || worst > bound {
            return Err(Failure::Wrong(format!("round {round}: error {worst:.2e}, bound {bound:.0e}")));
        }
    }
    Ok(worst)
}

fn ops(stages: &[Stage]) -> impl Iterator<Item = &crate::Op> {
    stages.iter().flat_map(|stage| match stage {
        Stage::Ops(ops) => ops.iter(),
        Stage::Route(_) => unreachable!("cases of single ops hold no route point"),
    })
}
