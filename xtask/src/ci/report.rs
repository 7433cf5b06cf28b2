//! What became of each step, and the table that says so.

use std::fmt;
use std::time::Instant;

use anyhow::Result;

/// The steps so far, in the order in which they ran.
#[derive(Default)]
pub(super) struct Report {
    rows: Vec<Row>,
}

struct Row {
    step: String,
    outcome: Outcome,
}

enum Outcome {
    Passed {
        seconds: f64,
    },
    Failed {
        seconds: f64,
        why: String,
    },
    /// Has no run of its own: its failure is that step's failure.
    Within {
        step: String,
    },
    LeftOut {
        why: String,
    },
}

impl Report {
    /// Runs a step, and says how long it took as soon as it ends.
    pub(super) fn step(&mut self, step: &str, run: impl FnOnce() -> Result<()>) {
        println!("\n== {step}");
        let start = Instant::now();
        let result = run();
        let seconds = start.elapsed().as_secs_f64();
        let outcome = match result {
            Ok(()) => Outcome::Passed { seconds },
            Err(error) => Outcome::Failed { seconds, why: format!("{error:#}") },
        };
        println!("== {step}: {outcome}");
        self.rows.push(Row { step: step.to_owned(), outcome });
    }

    /// Notes a check that another step contains.
    pub(super) fn within(&mut self, check: &str, step: &str) {
        self.rows.push(Row { step: check.to_owned(), outcome: Outcome::Within { step: step.to_owned() } });
    }

    /// Notes a check that did not run.
    pub(super) fn left_out(&mut self, check: &str, why: &str) {
        self.rows.push(Row { step: check.to_owned(), outcome: Outcome::LeftOut { why: why.to_owned() } });
    }

    /// Whether nothing failed and, if `strict`, nothing was left out.
    pub(super) fn passed(&self, strict: bool) -> bool {
        self.rows.iter().all(|row| match row.outcome {
            Outcome::Passed { .. } | Outcome::Within { .. } => true,
            Outcome::Failed { .. } => false,
            Outcome::LeftOut { .. } => !strict,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.iter().map(|row| row.step.len()).max().unwrap_or(0);
        let lines = self.rows.iter().map(|row| format!("{:<width$}  {}", row.step, row.outcome));
        f.write_str(&lines.collect::<Vec<_>>().join("\n"))
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed { seconds } => write!(f, "passed    {seconds:8.1} s"),
            Self::Failed { seconds, why } => write!(f, "FAILED    {seconds:8.1} s  {why}"),
            Self::Within { step } => write!(f, "within    {step}"),
            Self::LeftOut { why } => write!(f, "LEFT OUT  {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn left_out_fails_only_where_everything_must_run() {
        let mut report = Report::default();
        report.step("fmt", || Ok(()));
        report.within("corpus", "tests");
        assert!(report.passed(true));
        report.left_out("golden", "no folder");
        assert!(report.passed(false) && !report.passed(true));
        report.step("docs", || Err(anyhow::anyhow!("a broken link")));
        assert!(!report.passed(false));

        let table = report.to_string();
        assert_eq!(table.lines().count(), 4);
        assert!(table.contains("LEFT OUT  no folder") && table.contains("a broken link"), "{table}");
    }
}
