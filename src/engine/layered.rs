//! A prefill step whose experts are not all on the device: a program for each run of ops between two route points, and the
//! experts of each layer streamed in between. All rows pass one layer before the next, so that an expert crosses the link
//! once a step.

use freetoken_backend::{Backend, Experts, Lane, Program, Result, Stage, View};

use super::Batch;
use crate::moe::{Elastic, LayerStep};

/// A recorded step for one bucket.
pub(super) struct Layered {
    pub(super) batch: Batch,
    /// One in front of each route point, and one behind the last.
    segments: Vec<Box<dyn Program>>,
    /// MoE layers in order.
    layers: Vec<u32>,
    /// What the router of the current layer chose.
    ids: View,
    /// The experts of any layer.
    mlp: Box<dyn Program>,
}

impl Layered {
    /// Records the stages of a prefill over a batch whose layers share their ids.
    pub(super) fn record(
        backend: &dyn Backend,
        batch: Batch,
        stages: Vec<Stage>,
        elastic: &Elastic,
    ) -> Result<Self> {
        let (mut segments, mut layers, mut mlp) = (Vec::new(), Vec::new(), None);
        let mut ops = Vec::new();
        for stage in stages {
            match stage {
                Stage::Ops(more) => ops.extend(more),
                Stage::Route(point) => {
                    segments.push(backend.record(&[Stage::Ops(std::mem::take(&mut ops))], &[])?);
                    let Experts::Pool { layer, .. } = point.mlp.experts else {
                        unreachable!("experts behind a cache lie in its pool")
                    };
                    layers.push(layer);
                    mlp.get_or_insert(point.mlp);
                }
            }
        }
        segments.push(backend.record(&[Stage::Ops(ops)], &[])?);
        let mut mlp = mlp.expect("a model with experts");
        mlp.experts = elastic.streamed_experts();
        let ids = mlp.ids.clone();
        let mlp = backend.record(&[Stage::Ops(vec![mlp.into()])], &[])?;
        Ok(Layered { batch, segments, layers, ids, mlp })
    }

    /// Runs the step up to and with the experts of the `i`-th MoE layer, whose predecessors are done; behind the last one, all of
    /// it, and returns when the device is done. Whether that was all.
    pub(super) fn run_layer(
        &mut self,
        i: usize,
        backend: &dyn Backend,
        elastic: &mut Elastic,
    ) -> Result<bool> {
        self.segments[i].submit()?;
        self.experts(i, elastic)?;
        if i + 1 < self.layers.len() {
            return Ok(false);
        }
        self.segments[i + 1].submit()?;
        backend.wait(backend.event(Lane::Compute)?)?;
        Ok(true)
    }

    /// Computes the experts of the `i`-th MoE layer, whose router has run.
    pub(super) fn experts(&mut self, i: usize, elastic: &mut Elastic) -> Result<()> {
        elastic.stream(LayerStep {
            layer: self.layers[i],
            next_layer: self.layers.get(i + 1).copied(),
            ids: &self.ids,
            mlp: &mut *self.mlp,
        })
    }
}
