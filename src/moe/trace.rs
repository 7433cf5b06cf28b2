//! Routing traces: which experts each row of each step was routed to. Recorded from a model, or drawn from a seed.
//!
//! A file, little-endian: the 8 bytes `FTROUTES`; u32 version (1), layers, experts of a layer, routes of a row, bytes of
//! the model's name; the name, UTF-8; then steps to the end of the file: u32 rows, and for each layer the ids
//! `[n_rows, top_k]` as u16, 65535 for padding.

use std::{
    io::{self, Write},
    ops::Range,
    path::Path,
};

use crate::{
    formats::{FormatError, mapped::MappedFile},
    philox,
};

const MAGIC: &[u8; 8] = b"FTROUTES";
const VERSION: u32 = 1;
/// An id of padding in a file.
const PADDING: u16 = u16::MAX;
/// What a header may say.
const MAX_LAYERS: u32 = 4096;
const MAX_EXPERTS: u32 = PADDING as u32;
const MAX_TOP_K: u32 = 256;
const MAX_NAME_BYTES: usize = 4096;

/// What was traced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routing {
    /// Name of the model, for people.
    pub model: String,
    /// MoE layers.
    pub n_layers: usize,
    /// Experts of a layer.
    pub n_experts: usize,
    /// Routes of a row.
    pub top_k: usize,
}

/// Routings of many steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    routing: Routing,
    /// Of each step `[n_layers, n_rows, top_k]`, one step behind the other; -1 for padding.
    ids: Vec<i32>,
    /// Where each step lies in `ids`.
    steps: Vec<Range<usize>>,
}

/// Which experts a synthetic trace prefers. Experts of a row differ; each layer has favourites of its own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Preference {
    /// None.
    Uniform,
    /// The expert of rank `r`, from 1, has the weight `1 / r^exponent`.
    Zipf {
        /// From 0 (uniform) up.
        exponent: f64,
    },
    /// The same, and between two steps pairs of experts of a layer swap their ranks: what is popular now is so for a
    /// while.
    Drifting {
        /// From 0 (uniform) up.
        exponent: f64,
        /// Pairs of a layer and step.
        swaps: usize,
    },
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened.
    #[error(transparent)]
    File(#[from] FormatError),
    /// Other bytes than the first of a trace.
    #[error("{file} is not a routing trace: give a file that `freetoken trace` wrote")]
    NotATrace {
        /// The path or label.
        file: String,
    },
    /// Another version of the format.
    #[error(
        "{file} is a routing trace of version {version} and this program reads version {VERSION}: record it again"
    )]
    Version {
        /// The path or label.
        file: String,
        /// Version of the file.
        version: u32,
    },
    /// The header names a size that no model has.
    #[error("{file} says {field} {value}, which should be from 1 to {most}: record it again")]
    Header {
        /// The path or label.
        file: String,
        /// The field.
        field: &'static str,
        /// What it says.
        value: u32,
        /// The most that it may say.
        most: u32,
    },
    /// The model's name is not text.
    #[error("{file} names its model in bytes that are not UTF-8: record it again")]
    Name {
        /// The path or label.
        file: String,
    },
    /// The end of the file lies inside of the header or a step.
    #[error("{file} ends inside of {part}: the recording was cut off, record it again")]
    CutOff {
        /// The path or label.
        file: String,
        /// `its header`, or `step 7`.
        part: String,
    },
    /// A step without rows.
    #[error("{file}: step {step} has no rows: record it again")]
    NoRows {
        /// The path or label.
        file: String,
        /// Step, from 0.
        step: usize,
    },
    /// An id that is no expert.
    #[error("{file}: step {step} routes to expert {id} of {n_experts}: record it again")]
    NotAnExpert {
        /// The path or label.
        file: String,
        /// Step, from 0.
        step: usize,
        /// The id.
        id: u16,
        /// Experts of a layer.
        n_experts: usize,
    },
}

impl Trace {
    /// Reads a file.
    ///
    /// # Errors
    /// [`TraceError`] for a file that is not a whole trace.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        Self::parse(&path.display().to_string(), (*MappedFile::open(path)?).as_ref())
    }

    /// Reads the bytes of a file; `file` names it in errors. What it allocates is bounded by twice their length.
    ///
    /// # Errors
    /// [`TraceError`] for bytes that are not a whole trace.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self, TraceError> {
        let name_file = || file.to_string();
        let Some(rest) = bytes.strip_prefix(MAGIC) else {
            return Err(TraceError::NotATrace { file: name_file() });
        };
        let mut rest = Unread { file, bytes: rest };
        let header = || "its header".to_string();
        let version = rest.word(header)?;
        if version != VERSION {
            return Err(TraceError::Version { file: name_file(), version });
        }
        let mut field = |field, most| match rest.word(header)? {
            value if (1..=most).contains(&value) => Ok(value as usize),
            value => Err(TraceError::Header { file: name_file(), field, value, most }),
        };
        let n_layers = field("n_layers", MAX_LAYERS)?;
        let n_experts = field("n_experts", MAX_EXPERTS)?;
        let top_k = field("top_k", MAX_TOP_K.min(n_experts as u32))?;
        let name_bytes = field("name bytes", MAX_NAME_BYTES as u32)?;
        let model = String::from_utf8(rest.take(name_bytes as u64, header)?.to_vec())
            .map_err(|_| TraceError::Name { file: name_file() })?;
        let mut trace = Trace::new(Routing { model, n_layers, n_experts, top_k });
        while !rest.bytes.is_empty() {
            let step = trace.steps.len();
            let part = || format!("step {step}");
            let n_rows = u64::from(rest.word(part)?);
            if n_rows == 0 {
                return Err(TraceError::NoRows { file: name_file(), step });
            }
            let ids = rest.take(2 * n_rows * (n_layers * top_k) as u64, part)?;
            for id in ids.chunks_exact(2).map(|id| u16::from_le_bytes([id[0], id[1]])) {
                if id != PADDING && usize::from(id) >= n_experts {
                    return Err(TraceError::NotAnExpert { file: name_file(), step, id, n_experts });
                }
                trace.ids.push(if id == PADDING { -1 } else { i32::from(id) });
            }
            trace.end_step();
        }
        Ok(trace)
    }

    /// Draws `n_steps` steps of `n_rows` rows. The same arguments give the same trace.
    pub fn synthetic(
        routing: Routing,
        n_steps: usize,
        n_rows: usize,
        preference: Preference,
        seed: u64,
    ) -> Self {
        let (exponent, swaps) = match preference {
            Preference::Uniform => (0.0, 0),
            Preference::Zipf { exponent } => (exponent, 0),
            Preference::Drifting { exponent, swaps } => (exponent, swaps),
        };
        let Routing { n_layers, n_experts, top_k, .. } = routing;
        assert!(top_k <= n_experts, "the experts of a row differ");
        let mut draws = Draws { seed, position: 0 };
        let weights: Vec<f64> = (1..=n_experts).map(|rank| (rank as f64).powf(-exponent)).collect();
        let total: f64 = weights.iter().sum();
        let in_order: Vec<i32> = (0..n_experts as i32).collect();
        let mut ranked = vec![in_order; n_layers];
        for experts in &mut ranked {
            (1..n_experts).for_each(|i| experts.swap(i, draws.below(i + 1)));
        }
        let mut trace = Trace::new(routing);
        let mut left = weights.clone();
        for _ in 0..n_steps {
            for experts in &mut ranked {
                for _ in 0..n_rows {
                    left.copy_from_slice(&weights);
                    let mut mass = total;
                    for _ in 0..top_k {
                        let rank = draws.rank(&left, mass);
                        mass -= std::mem::take(&mut left[rank]);
                        trace.ids.push(experts[rank]);
                    }
                }
                for _ in 0..swaps {
                    experts.swap(draws.below(n_experts), draws.below(n_experts));
                }
            }
            trace.end_step();
        }
        trace
    }

    /// What was traced.
    pub fn routing(&self) -> &Routing {
        &self.routing
    }

    /// Steps.
    pub fn n_steps(&self) -> usize {
        self.steps.len()
    }

    /// Rows of a step.
    pub fn n_rows(&self, step: usize) -> usize {
        self.steps[step].len() / (self.routing.n_layers * self.routing.top_k)
    }

    /// Expert ids of a layer, `[n_rows, top_k]`; -1 for padding.
    pub fn ids(&self, step: usize, layer: usize) -> &[i32] {
        let n = self.n_rows(step) * self.routing.top_k;
        &self.ids[self.steps[step].clone()][layer * n..(layer + 1) * n]
    }

    fn new(routing: Routing) -> Self {
        Trace { routing, ids: Vec::new(), steps: Vec::new() }
    }

    /// What was pushed to `ids` since the last step is one.
    fn end_step(&mut self) {
        let start = self.steps.last().map_or(0, |step| step.end);
        self.steps.push(start..self.ids.len());
    }
}

/// The rest of a file.
struct Unread<'a> {
    file: &'a str,
    bytes: &'a [u8],
}

impl<'a> Unread<'a> {
    fn take(&mut self, n: u64, part: impl Fn() -> String) -> Result<&'a [u8], TraceError> {
        let cut_off = || TraceError::CutOff { file: self.file.to_string(), part: part() };
        let n = usize::try_from(n).map_err(|_| cut_off())?;
        let (taken, rest) = self.bytes.split_at_checked(n).ok_or_else(cut_off)?;
        self.bytes = rest;
        Ok(taken)
    }

    fn word(&mut self, part: impl Fn() -> String) -> Result<u32, TraceError> {
        let taken = self.take(4, part)?;
        Ok(u32::from_le_bytes([taken[0], taken[1], taken[2], taken[3]]))
    }
}

/// Random numbers, one after the other.
struct Draws {
    seed: u64,
    position: u64,
}

impl Draws {
    /// From 0 to 1.
    fn next(&mut self) -> f64 {
        self.position += 1;
        philox::uniform(self.seed, self.position)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() * n as f64) as usize
    }

    /// A rank by its weight, which is not 0; `mass` is the sum of the weights.
    fn rank(&mut self, weights: &[f64], mass: f64) -> usize {
        let mut left = self.next() * mass;
        let mut drawn = 0;
        for (rank, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            drawn = rank;
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
        drawn
    }
}

/// Writes a trace while a model runs, one route point after the other.
pub struct TraceWriter<W: Write> {
    out: W,
    routing: Routing,
    /// The layer whose ids come next, and ids of a layer in this step.
    next_layer: usize,
    n_ids: usize,
}

impl<W: Write> TraceWriter<W> {
    /// Writes the header. Asserts sizes that [`Trace::parse`] takes. In place of a name that is empty or too long it writes
    /// `unnamed`.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn new(mut out: W, routing: Routing) -> io::Result<Self> {
        let name = match routing.model.len() {
            1..=MAX_NAME_BYTES => routing.model.as_str(),
            _ => "unnamed",
        };
        let sizes = [routing.n_layers, routing.n_experts, routing.top_k].map(|n| n as u32);
        let most = [MAX_LAYERS, MAX_EXPERTS, MAX_TOP_K.min(sizes[1])];
        assert!(sizes.iter().zip(most).all(|(&n, most)| (1..=most).contains(&n)), "a trace of {routing:?}");
        out.write_all(MAGIC)?;
        for word in [VERSION, sizes[0], sizes[1], sizes[2], name.len() as u32] {
            out.write_all(&word.to_le_bytes())?;
        }
        out.write_all(name.as_bytes())?;
        Ok(TraceWriter { out, routing, next_layer: 0, n_ids: 0 })
    }

    /// Writes the ids `[n_rows, top_k]` of a route point. Asserts that layers come in order, each with the same rows.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn route(&mut self, layer: u32, ids: &[i32]) -> io::Result<()> {
        assert_eq!(layer as usize, self.next_layer, "layers come in order");
        if layer == 0 {
            self.n_ids = ids.len();
            let n_rows = ids.len() / self.routing.top_k;
            assert!(n_rows > 0 && n_rows * self.routing.top_k == ids.len(), "ids are [n_rows, top_k]");
            self.out.write_all(&(n_rows as u32).to_le_bytes())?;
        }
        assert_eq!(ids.len(), self.n_ids, "every layer of a step has the same rows");
        for &id in ids {
            assert!(id < self.routing.n_experts as i32, "expert {id} of {}", self.routing.n_experts);
            self.out.write_all(&u16::try_from(id).unwrap_or(PADDING).to_le_bytes())?;
        }
        self.next_layer = (self.next_layer + 1) % self.routing.n_layers;
        Ok(())
    }

    /// Flushes. Asserts that the last step is whole.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn finish(mut self) -> io::Result<W> {
        assert_eq!(self.next_layer, 0, "the last step is whole");
        self.out.flush()?;
        Ok(self.out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routing() -> Routing {
        Routing { model: "a-model".into(), n_layers: 2, n_experts: 8, top_k: 2 }
    }

    /// Two steps, of one row and of two.
    fn file() -> Vec<u8> {
        let mut writer = TraceWriter::new(Vec::new(), routing()).unwrap();
        for (layer, ids) in [(0, &[1, 2][..]), (1, &[7, 0]), (0, &[3, 4, -1, -1]), (1, &[5, 6, -1, -1])] {
            writer.route(layer, ids).unwrap();
        }
        writer.finish().unwrap()
    }

    #[test]
    fn what_was_written_is_read() {
        let path = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(path.path(), file()).unwrap();
        let trace = Trace::read(path.path()).unwrap();
        assert_eq!(trace.routing(), &routing());
        assert_eq!((trace.n_steps(), trace.n_rows(0), trace.n_rows(1)), (2, 1, 2));
        assert_eq!((trace.ids(0, 1), trace.ids(1, 0)), (&[7, 0][..], &[3, 4, -1, -1][..]));
    }

    #[test]
    fn a_file_that_ends_early_is_an_error() {
        let bytes = file();
        let whole_step = bytes.len() - 4 - 16;
        for end in 0..bytes.len() {
            let parsed = Trace::parse("t", &bytes[..end]);
            match parsed {
                Ok(trace) => assert!(trace.n_steps() == 0 || end == whole_step, "cut at {end}"),
                Err(error) => assert!(end < 8 || error.to_string().contains("ends inside"), "{error}"),
            }
        }
    }

    #[test]
    fn hostile_files_are_one_sentence() {
        let good = file();
        let with = |at: usize, word: u32| {
            let mut bytes = good.clone();
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            bytes
        };
        let name_end = 28 + "a-model".len();
        let cases = [
            (b"GGUF".to_vec(), "not a routing trace"),
            (with(8, 2), "version 2"),
            (with(12, 0), "n_layers 0"),
            (with(12, u32::MAX), "n_layers 4294967295"),
            (with(16, 65536), "n_experts 65536"),
            (with(20, 9), "top_k 9, which should be from 1 to 8"),
            (with(24, 0), "name bytes 0"),
            (with(24, 4096), "inside of its header"),
            (with(28, u32::MAX), "UTF-8"),
            (with(name_end, 0), "no rows"),
            (with(name_end, u32::MAX), "inside of step 0"),
            (with(name_end + 4, 8), "expert 8 of 8"),
        ];
        for (bytes, why) in cases {
            let error = Trace::parse("t", &bytes).unwrap_err().to_string();
            assert!(error.contains(why), "{error}: {why}");
        }
    }

    fn counts(trace: &Trace, layer: usize, steps: Range<usize>) -> Vec<usize> {
        let mut counts = vec![0; trace.routing().n_experts];
        steps.flat_map(|step| trace.ids(step, layer)).for_each(|&id| counts[id as usize] += 1);
        counts
    }

    fn synthetic(preference: Preference) -> Trace {
        let routing = Routing { n_experts: 32, top_k: 4, ..routing() };
        Trace::synthetic(routing, 2000, 2, preference, 7)
    }

    #[test]
    fn draws_follow_the_preference() {
        let share_of_favourite = |preference| {
            let counts = counts(&synthetic(preference), 0, 0..2000);
            *counts.iter().max().unwrap() as f64 / counts.iter().sum::<usize>() as f64
        };
        let uniform = share_of_favourite(Preference::Uniform);
        assert!((1.0 / 32.0..1.2 / 32.0).contains(&uniform), "{uniform}");
        let zipf = share_of_favourite(Preference::Zipf { exponent: 1.0 });
        assert!((0.14..0.25).contains(&zipf), "drawn in most rows, and once a row: {zipf}");
    }

    #[test]
    fn favourites_drift_and_differ_between_layers() {
        let favourite = |trace: &Trace, layer, steps| {
            let counts = counts(trace, layer, steps);
            (0..counts.len()).max_by_key(|&e| counts[e])
        };
        let fixed = synthetic(Preference::Zipf { exponent: 1.5 });
        assert_eq!(favourite(&fixed, 0, 0..500), favourite(&fixed, 0, 1500..2000));
        assert_ne!(favourite(&fixed, 0, 0..500), favourite(&fixed, 1, 0..500));
        let drifting = synthetic(Preference::Drifting { exponent: 1.5, swaps: 1 });
        let favourites: Vec<_> = (0..20).map(|i| favourite(&drifting, 0, 100 * i..100 * i + 20)).collect();
        assert!(favourites.windows(2).filter(|pair| pair[0] != pair[1]).count() > 10, "{favourites:?}");
    }

    #[test]
    fn experts_of_a_row_differ_and_a_seed_repeats() {
        let preference = Preference::Zipf { exponent: 3.0 };
        let all = Routing { n_experts: 4, top_k: 4, ..routing() };
        let trace = Trace::synthetic(all.clone(), 50, 3, preference, 1);
        for step in 0..50 {
            for row in trace.ids(step, 1).chunks(4) {
                let mut row = row.to_vec();
                row.sort_unstable();
                assert_eq!(row, [0, 1, 2, 3]);
            }
        }
        assert_eq!(trace, Trace::synthetic(all.clone(), 50, 3, preference, 1));
        assert_ne!(trace, Trace::synthetic(all, 50, 3, preference, 2));
    }
}
