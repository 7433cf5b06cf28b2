//! The experts of a layer as records: one expert is one read and one copy.

use std::ops::Range;

use freetoken_backend::{ExpertRecord, HostBytes};

use super::{
    super::{FormatError, error::shorten},
    fault::{EntryFault, IndexFault},
    index::{Entry, Index, Kind, MAX_EXPERTS},
    region::Region,
};

/// How the name of an entry of records begins; five digits of the layer's number follow.
const PREFIX: &str = "experts#L";

/// The name of the entry of a MoE layer.
pub fn entry_name(moe_layer: usize) -> String {
    format!("{PREFIX}{moe_layer:05}")
}

/// The experts of one MoE layer.
#[derive(Debug, Clone, Copy)]
pub struct Records<'a> {
    entry: &'a Entry,
    region: &'a Region,
}

impl<'a> Records<'a> {
    /// Asserts that the entry is one of records.
    pub(super) fn new(entry: &'a Entry, region: &'a Region) -> Self {
        assert!(matches!(entry.kind, Kind::ExpertRecords { .. }), "an entry of records");
        Records { entry, region }
    }

    /// What is in each.
    pub fn record(&self) -> &'a ExpertRecord {
        let Kind::ExpertRecords { record, .. } = &self.entry.kind else { unreachable!("asserted when made") };
        record
    }

    /// The module that they are in a Hugging Face checkpoint: `model.layers.0.mlp.experts`.
    pub fn module(&self) -> &'a str {
        let Kind::ExpertRecords { module, .. } = &self.entry.kind else { unreachable!("asserted when made") };
        module
    }

    /// Experts of the layer.
    pub fn n_experts(&self) -> usize {
        self.entry.shape[0]
    }

    /// All records, one behind the other, where they are mapped.
    ///
    /// # Errors
    /// The system's refusal of memory for records that lie in several shards.
    pub fn mapped(&self) -> Result<HostBytes, FormatError> {
        self.region.bytes(&self.entry.range)
    }

    /// Reads the records of some experts into `into`, which is as long as they are, past the page cache where that can be;
    /// `progress` hears the bytes.
    ///
    /// # Errors
    /// [`FormatError`] naming the shard and the place in it.
    pub fn read(
        &self,
        experts: Range<usize>,
        into: &mut [u8],
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), FormatError> {
        assert!(experts.end <= self.n_experts(), "experts of this layer");
        let at = |expert: usize| self.entry.range.start + (expert * self.record().bytes) as u64;
        self.region.read(&(at(experts.start)..at(experts.end)), into, progress)
    }

    /// Reads bytes of one record from `start` on, as many as `into` has, on this thread alone. Asserts that they lie in it.
    ///
    /// # Errors
    /// [`FormatError`] naming the shard and the place in it.
    pub fn read_here(&self, expert: usize, start: usize, into: &mut [u8]) -> Result<(), FormatError> {
        let bytes = self.record().bytes;
        assert!(expert < self.n_experts() && start + into.len() <= bytes, "bytes of a record of this layer");
        let at = self.entry.range.start + (expert * bytes + start) as u64;
        self.region.read_here(&(at..at + into.len() as u64), into)
    }
}

/// Places of the entries of records among all, in the order of the layers, each of which has one. `label` is the index, for errors.
///
/// # Errors
/// [`FormatError`] for a name without a layer, a layer that is missing, banks beside records, or too many experts.
pub(super) fn layers(label: &str, index: &Index) -> Result<Vec<usize>, FormatError> {
    let wrong = |fault| FormatError::Index { file: label.to_string(), fault };
    let is_records = |entry: &&Entry| matches!(entry.kind, Kind::ExpertRecords { .. });
    let n_layers = index.entries.iter().filter(is_records).count();
    if n_layers > 0 && index.entries.iter().any(|entry| entry.kind == Kind::ExpertsBank) {
        return Err(wrong(IndexFault::BothKinds));
    }
    let mut layers = vec![None; n_layers];
    let mut n_experts = 0_u64;
    for (place, entry) in index.entries.iter().enumerate().filter(|(_, entry)| is_records(entry)) {
        let layer = entry.name.strip_prefix(PREFIX).and_then(|digits| digits.parse::<usize>().ok());
        let layer = layer.filter(|&layer| entry.name == entry_name(layer));
        let layer = layer.ok_or_else(|| FormatError::entry(label, &entry.name, EntryFault::BankName))?;
        // Names are unique, so that layers below the number of entries are all there.
        let Some(slot) = layers.get_mut(layer) else {
            return Err(FormatError::entry(label, &entry.name, EntryFault::Layer { layer, n_layers }));
        };
        *slot = Some(place);
        n_experts += entry.shape[0] as u64;
        if n_experts > MAX_EXPERTS {
            return Err(wrong(IndexFault::Experts { found: n_experts, limit: MAX_EXPERTS }));
        }
    }
    let missing = |(layer, place): (usize, Option<usize>)| {
        let bank = shorten(&entry_name(layer));
        place.ok_or_else(|| wrong(IndexFault::MissingBank { bank, layout: "record".into() }))
    };
    layers.into_iter().enumerate().map(missing).collect()
}
