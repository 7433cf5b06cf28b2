//! Copies of recurrent states that outlive a step: what later sequences go on from, in slots of the device and in host memory,
//! and the state before a chunk that may be abandoned. It moves bytes; what is kept, and where, is decided by `prefix`.

use freetoken_backend::{Backend, Result, View, ViewCopy};

use super::{
    Engine, EngineError, Sequence,
    prefix::{Restow, StateCounters, Stow},
    state_places::Place,
};

/// Room for copies of states. Each is one run of bytes, the parts of all layers one behind the other.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    /// A buffer each.
    slots: Vec<View>,
    /// By place; what was never used is empty.
    host: Vec<Vec<u8>>,
    /// The state before the chunk that is half way through the layers, where there are such chunks.
    before_chunk: Option<View>,
}

/// States that are kept for sequences to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptStates {
    /// Bytes of one.
    pub state_bytes: usize,
    /// Slots of the device.
    pub n_slots: usize,
    /// Of those, taken.
    pub n_in_slots: usize,
    /// Most states in host memory.
    pub n_host: usize,
    /// States there.
    pub n_in_host: usize,
    /// What happened so far.
    pub counters: StateCounters,
}

impl Snapshots {
    /// So many slots of `bytes` each; `undoes`: and room for the state before a chunk.
    ///
    /// # Errors
    /// The device has no room.
    pub(super) fn new(backend: &dyn Backend, bytes: usize, n_slots: usize, undoes: bool) -> Result<Self> {
        let mut snapshots = Snapshots::default();
        snapshots.grow(backend, bytes, n_slots)?;
        if undoes {
            snapshots.before_chunk = Some(backend.alloc(bytes)?.whole());
        }
        Ok(snapshots)
    }

    /// Makes slots until there are `n`.
    pub(super) fn grow(&mut self, backend: &dyn Backend, bytes: usize, n: usize) -> Result<()> {
        while self.slots.len() < n {
            self.slots.push(backend.alloc(bytes)?.whole());
        }
        Ok(())
    }

    /// Moves a state from a slot to host memory; returns when it is there.
    fn spill(&mut self, backend: &dyn Backend, [slot, place]: [u32; 2]) -> Result<()> {
        let slot = self.slots[slot as usize].clone();
        backend.read(&slot, self.host_room(place, slot.bytes()))
    }

    /// A place in host memory, for `bytes`.
    fn host_room(&mut self, place: u32, bytes: usize) -> &mut [u8] {
        let place = place as usize;
        if self.host.len() <= place {
            self.host.resize_with(place + 1, Vec::new);
        }
        self.host[place].resize(bytes, 0);
        &mut self.host[place]
    }

    /// Follows a change of the numbers of places; behind it there are `n_slots` slots at most.
    pub(super) fn restow(&mut self, backend: &dyn Backend, restow: &Restow, n_slots: usize) -> Result<()> {
        let spilled = restow.spills.iter().try_for_each(|&spill| self.spill(backend, spill));
        let taken = restow.slots.iter().map(|&slot| self.slots[slot as usize].clone());
        let free = (0..self.slots.len()).filter(|&slot| !restow.slots.contains(&(slot as u32)));
        self.slots = taken.chain(free.map(|slot| self.slots[slot].clone())).take(n_slots).collect();
        self.host = restow.host.iter().map(|&place| std::mem::take(&mut self.host[place as usize])).collect();
        spilled
    }
}

/// The parts of a state and the same bytes of a copy, in one direction or the other.
fn copies(
    parts: impl Iterator<Item = View>,
    whole: &View,
    copy: fn(View, View) -> ViewCopy,
) -> Vec<ViewCopy> {
    let mut start = 0;
    let copies = parts.map(|part| {
        let end = start + part.bytes();
        let place = whole.slice(start..end);
        start = end;
        copy(part, place)
    });
    copies.collect()
}

fn away(part: View, place: View) -> ViewCopy {
    ViewCopy { src: part, dst: place }
}

fn back(part: View, place: View) -> ViewCopy {
    ViewCopy { src: place, dst: part }
}

impl Engine {
    /// States that are kept; `None` where no layer is recurrent.
    pub fn kept_states(&self) -> Option<KeptStates> {
        let places = self.prefixes.places()?;
        Some(KeptStates {
            state_bytes: self.state_bytes(),
            n_slots: places.slots.n(),
            n_in_slots: places.slots.n_used(),
            n_host: places.host.n(),
            n_in_host: places.host.n_used(),
            counters: self.prefixes.counters(),
        })
    }

    /// Bytes of device memory for states: of sequences that run, of those that are kept, and before a chunk.
    pub fn state_device_bytes(&self) -> u64 {
        (self.limits.n_all_states() * self.state_bytes()) as u64
    }

    /// Copies the state of a sequence to where it is kept. Into a slot it is queued behind the last step, and nobody waits.
    pub(super) fn stow(&mut self, sequence: &Sequence, stow: &Stow) -> std::result::Result<(), EngineError> {
        if let Some(spill) = stow.spill {
            self.snapshots.spill(&*self.backend, spill)?;
        }
        match stow.place {
            Place::Slot(slot) => self.copy_to_slot(sequence, slot)?,
            Place::Host(place) => {
                let parts: Vec<View> = self.state_parts(sequence).collect();
                let mut rest = self.snapshots.host_room(place, parts.iter().map(View::bytes).sum());
                for part in parts {
                    let into = rest.split_off_mut(..part.bytes()).expect("as many bytes as all parts have");
                    self.backend.read(&part, into)?;
                }
            }
        }
        Ok(())
    }

    /// Makes a state that is kept a sequence's own. The sequence has a place for it.
    pub(super) fn take_up(&self, sequence: &Sequence, place: Place) -> std::result::Result<(), EngineError> {
        match place {
            Place::Slot(slot) => {
                let slot = &self.snapshots.slots[slot as usize];
                self.backend.copy(&copies(self.state_parts(sequence), slot, back))?;
            }
            Place::Host(place) => {
                let mut rest = &self.snapshots.host[place as usize][..];
                for part in self.state_parts(sequence) {
                    let from = rest.split_off(..part.bytes()).expect("a state of this model");
                    self.backend.write(&part, from)?;
                }
            }
        }
        Ok(())
    }

    /// Queues a copy of a sequence's state into a slot.
    pub(super) fn copy_to_slot(
        &self,
        sequence: &Sequence,
        slot: u32,
    ) -> std::result::Result<(), EngineError> {
        let slot = &self.snapshots.slots[slot as usize];
        Ok(self.backend.copy(&copies(self.state_parts(sequence), slot, away))?)
    }

    /// Puts the state of a sequence aside before a chunk that may be abandoned.
    pub(super) fn put_aside(&self, sequence: &Sequence) -> std::result::Result<(), EngineError> {
        match &self.snapshots.before_chunk {
            Some(aside) if sequence.n_computed() > 0 => {
                Ok(self.backend.copy(&copies(self.state_parts(sequence), aside, away))?)
            }
            _ => Ok(()),
        }
    }

    /// Brings it back.
    pub(super) fn bring_back(&self, sequence: &Sequence) -> std::result::Result<(), EngineError> {
        match &self.snapshots.before_chunk {
            Some(aside) if sequence.n_computed() > 0 => {
                Ok(self.backend.copy(&copies(self.state_parts(sequence), aside, back))?)
            }
            _ => Ok(()),
        }
    }
}
