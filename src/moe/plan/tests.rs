//! The planner against devices that obey it, and the places that it gives.

use proptest::prelude::*;

use super::{
    super::cost::tests::{BOX, Q30},
    *,
};

const ALL: Choices = Choices { fetch: true, read_in_place: true, host: true };

fn options(mode: Mode, choices: Choices, n_slots: usize) -> PlannerOptions {
    PlannerOptions {
        n_layers: 2,
        n_experts: 16,
        n_slots,
        policy: Policy::Lru,
        expert: Q30,
        rates: BOX,
        mode,
        choices,
        deterministic: false,
    }
}

fn planned(planner: &mut Planner, layer: u32, ids: &[i32]) -> Result<(Planned, RouteReply), PlanError> {
    let mut reply = RouteReply::with_capacity(16);
    planner.plan(layer, ids, &mut reply).map(|planned| (planned, reply))
}

#[test]
fn more_rows_go_over_the_link_first_and_then_more_worth() {
    let mut planner = Planner::new(options(Mode::Share(0.5), ALL, 0)).unwrap();
    planned(&mut planner, 0, &[7, 9]).unwrap();
    planned(&mut planner, 0, &[9]).unwrap();
    let (split, reply) = planned(&mut planner, 0, &[1, 7, 3, 9, 3, -1]).unwrap();
    assert_eq!((reply.read_in_place, reply.host), ([3, 9].map(Banked::own).to_vec(), vec![7, 1]));
    assert_eq!((split.n_hits, split.n_fetched, split.n_in_place, split.n_host), (0, 0, 2, 2));
}

#[test]
fn a_miss_without_a_slot_takes_the_next_way() {
    let ids = [0, 1, 2, 3];
    let ways = |choices| {
        let mut planner = Planner::new(options(Mode::Gpu, choices, 3)).unwrap();
        planned(&mut planner, 0, &ids).map(|(p, _)| (p.n_fetched, p.n_in_place, p.n_host))
    };
    assert_eq!(ways(ALL), Ok((3, 1, 0)));
    assert_eq!(ways(Choices { read_in_place: false, ..ALL }), Ok((3, 0, 1)));
    assert_eq!(ways(Choices { fetch: false, ..ALL }), Ok((0, 4, 0)));
    let fetch_only = Choices { fetch: true, read_in_place: false, host: false };
    assert_eq!(ways(fetch_only), Err(PlanError::TooFewSlots { layer: 0, needed: 4, n_slots: 3 }));
}

#[test]
fn a_refused_route_point_leaves_the_cache_as_it_was() {
    let choices = Choices { fetch: true, read_in_place: false, host: false };
    let mut planner = Planner::new(options(Mode::Auto, choices, 3)).unwrap();
    planned(&mut planner, 0, &[0, 1, 2]).unwrap();
    let before = planner.cache().table().to_vec();
    assert!(planned(&mut planner, 0, &[0, 3, 4, 5]).is_err());
    for id in [-2, 16] {
        let refused = planned(&mut planner, 1, &[0, id]).map(|(planned, _)| planned);
        assert_eq!(refused, Err(PlanError::NotAnExpert { layer: 1, id, n_experts: 16 }));
    }
    assert_eq!(planner.cache().table(), before);
    assert_eq!(planner.cache().n_admissible(), 3, "nothing is held");
    assert_eq!(planned(&mut planner, 0, &[3, 4, 5]).unwrap().0.n_fetched, 3);
}

#[test]
fn a_mode_that_cannot_be_honoured_is_an_error() {
    let made = |mode, choices| Planner::new(options(mode, choices, 4)).err();
    let host_only = Choices { fetch: false, read_in_place: false, host: true };
    let link_only = Choices { host: false, ..ALL };
    for (mode, on_host, on_link) in [
        (Mode::Auto, None, None),
        (Mode::Gpu, Some(PlanError::NoLink), None),
        (Mode::Cpu, None, Some(PlanError::NoHost)),
        (Mode::Hybrid, Some(PlanError::NoLink), Some(PlanError::NoHost)),
    ] {
        assert_eq!((made(mode, host_only), made(mode, link_only)), (on_host, on_link), "{mode:?}");
    }
}

#[test]
fn observations_move_the_split_unless_placement_is_deterministic() {
    for (deterministic, n_link) in [(false, 8), (true, 3)] {
        let mut planner =
            Planner::new(PlannerOptions { deterministic, ..options(Mode::Auto, ALL, 0) }).unwrap();
        let ids: Vec<i32> = (0..8).collect();
        for _ in 0..100 {
            let (planned, _) = planned(&mut planner, 0, &ids).unwrap();
            planner.observe_link(&planned, planned.split.link_seconds / 2.0);
            planner.observe_host(&planned, planned.split.host_seconds * 2.0);
        }
        assert_eq!(planned(&mut planner, 0, &ids).unwrap().0.split.n_link, n_link);
    }
}

#[test]
fn a_step_that_nobody_asked_about_fills_the_cache() {
    let mut planner = Planner::new(options(Mode::Gpu, ALL, 8)).unwrap();
    let mut reply = RouteReply::with_capacity(16);
    let late = planner.catch_up(1, &[4, 5, 6, 4], 2, &mut reply).unwrap();
    assert_eq!((late.n_hits, late.n_in_place), (0, 3));
    assert_eq!(reply.fetch.iter().map(|fetch| fetch.from.expert).collect::<Vec<_>>(), [4, 5]);
    assert!(reply.read_in_place.is_empty() && reply.host.is_empty());
    reply.clear();
    assert_eq!(planner.catch_up(1, &[4, 5, 6], 2, &mut reply).unwrap().n_hits, 2);
}

#[test]
fn the_program_follows_the_misses() {
    let rates = Rates { reply_seconds: 63e-6, ..BOX };
    let after_eight_routes = |n_hits: u32| {
        let mut planner = Planner::new(PlannerOptions { rates, ..options(Mode::Auto, ALL, 8) }).unwrap();
        assert_eq!(planner.next_step(), StepKind::CoExecuted, "nothing is known yet");
        let mut changes = Vec::new();
        for expert in 0..n_hits {
            planner.cache_mut().admit(0, expert, &mut changes);
        }
        planner.cache_mut().release();
        planned(&mut planner, 0, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        planner.next_step()
    };
    assert_eq!(after_eight_routes(0), StepKind::CoExecuted);
    assert_eq!(after_eight_routes(8), StepKind::InPlace);
    let no_slots = Choices { fetch: false, ..ALL };
    assert_eq!(Planner::new(options(Mode::Gpu, no_slots, 0)).unwrap().next_step(), StepKind::InPlace);
    assert_eq!(Planner::new(options(Mode::Gpu, ALL, 8)).unwrap().next_step(), StepKind::CoExecuted);
    assert_eq!(Planner::new(options(Mode::Hybrid, ALL, 8)).unwrap().next_step(), StepKind::CoExecuted);
}

#[test]
fn counters_add_up() {
    let mut planner = Planner::new(options(Mode::Share(0.5), ALL, 2)).unwrap();
    planned(&mut planner, 0, &[0, 1, 2, 3]).unwrap();
    let (last, _) = planned(&mut planner, 0, &[0, 1, 2, 3]).unwrap();
    let counters = planner.counters();
    assert_eq!((counters.points, counters.hits, counters.fetched), (2, 2, 2));
    assert_eq!((counters.in_place, counters.host), (1, 3));
    planned(&mut planner, 1, &[0]).unwrap();
    let [first, second] = planner.layer_counters() else { panic!("there are two layers") };
    assert_eq!((*first, second.points, second.hits + second.misses()), (counters, 1, 1));
    assert_eq!(planner.counters(), first.plus(second));
    assert!(counters.exposed_seconds > 0.0 && counters.hidden_seconds > 0.0);
    assert!(counters.exposed_seconds < 3.0 * last.split.seconds);
}

fn mode() -> impl Strategy<Value = Mode> {
    prop_oneof![Just(Mode::Auto), Just(Mode::Gpu), Just(Mode::Cpu), (0.0..1.0f64).prop_map(Mode::Share)]
}

/// What two layers' banks hold: the expert of each record.
type Bytes = std::collections::BTreeMap<(u32, u32), u32>;

/// Does what the reply to a route point and its reads ask for, as the host does; gives every expert that was computed, or why not.
fn obey(
    planner: &mut Planner,
    layer: u32,
    reply: &RouteReply,
    bytes: &mut Bytes,
) -> Result<Vec<u32>, String> {
    let (wanted, ram) = planner.from_disk();
    let link: Vec<Banked> = reply.fetch.iter().map(|f| f.from).chain(reply.read_in_place.clone()).collect();
    let on_disk = &wanted.reads[wanted.n_awaited..];
    let n_there = reply.host.len() - on_disk.len() - wanted.waiting.len();
    let (there, rest) = reply.host.split_at(n_there);
    let expected: Vec<u32> = on_disk.iter().map(|from| from.expert).chain(wanted.waiting.clone()).collect();
    if rest != expected {
        return Err(format!("the host's {rest:?} are not {expected:?}"));
    }
    let mut kept: Vec<Banked> = there
        .iter()
        .map(|&expert| Banked { expert, record: ram.record_of(layer, expert).unwrap() })
        .chain(link.iter().copied())
        .collect();
    for (i, from) in wanted.reads.iter().enumerate() {
        let is_own = i < wanted.n_awaited && link.contains(from);
        if kept.iter().any(|kept| kept.record == from.record && !(is_own && kept == from)) {
            return Err(format!("the read of {from:?} overwrites one of {kept:?}"));
        }
        bytes.insert((layer, from.record), from.expert);
        kept.push(*from);
    }
    if let Some(lost) = kept.iter().find(|from| bytes.get(&(layer, from.record)) != Some(&from.expert)) {
        return Err(format!("{lost:?} is not in its record"));
    }
    let mut given: Vec<Banked> = kept[..n_there].iter().chain(on_disk).copied().collect();
    let mut computed: Vec<u32> = kept.iter().map(|from| from.expert).collect();
    for &expert in &wanted.waiting {
        let Some(record) = ram.admit(layer, expert).or_else(|| {
            ram.let_go(layer, given.pop()?.record);
            ram.admit(layer, expert)
        }) else {
            return Err(format!("there is never room for {expert}"));
        };
        if link.iter().any(|from| from.record == record) {
            return Err(format!("{expert} overwrites what the device reads"));
        }
        bytes.insert((layer, record), expert);
        given.push(Banked { expert, record });
        computed.push(expert);
    }
    computed.sort_unstable();
    computed.dedup();
    Ok(computed)
}

#[test]
fn what_lies_on_the_disk_goes_to_the_host_and_what_is_in_memory_over_the_link() {
    let mut planner = Planner::new(options(Mode::Share(1.0), ALL, 2)).unwrap();
    planner.set_ram(RamCache::new(16, &[3, 3], Policy::Lru));
    planner.set_disk_rate(3e9);
    let (first, reply) = planned(&mut planner, 0, &[4, 5]).unwrap();
    assert_eq!((first.n_disk, reply.host, reply.fetch.len()), (2, vec![4, 5], 0));
    let (wanted, _) = planner.from_disk();
    assert_eq!((wanted.reads.len(), wanted.n_awaited, wanted.waiting.len()), (2, 0, 0));
    let (second, reply) = planned(&mut planner, 0, &[4, 5, 6, 7]).unwrap();
    assert_eq!((second.n_disk, second.n_fetched, reply.host), (2, 2, vec![6, 7]));
    let (wanted, _) = planner.from_disk();
    assert_eq!((wanted.reads.len(), &wanted.waiting[..]), (1, &[7][..]), "one record is left for both");
    assert!(second.split.seconds > 2.0 * Q30.record_bytes as f64 / 3e9, "the disk is in the prediction");
    let counters = planner.counters();
    assert_eq!((counters.disk, counters.host, counters.fetched), (4, 4, 2));
    assert_eq!(planner.next_step(), StepKind::CoExecuted);
}

#[test]
fn a_device_that_does_everything_needs_all_of_it_in_memory() {
    let choices = Choices { fetch: true, read_in_place: false, host: false };
    let mut planner = Planner::new(options(Mode::Gpu, choices, 8)).unwrap();
    planner.set_ram(RamCache::new(16, &[3, 3], Policy::Lru));
    let (three, reply) = planned(&mut planner, 0, &[4, 5, 6]).unwrap();
    assert_eq!((three.n_fetched, reply.fetch.len(), planner.from_disk().0.n_awaited), (3, 3, 3));
    let refused = planned(&mut planner, 1, &[4, 5, 6, 7]).map(|(planned, _)| planned);
    assert_eq!(refused, Err(PlanError::TooFewRecords { layer: 1, needed: 4, n_records: 3 }));
    assert_eq!(planned(&mut planner, 0, &[4, 5, 6]).unwrap().0.n_hits, 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Whatever the mode, the choices and the slots: each routed expert has one place, slots have one owner, and a
    /// device that obeys the replies has the mirror's table.
    #[test]
    fn each_routed_expert_has_one_place(
        mode in mode(),
        choices in any::<(bool, bool, bool)>(),
        n_slots in 0..24usize,
        points in prop::collection::vec(
            (0..2u32, (1..17usize).prop_flat_map(|n_rows| prop::collection::vec(-1..16i32, n_rows * 4))),
            1..30,
        ),
    ) {
        let choices = Choices { fetch: choices.0, read_in_place: choices.1, host: choices.2 };
        let Ok(mut planner) = Planner::new(options(mode, choices, n_slots)) else { return Ok(()) };
        let mut table = vec![-1; 32];
        let mut records = vec![None; n_slots];
        for (layer, ids) in points {
            let before = table.clone();
            let capacity = RouteReply::with_capacity(16).table.capacity();
            let (planned, reply) = match planned(&mut planner, layer, &ids) {
                Err(PlanError::TooFewSlots { needed, .. }) => {
                    prop_assert!(needed > n_slots || !choices.fetch);
                    prop_assert!(!choices.host && !choices.read_in_place);
                    continue;
                }
                planned => planned.unwrap(),
            };
            prop_assert_eq!(reply.table.capacity(), capacity, "a route point allocates nothing");
            for change in &reply.table {
                table[change.entry as usize] = change.slot;
            }
            for Fetch { from, slot } in &reply.fetch {
                prop_assert_eq!(table[(layer * 16 + from.expert) as usize], *slot as i32);
                records[*slot as usize] = Some(layer * 16 + from.expert);
            }
            prop_assert_eq!(planner.cache().table(), &table[..]);
            for (entry, &slot) in table.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                prop_assert_eq!(records[slot as usize], Some(entry as u32));
            }
            let mut counts = [0; 4];
            for expert in 0..16u32 {
                let entry = (layer * 16 + expert) as usize;
                let fetched = reply.fetch.iter().filter(|fetch| fetch.from.expert == expert).count();
                let places = [
                    usize::from(table[entry] >= 0 && fetched == 0),
                    fetched,
                    reply.read_in_place.iter().filter(|from| from.expert == expert).count(),
                    reply.host.iter().filter(|e| **e == expert).count(),
                ];
                if ids.contains(&(expert as i32)) {
                    prop_assert_eq!(places.iter().sum::<usize>(), 1, "expert {}", expert);
                    prop_assert!(before[entry] < 0 || table[entry] == before[entry], "it stays");
                    counts.iter_mut().zip(places).for_each(|(count, n)| *count += n);
                } else {
                    prop_assert_eq!(places[1..].iter().sum::<usize>(), 0);
                }
            }
            prop_assert_eq!(
                counts,
                [planned.n_hits, planned.n_fetched, planned.n_in_place, planned.n_host]
            );
            prop_assert!(choices.fetch || planned.n_fetched == 0);
            prop_assert!(choices.read_in_place || planned.n_in_place == 0);
            prop_assert!(choices.host || planned.n_host == 0);
        }
    }

    /// The same over a disk: whatever host memory holds, each routed expert has one place, its bytes are there when it is
    /// computed, and nothing that is still needed is overwritten.
    #[test]
    fn each_routed_expert_comes_from_somewhere(
        mode in mode(),
        choices in any::<(bool, bool, bool)>(),
        n_slots in 0..24usize,
        n_records in (1..17usize, 1..17usize),
        lru in any::<bool>(),
        points in prop::collection::vec(
            (0..2u32, (1..9usize).prop_flat_map(|n_rows| prop::collection::vec(-1..16i32, n_rows * 4))),
            1..30,
        ),
    ) {
        let choices = Choices { fetch: choices.0, read_in_place: choices.1, host: choices.2 };
        let Ok(mut planner) = Planner::new(options(mode, choices, n_slots)) else { return Ok(()) };
        let n_records = [n_records.0, n_records.1];
        let policy = if lru { Policy::Lru } else { Policy::DEFAULT };
        planner.set_ram(RamCache::new(16, &n_records, policy));
        planner.set_disk_rate(2e9);
        let mut bytes = Bytes::new();
        for (layer, ids) in points {
            let (planned, reply) = match planned(&mut planner, layer, &ids) {
                Err(PlanError::TooFewSlots { .. }) => {
                    prop_assert!(!choices.host && !choices.read_in_place);
                    continue;
                }
                Err(PlanError::TooFewRecords { needed, .. }) => {
                    prop_assert!(!choices.host && needed > n_records[layer as usize]);
                    continue;
                }
                planned => planned.unwrap(),
            };
            let computed = obey(&mut planner, layer, &reply, &mut bytes);
            let computed = computed.map_err(TestCaseError::fail)?;
            let n_link = planned.n_fetched + planned.n_in_place;
            prop_assert_eq!(reply.fetch.len() + reply.read_in_place.len(), n_link);
            prop_assert_eq!(reply.host.len(), planned.n_host);
            prop_assert_eq!(computed.len(), n_link + planned.n_host, "each once");
            let mut routed: Vec<i32> = ids.iter().copied().filter(|id| *id >= 0).collect();
            routed.sort_unstable();
            routed.dedup();
            prop_assert_eq!(routed.len(), planned.n_hits + computed.len());
            prop_assert!(computed.iter().all(|expert| routed.contains(&(*expert as i32))));
        }
    }
}
