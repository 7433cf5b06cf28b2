//! A run that looks at everything: layer by layer, without a program.

use std::iter::once;

use freetoken_backend::Stage;

use super::{Engine, EngineError, Sequence, step::settle};

/// What a layer-by-layer run saw.
#[derive(Debug, Default)]
pub struct Trace {
    /// The residual stream behind each layer, `[n_rows, hidden]`.
    pub hidden: Vec<Vec<f32>>,
    /// Expert ids and weights of each MoE layer, `[n_rows, top_k]`; empty for a dense model.
    pub routes: Vec<(Vec<i32>, Vec<f32>)>,
}

impl Engine {
    /// Computes the next `n` pending tokens layer by layer, without a program, and keeps what it sees.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn trace(&mut self, sequence: &mut Sequence, n: usize) -> Result<Trace, EngineError> {
        let mut trace = Trace::default();
        let mut left = n;
        while left > 0 {
            let rows = left.min(self.batch.n_rows);
            self.make_room(sequence, rows)?;
            let traced = self.trace_rows(sequence, rows, &mut trace);
            if let Err(error) = settle(traced, &mut self.elastic) {
                self.distrust(sequence);
                return Err(error);
            }
            self.advance(sequence, rows);
            left -= rows;
        }
        Ok(trace)
    }

    /// The same for rows of one step.
    fn trace_rows(&mut self, sequence: &Sequence, n: usize, trace: &mut Trace) -> Result<(), EngineError> {
        let batch = match &self.elastic {
            Some(_) => {
                let bucket = self.layered_input(sequence, n)?;
                self.layered[&bucket].batch.clone()
            }
            None => {
                let batch = self.batch.bucket(n.next_power_of_two());
                self.input.put_rows(&batch, once(sequence), n);
                self.backend.write(&batch.input, self.input.rows(&batch))?;
                batch
            }
        };
        let Engine { backend, model, layered, elastic, .. } = self;
        let mut layered = layered.get_mut(&batch.n_rows).zip(elastic.as_deref_mut());
        let (hidden, top_k) = (model.sizes().hidden, model.sizes().moe.map_or(0, |moe| moe.top_k));
        backend.run(&model.embed(&batch))?;
        let mut moe_layer = 0;
        for layer in 0..model.sizes().n_layers {
            let mut is_sparse = false;
            for stage in model.layer(layer, &batch) {
                match (stage, &mut layered) {
                    (Stage::Ops(ops), _) => backend.run(&ops)?,
                    (Stage::Route(mut point), layered) => {
                        is_sparse = true;
                        point.mlp.p.in_place = batch.reads_in_place as u32;
                        match layered {
                            Some((layered, elastic)) => layered.experts(moe_layer, elastic)?,
                            None => backend.run(&[point.mlp.into()])?,
                        }
                    }
                }
            }
            let mut x = vec![0.0_f32; n * hidden];
            backend.read(&batch.x, bytemuck::cast_slice_mut(&mut x))?;
            append(&mut trace.hidden, layer).extend(x);
            if is_sparse {
                let (mut ids, mut weights) = (vec![0_i32; n * top_k], vec![0.0_f32; n * top_k]);
                backend.read(&batch.expert_ids_of(moe_layer), bytemuck::cast_slice_mut(&mut ids))?;
                backend.read(&batch.expert_weights, bytemuck::cast_slice_mut(&mut weights))?;
                let (all_ids, all_weights) = append(&mut trace.routes, moe_layer);
                all_ids.extend(ids);
                all_weights.extend(weights);
                moe_layer += 1;
            }
        }
        Ok(())
    }
}

/// The `i`-th of some lists, which are made in order.
fn append<T: Default>(lists: &mut Vec<T>, i: usize) -> &mut T {
    if lists.len() == i {
        lists.push(T::default());
    }
    &mut lists[i]
}
