//! A step's route points: each is answered as the planner says, and what falls to the host is computed, from the disk as it comes.

use std::time::Instant;

use freetoken_backend::{Banked, Result, RouteAsk, RouteReply, RouteServer};

use super::{Elastic, failed};

impl RouteServer for Elastic {
    fn answer(&mut self, ask: &RouteAsk<'_>, reply: &mut RouteReply) -> Result<()> {
        let now = Instant::now();
        if let Some(before) = self.answered.replace(now) {
            self.planner.observe_interval(&self.planned, (now - before).as_secs_f64());
        }
        if let Some(link) = ask.link {
            self.counters.link_seconds += link.seconds;
            self.counters.link_bytes += link.bytes;
            // What was read in place is in no sample.
            if self.planned.n_fetched > 0 && self.planned.n_in_place == 0 {
                self.planner.observe_link(&self.planned, link.seconds);
            }
        }
        let layer = ask.layer;
        self.settle(Some(layer));
        self.planned = self.planner.plan(layer, ask.ids, reply).map_err(|why| failed(layer, &why))?;
        let Elastic { disk: Some(disk), planner, .. } = self else { return Ok(()) };
        let (wanted, ram) = planner.from_disk();
        wanted.reads.iter().for_each(|from| disk.request(layer, *from));
        wanted.reads[..wanted.n_awaited].iter().try_for_each(|from| disk.wait(layer, *from, ram))?;
        disk.rate().into_iter().for_each(|rate| planner.set_disk_rate(rate));
        Ok(())
    }

    fn compute(&mut self, ask: &RouteAsk<'_>, host: &[u32], parts: &mut [f32]) -> Result<()> {
        let before = self.counters.host_seconds;
        if self.disk.is_some() {
            self.compute_from_disk(ask, host, parts)?;
        } else {
            self.given.clear();
            self.given.extend(host.iter().map(|&expert| Banked::own(expert)));
            self.compute_given(ask, parts)?;
        }
        self.planner.observe_host(&self.planned, self.counters.host_seconds - before);
        Ok(())
    }
}

impl Elastic {
    /// Lets the host compute the experts in `given`.
    fn compute_given(&mut self, ask: &RouteAsk<'_>, parts: &mut [f32]) -> Result<()> {
        let start = Instant::now();
        self.host.as_mut().expect("planned only where there is a host").compute(ask, &self.given, parts)?;
        self.counters.host_seconds += start.elapsed().as_secs_f64();
        Ok(())
    }

    /// Lets the host compute what is in host memory, then what comes from the disk, as it comes. A record that is computed makes room
    /// for what is still to be read.
    fn compute_from_disk(&mut self, ask: &RouteAsk<'_>, host: &[u32], parts: &mut [f32]) -> Result<()> {
        let (layer, mut n_begun) = (ask.layer, 0);
        let Elastic { planner, given, coming, .. } = self;
        let (wanted, ram) = planner.from_disk();
        let on_disk = &wanted.reads[wanted.n_awaited..];
        let there = &host[..host.len() - on_disk.len() - wanted.waiting.len()];
        let in_ram = |expert: u32| ram.record_of(layer, expert).expect("those in host memory come first");
        given.clear();
        given.extend(there.iter().map(|&expert| Banked { expert, record: in_ram(expert) }));
        coming.clear();
        coming.extend(on_disk);
        loop {
            if !self.given.is_empty() {
                self.compute_given(ask, parts)?;
            }
            let Elastic { disk, planner, given, coming, .. } = self;
            let disk = disk.as_mut().expect("asked for where there is a disk");
            let (wanted, ram) = planner.from_disk();
            given.drain(..).for_each(|from| ram.let_go(layer, from.record));
            while let Some(&expert) = wanted.waiting.get(n_begun) {
                let Some(record) = ram.admit(layer, expert) else { break };
                disk.request(layer, Banked { expert, record });
                coming.push_back(Banked { expert, record });
                n_begun += 1;
            }
            if coming.is_empty() {
                return Ok(());
            }
            // The next one, and what came meanwhile.
            while let Some(&next) = coming.front()
                && (given.is_empty() || disk.is_there(layer, next))
            {
                coming.pop_front();
                disk.wait(layer, next, ram)?;
                given.push(next);
            }
        }
    }
}
