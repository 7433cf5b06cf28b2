//! `freetoken bench`: how fast a model and its parts run here, beside what the machine would allow.

mod cache;
mod elastic;
mod experts;
mod load;
mod ops;
mod plot;
mod report;
mod route_points;
mod serve;
mod steps;
mod subject;
mod table;

use anyhow::Result;
use clap::{Args, Subcommand};

/// Measure speed, each time beside what the machine would allow in the same run.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  freetoken bench steps --like qwen3-30b-a3b --layers 8 --prompt 512,2048 --depth 0,4096 --batch 1,4\n  \
                  freetoken bench ops --model DIR\n  freetoken bench elastic --like qwen3-30b-a3b --layers 24 --cache 50,25\n  \
                  freetoken bench experts --csv experts.csv\n  freetoken bench load DIR DIR.ftw\n  freetoken bench serve 60\n  \
                  freetoken bench cache zipf:1.0 --cache 10,25,50 --plot hits.svg"
)]
pub(super) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Steps(steps::StepsArgs),
    Ops(ops::OpsArgs),
    Experts(experts::ExpertsArgs),
    RoutePoints(route_points::RoutePointsArgs),
    Elastic(elastic::ElasticArgs),
    Cache(cache::CacheArgs),
    Load(load::LoadArgs),
    Serve(serve::ServeArgs),
}

pub(super) fn run(args: BenchArgs) -> Result<()> {
    match args.what {
        What::Steps(args) => steps::run(&args),
        What::Ops(args) => ops::run(&args),
        What::Experts(args) => experts::run(&args),
        What::RoutePoints(args) => route_points::run(&args),
        What::Elastic(args) => elastic::run(&args),
        What::Cache(args) => cache::run(&args),
        What::Load(args) => load::run(&args),
        What::Serve(args) => serve::run(&args),
    }
}

/// The middle one, or the upper of the two. Asserts that there is one.
fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}
