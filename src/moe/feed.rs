//! The records of a layer in a prefill, in the order in which they go to the device: those in host memory first, then those that
//! come from a disk. A record that has gone makes room for the next one.

use std::collections::VecDeque;

use freetoken_backend::{Backend, Banked, Event, Result};

use super::{DiskTier, RamCache};

/// Records that went to the device last and are not waited for to make room, while there is something else to send.
const LEFT_ALONE: usize = 4;

/// The disk, and what host memory holds of it.
pub(super) type Below<'a> = (&'a mut DiskTier, &'a mut RamCache);

/// Experts of a layer that are to be sent.
pub(super) struct Feed {
    layer: u32,
    /// Whether another layer is computed first.
    is_ahead: bool,
    /// In host memory.
    ready: VecDeque<u32>,
    /// On their way from the disk, in this order.
    coming: VecDeque<u32>,
    /// Still on the disk: there was no room yet.
    unread: VecDeque<u32>,
    /// Records on their way to the device that make room there, and the end of that.
    sent: VecDeque<(u32, Event)>,
}

impl Feed {
    pub(super) fn new(n_experts: usize, is_ahead: bool) -> Self {
        let experts = || VecDeque::with_capacity(n_experts);
        Feed {
            layer: 0,
            is_ahead,
            ready: experts(),
            coming: experts(),
            unread: experts(),
            sent: VecDeque::with_capacity(n_experts),
        }
    }

    /// Whether every expert was sent.
    pub(super) fn is_done(&self) -> bool {
        self.ready.is_empty() && self.coming.is_empty() && self.unread.is_empty()
    }

    /// Forgets what is still to be sent.
    pub(super) fn clear(&mut self) {
        self.ready.clear();
        self.coming.clear();
        self.unread.clear();
    }

    /// Waits until the device has all that was sent and makes room.
    pub(super) fn rest(&mut self, backend: &dyn Backend) -> Result<()> {
        let last = self.sent.back().map(|(_, landed)| *landed);
        self.sent.clear();
        last.map_or(Ok(()), |landed| backend.wait(landed))
    }

    /// Begins with a layer: what it lacks is on its way at once, as much as there is room for. Nothing else of the layer is on its
    /// way to the device.
    pub(super) fn begin(
        &mut self,
        layer: u32,
        experts: impl Iterator<Item = u32>,
        backend: &dyn Backend,
        below: &mut Option<Below<'_>>,
    ) -> Result<()> {
        self.rest(backend)?;
        self.clear();
        self.layer = layer;
        let Some((disk, ram)) = below else {
            self.ready.extend(experts);
            return Ok(());
        };
        disk.settle(Some(layer), ram);
        ram.begin(layer);
        for expert in experts {
            let is_there = ram.touch(layer, expert).is_some();
            if is_there { &mut self.ready } else { &mut self.unread }.push_back(expert);
        }
        self.read(backend, below)
    }

    /// Requests what there is room for now.
    fn read(&mut self, backend: &dyn Backend, below: &mut Option<Below<'_>>) -> Result<()> {
        let Some((disk, ram)) = below else { return Ok(()) };
        while let Some(&expert) = self.unread.front() {
            let Some(record) = ram.admit(self.layer, expert) else {
                let is_idle = self.ready.is_empty() && self.coming.is_empty();
                if self.sent.len() <= LEFT_ALONE && !is_idle {
                    return Ok(());
                }
                let Some((gone, landed)) = self.sent.pop_front() else { return Ok(()) };
                backend.wait(landed)?;
                ram.let_go(self.layer, gone);
                continue;
            };
            match self.is_ahead {
                true => disk.read_ahead(self.layer, Banked { expert, record }),
                false => disk.request(self.layer, Banked { expert, record }),
            }
            self.coming.push_back(expert);
            self.unread.pop_front();
        }
        Ok(())
    }

    /// The next expert, which is in host memory, unless it must be waited for and `waits` says no.
    ///
    /// # Errors
    /// A read that failed, or the device's answer.
    pub(super) fn next(
        &mut self,
        waits: bool,
        backend: &dyn Backend,
        below: &mut Option<Below<'_>>,
    ) -> Result<Option<Banked>> {
        self.read(backend, below)?;
        let Some((disk, ram)) = below else {
            return Ok(self.ready.front().map(|&expert| Banked::own(expert)));
        };
        let banked = |expert: u32, ram: &RamCache| {
            let record = ram.record_of(self.layer, expert).expect("held since it was touched or admitted");
            Banked { expert, record }
        };
        if let Some(&expert) = self.ready.front() {
            return Ok(Some(banked(expert, ram)));
        }
        let Some(&expert) = self.coming.front() else { return Ok(None) };
        let from = banked(expert, ram);
        if !waits && !disk.is_there(self.layer, from) {
            return Ok(None);
        }
        self.coming.pop_front();
        disk.wait(self.layer, from, ram)?;
        self.ready.push_back(expert);
        Ok(Some(from))
    }

    /// The one that [`Self::next`] gave is on its way to the device. Only where a disk is below, its record makes room, and somebody
    /// waits for its end.
    pub(super) fn sent(&mut self, record: u32, landed: Event, below: &Option<Below<'_>>) {
        self.ready.pop_front();
        if below.is_some() {
            self.sent.push_back((record, landed));
        }
    }
}
