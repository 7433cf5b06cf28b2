//! The disk below host memory: what is on its way from it, and what happens where it does not arrive.

use freetoken_backend::{Banked, Error, Result};

use super::{DiskSums, RamCache, RecordReader};

/// Reads that were requested and are not settled.
pub struct DiskTier {
    reader: RecordReader,
    coming: Vec<(u32, Banked)>,
}

impl DiskTier {
    /// Nothing is on its way. At most `n_records` will be at a time.
    pub fn new(reader: RecordReader, n_records: usize) -> Self {
        DiskTier { reader, coming: Vec::with_capacity(n_records) }
    }

    /// Begins to read an expert into a record that it was admitted to, and that is held until [`Self::wait`] has returned.
    pub fn request(&mut self, layer: u32, from: Banked) {
        self.coming.push((layer, from));
        self.reader.request(layer, from, false);
    }

    /// The same of one that nobody waits for yet.
    pub fn read_ahead(&mut self, layer: u32, from: Banked) {
        self.coming.push((layer, from));
        self.reader.request(layer, from, true);
    }

    /// Whether [`Self::wait`] would return at once.
    pub fn is_there(&self, layer: u32, from: Banked) -> bool {
        !self.coming.contains(&(layer, from)) || self.reader.is_done(layer, from.record)
    }

    /// Waits until an expert that has a record is there. Where it does not come it has none any more.
    ///
    /// # Errors
    /// [`Error::StepFailed`] with file and place.
    pub fn wait(&mut self, layer: u32, from: Banked, ram: &mut RamCache) -> Result<()> {
        let Some(place) = self.coming.iter().position(|coming| *coming == (layer, from)) else {
            return Ok(());
        };
        self.coming.swap_remove(place);
        self.reader.wait(layer, from.record).map_err(|why| {
            ram.expel(layer, from.expert);
            Error::StepFailed { layer, why }
        })
    }

    /// Waits for everything that is on its way, of one layer or of all. What does not come has no record any more; whoever needs it
    /// reads it again, and hears why.
    pub fn settle(&mut self, layer: Option<u32>, ram: &mut RamCache) {
        let is_of = |of: u32| layer.is_none_or(|layer| layer == of);
        while let Some(&(of, from)) = self.coming.iter().find(|(of, _)| is_of(*of)) {
            drop(self.wait(of, from, ram));
        }
    }

    /// Sums since the start.
    pub fn sums(&self) -> DiskSums {
        self.reader.sums()
    }

    /// Bytes a second of late; `None` before the first read.
    pub fn rate(&self) -> Option<f64> {
        self.reader.rate()
    }
}
