//! How device memory is divided at load: what the model needs in any case, then slots for experts; and how many experts host memory
//! holds. Pure.

use std::{fmt, str::FromStr};

/// Part of the memory that is left to the driver, to programs and to their scratch.
const MARGIN_SHARE: u64 = 32;
/// The least of it.
const MARGIN_BYTES: u64 = 256 << 20;
/// Records that are on their way in a prefill, at most, and as a part of the slots beside them. The link rests while they wait for
/// the attention of a long prompt, so that they should be most of a layer's.
const RING_SLOTS: usize = 96;
const RING_SHARE: usize = 3;
/// The ring as a part of all records of a device that has one memory with the host.
const HOST_RING_SHARE: usize = 8;
/// Fewer would leave nothing to stream while something is computed.
const LEAST_RING: usize = 2;
/// Part of the free host memory that experts leave alone, and the least of it.
const HOST_MARGIN_SHARE: u64 = 8;
const HOST_MARGIN_BYTES: u64 = 1 << 30;

/// `--expert-cache`: how much of the device holds experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CacheSize {
    /// Bytes of records.
    Bytes(u64),
    /// Per cent of all experts.
    Percent(f64),
    /// Experts.
    Slots(usize),
}

impl FromStr for CacheSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no size of an expert cache: write 2GiB, 25% or 96slots");
        if let Some(percent) = text.strip_suffix('%') {
            let percent: f64 = percent.trim().parse().map_err(|_| wrong())?;
            return if (0.0..=100.0).contains(&percent) {
                Ok(CacheSize::Percent(percent))
            } else {
                Err(wrong())
            };
        }
        if let Some(slots) = text.strip_suffix("slots").or_else(|| text.strip_suffix("slot")) {
            return slots.trim().parse().map(CacheSize::Slots).map_err(|_| wrong());
        }
        Ok(CacheSize::Bytes(text.parse::<ByteCount>().map_err(|_| wrong())?.0))
    }
}

/// A number of bytes as people write it: `6442450944`, `6GiB`, `7.5 GB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteCount(pub u64);

impl FromStr for ByteCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no number of bytes: write 6GiB, 500MB or a plain number");
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let unit: f64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "tb" => 1e12,
            "k" | "kib" => 1024.0,
            "m" | "mib" => f64::from(1 << 20),
            "g" | "gib" => f64::from(1 << 30),
            "t" | "tib" => 1024.0 * f64::from(1 << 30),
            _ => return Err(wrong()),
        };
        let bytes = number.parse::<f64>().map_err(|_| wrong())? * unit;
        if bytes < 1e18 { Ok(ByteCount(bytes as u64)) } else { Err(wrong()) }
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 1 << 30 => write!(f, "{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
            bytes => write!(f, "{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        }
    }
}

/// What a model takes on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// Weights that are not routed experts.
    pub dense_bytes: u64,
    /// Caches and activations with all experts on the device.
    pub step_bytes: u64,
    /// The same where experts are streamed.
    pub streamed_step_bytes: u64,
    /// One expert, padding included.
    pub record_bytes: u64,
    /// Experts of all layers.
    pub n_experts: usize,
    /// Layers that have some.
    pub n_layers: usize,
}

/// What there is, and what was asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Supply {
    /// Free bytes of the device, where it tells.
    pub free: Option<u64>,
    /// `--vram`: bytes that all of it may take.
    pub vram: Option<u64>,
    /// `--expert-cache`.
    pub cache: Option<CacheSize>,
    /// Free bytes of host memory, where the system tells.
    pub host: Option<u64>,
    /// `--ram`: bytes of it for experts.
    pub ram: Option<u64>,
    /// Whether experts can be read from a disk while the model runs.
    pub disk: bool,
}

/// Where experts go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertPlan {
    /// All of them onto the device.
    Resident,
    /// All of them into host banks, which the device reads as its own memory.
    InPlace,
    /// Into host banks, behind a cache.
    Cached {
        /// Slots that hold experts from step to step.
        n_slots: usize,
        /// Slots beside them that prefill streams through.
        n_ring: usize,
        /// Bytes that nothing takes, where the budget is known.
        spare: Option<u64>,
        /// Bytes of which all of this is a part, where they are known.
        budget: Option<u64>,
        /// Experts that host banks have room for, of all layers together; `None`: all of them.
        n_records: Option<usize>,
    },
}

/// Why a plan does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BudgetError {
    /// `--vram` is more than there is.
    #[error(
        "--vram {asked} is more than the {free} that are free on the device: the largest that fits is {free}"
    )]
    MoreThanFree {
        /// Asked for.
        asked: ByteCount,
        /// Free.
        free: ByteCount,
    },
    /// A model without routed experts.
    #[error("the model has no routed experts: --expert-cache divides nothing")]
    NoExperts,
    /// Not even the weights that every token needs fit.
    #[error(
        "the model needs {needed} on the device for what is not routed experts and for two of those (weights {dense}, caches \
         and activations {step}), and {budget} are to be had: try a smaller --context, or --backend cpu"
    )]
    TooSmall {
        /// Needed.
        needed: ByteCount,
        /// Of that, weights.
        dense: ByteCount,
        /// Of that, caches and activations.
        step: ByteCount,
        /// To be had.
        budget: ByteCount,
    },
    /// Neither the device nor the host holds the experts.
    #[error(
        "the experts do not fit on the device, and in host memory they need {needed} where {free} are free: close other \
         programs, or choose a smaller model or format"
    )]
    TooLittleHost {
        /// Bytes of all banks.
        needed: ByteCount,
        /// Free.
        free: ByteCount,
    },
    /// `--ram` is more than there is.
    #[error(
        "--ram {asked} is more than the {free} of host memory that are free: the largest that fits is {free}"
    )]
    MoreRamThanFree {
        /// Asked for.
        asked: ByteCount,
        /// Free.
        free: ByteCount,
    },
    /// Host memory holds not even an expert of each layer.
    #[error(
        "{budget} of host memory hold fewer than one expert of each layer, and what is to be computed must be there: the least is \
         --ram {least}"
    )]
    TooLittleRam {
        /// To be had.
        budget: ByteCount,
        /// An expert of each layer.
        least: ByteCount,
    },
    /// The cache that was asked for does not fit beside the rest.
    #[error("an expert cache of {asked} slots does not fit: the largest is --expert-cache {fits}slots")]
    CacheTooLarge {
        /// Slots asked for.
        asked: usize,
        /// Slots that fit.
        fits: usize,
    },
}

/// Slots that prefill streams through, beside so many that hold experts.
pub fn ring(n_slots: usize) -> usize {
    RING_SLOTS.min(n_slots / RING_SHARE).max(LEAST_RING)
}

/// How many experts host memory holds; `None`: all of them.
///
/// # Errors
/// [`BudgetError`]: one sentence with what would fit.
pub fn host_records(demand: &Demand, supply: &Supply) -> Result<Option<usize>, BudgetError> {
    let needed = demand.n_experts as u64 * demand.record_bytes;
    if let (Some(asked), Some(free)) = (supply.ram, supply.host)
        && asked.min(needed) > free
    {
        return Err(BudgetError::MoreRamThanFree { asked: ByteCount(asked), free: ByteCount(free) });
    }
    let budget = match (supply.ram, supply.host) {
        (Some(ram), _) => ram,
        (None, Some(free)) if free < needed => {
            free.saturating_sub((free / HOST_MARGIN_SHARE).max(HOST_MARGIN_BYTES))
        }
        (None, _) => return Ok(None),
    };
    if budget >= needed {
        return Ok(None);
    }
    if !supply.disk {
        return Err(BudgetError::TooLittleHost { needed: ByteCount(needed), free: ByteCount(budget) });
    }
    let least = demand.n_layers as u64 * demand.record_bytes;
    if budget < least {
        return Err(BudgetError::TooLittleRam { budget: ByteCount(budget), least: ByteCount(least) });
    }
    Ok(Some((budget / demand.record_bytes) as usize))
}

/// The plan of a device that has one memory with the host: no slots that experts stay in, and a ring out of the same budget. `None`
/// where that memory holds every expert.
///
/// # Errors
/// [`BudgetError`]: one sentence with what would fit.
pub fn plan_one_memory(demand: &Demand, supply: &Supply) -> Result<Option<ExpertPlan>, BudgetError> {
    let Some(n_all) = host_records(demand, supply)? else { return Ok(None) };
    let n_ring = (n_all / HOST_RING_SHARE).clamp(LEAST_RING, RING_SLOTS);
    let n_records = n_all.saturating_sub(n_ring);
    if n_records < demand.n_layers {
        let bytes = |n: usize| ByteCount(n as u64 * demand.record_bytes);
        let least = bytes(demand.n_layers + LEAST_RING);
        return Err(BudgetError::TooLittleRam { budget: bytes(n_all), least });
    }
    let (spare, budget) = (None, None);
    Ok(Some(ExpertPlan::Cached { n_slots: 0, n_ring, spare, budget, n_records: Some(n_records) }))
}

/// Divides the memory.
///
/// # Errors
/// [`BudgetError`]: one sentence with what would fit.
pub fn plan(demand: &Demand, supply: &Supply) -> Result<ExpertPlan, BudgetError> {
    if let (Some(vram), Some(free)) = (supply.vram, supply.free)
        && vram > free
    {
        return Err(BudgetError::MoreThanFree { asked: ByteCount(vram), free: ByteCount(free) });
    }
    let budget = supply.vram.or(supply.free);
    if demand.n_experts == 0 && supply.cache.is_some() {
        return Err(BudgetError::NoExperts);
    }
    let too_small = |step: u64, needed: u64| BudgetError::TooSmall {
        needed: ByteCount(needed),
        dense: ByteCount(demand.dense_bytes),
        step: ByteCount(step),
        budget: ByteCount(budget.unwrap_or(0)),
    };
    let left = |step: u64| -> Result<Option<u64>, BudgetError> {
        let Some(budget) = budget else { return Ok(None) };
        let margin = (budget / MARGIN_SHARE).max(MARGIN_BYTES.min(budget / 8));
        let needed = demand.dense_bytes + step + margin;
        budget.checked_sub(needed).map(Some).ok_or_else(|| too_small(step, needed))
    };
    let slots_in = |bytes: u64| usize::try_from(bytes / demand.record_bytes.max(1)).unwrap_or(usize::MAX);
    let n_all = demand.n_experts;
    if demand.n_experts == 0 {
        return left(demand.step_bytes).map(|_| ExpertPlan::Resident);
    }
    if supply.cache.is_none()
        && left(demand.step_bytes).is_ok_and(|left| left.is_none_or(|left| slots_in(left) >= n_all))
    {
        return Ok(ExpertPlan::Resident);
    }
    let n_records = host_records(demand, supply)?;
    let asked = supply.cache.map(|cache| match cache {
        CacheSize::Bytes(bytes) => slots_in(bytes).min(n_all),
        CacheSize::Percent(percent) => ((n_all as f64 * percent / 100.0).round() as usize).min(n_all),
        CacheSize::Slots(slots) => slots.min(n_all),
    });
    let Some(left) = left(demand.streamed_step_bytes)? else {
        let n_slots = asked.unwrap_or(n_all);
        return Ok(ExpertPlan::Cached { n_slots, n_ring: ring(n_slots), spare: None, budget, n_records });
    };
    let fits = slots_in(left);
    if fits < LEAST_RING {
        let needed = budget.unwrap_or(0) - left + LEAST_RING as u64 * demand.record_bytes;
        return Err(too_small(demand.streamed_step_bytes, needed));
    }
    let fits = fits - ring(fits);
    match asked {
        Some(asked) if asked > fits => Err(BudgetError::CacheTooLarge { asked, fits }),
        _ => {
            let n_slots = asked.unwrap_or(fits.min(n_all));
            let n_ring = ring(n_slots);
            let spare = left.checked_sub((n_slots + n_ring) as u64 * demand.record_bytes);
            Ok(ExpertPlan::Cached { n_slots, n_ring, spare, budget, n_records })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const DEMAND: Demand = Demand {
        dense_bytes: 2 * GIB,
        step_bytes: GIB / 2,
        streamed_step_bytes: GIB,
        record_bytes: 8 << 20,
        n_experts: 3072,
        n_layers: 48,
    };

    fn planned(free: Option<u64>, vram: Option<u64>, cache: Option<&str>) -> Result<ExpertPlan, BudgetError> {
        let cache = cache.map(|text| text.parse().unwrap());
        let plan = plan(&DEMAND, &Supply { free, vram, cache, host: Some(64 * GIB), ram: None, disk: true })?;
        Ok(match plan {
            ExpertPlan::Cached { n_slots, n_ring, spare, budget, n_records } => {
                assert_eq!(budget, vram.or(free));
                ExpertPlan::Cached { n_slots, n_ring, spare, budget: None, n_records }
            }
            plan => plan,
        })
    }

    fn cached(n_slots: usize, n_ring: usize, spare_mib: Option<u64>) -> Result<ExpertPlan, BudgetError> {
        let spare = spare_mib.map(|mib| mib << 20);
        Ok(ExpertPlan::Cached { n_slots, n_ring, spare, budget: None, n_records: None })
    }

    #[test]
    fn what_fits_is_resident_and_what_does_not_is_cached() {
        assert_eq!(planned(Some(40 * GIB), None, None), Ok(ExpertPlan::Resident));
        assert_eq!(planned(None, None, None), Ok(ExpertPlan::Resident));
        // 8 GiB: 3 and a margin of 1/4 are taken; 4.75 GiB hold 608 records, 96 of them the ring.
        assert_eq!(planned(Some(8 * GIB), None, None), cached(512, 96, Some(0)));
        assert_eq!(planned(Some(40 * GIB), Some(8 * GIB), None), planned(Some(8 * GIB), None, None));
    }

    #[test]
    fn a_cache_is_as_large_as_was_asked_for() {
        // 40 GiB: 3 and a margin of 1.25 are taken, the rest is 36,608 MiB.
        assert_eq!(planned(Some(40 * GIB), None, Some("25%")), cached(768, 96, Some(36_608 - 864 * 8)));
        assert_eq!(planned(Some(40 * GIB), None, Some("2GiB")), cached(256, 85, Some(36_608 - 341 * 8)));
        assert_eq!(planned(Some(8 * GIB), None, Some("2slots")), cached(2, 2, Some(4864 - 32)));
        assert_eq!(planned(None, None, Some("0%")), cached(0, 2, None));
        assert_eq!(
            planned(Some(8 * GIB), None, Some("50%")),
            Err(BudgetError::CacheTooLarge { asked: 1536, fits: 512 })
        );
    }

    #[test]
    fn what_cannot_fit_is_refused_with_what_would() {
        let text = planned(Some(8 * GIB), Some(9 * GIB), None).unwrap_err().to_string();
        assert!(text.contains("--vram 9.0 GiB") && text.contains("8.0 GiB"), "{text}");
        let little = Supply {
            free: Some(8 * GIB),
            vram: None,
            cache: None,
            host: Some(23 * GIB),
            ram: None,
            disk: false,
        };
        let text = plan(&DEMAND, &little).unwrap_err().to_string();
        assert!(text.contains("24.0 GiB") && text.contains("20.1 GiB"), "{text}");
        let barely = planned(Some(3 * GIB + GIB / 4 + (12 << 20)), None, None);
        assert!(matches!(barely, Err(BudgetError::TooSmall { .. })), "one record and no ring: {barely:?}");
        let dense = Demand { n_experts: 0, ..DEMAND };
        let supply = Supply { host: None, ..little };
        assert_eq!(plan(&dense, &supply), Ok(ExpertPlan::Resident));
        let cache = Some(CacheSize::Slots(4));
        assert_eq!(plan(&dense, &Supply { cache, ..supply }), Err(BudgetError::NoExperts));
        let little = Supply { free: Some(GIB), ..supply };
        assert!(matches!(plan(&dense, &little), Err(BudgetError::TooSmall { .. })));
        let text = planned(Some(2 * GIB), None, None).unwrap_err().to_string();
        assert!(text.contains("2.0 GiB") && text.contains("--context"), "{text}");
    }

    #[test]
    fn host_memory_holds_what_it_can() {
        let records = |host: u64, ram: Option<u64>| {
            let (host, ram) = (Some(host * GIB), ram.map(|gib| gib * GIB));
            host_records(&DEMAND, &Supply { free: None, vram: None, cache: None, host, ram, disk: true })
        };
        assert_eq!(records(24, None), Ok(None), "as large as all of them");
        assert_eq!(records(23, None), Ok(Some(23 * 128 * 7 / 8)), "an eighth is left alone");
        assert_eq!(records(4, None), Ok(Some(3 * 128)), "and a GiB at least");
        assert_eq!(records(64, Some(6)), Ok(Some(6 * 128)));
        assert_eq!(records(64, Some(30)), Ok(None));
        assert_eq!(records(25, Some(30)), Ok(None), "more than they take");
        let text = records(4, Some(6)).unwrap_err().to_string();
        assert!(text.contains("--ram 6.0 GiB") && text.contains("fits is 4.0 GiB"), "{text}");
        let text = records(64, Some(0)).unwrap_err().to_string();
        assert!(text.contains("least is --ram 384.0 MiB"), "{text}");
    }

    #[test]
    fn one_memory_has_its_ring_out_of_the_same_budget() {
        let planned = |ram: u64| {
            let supply =
                Supply { free: None, vram: None, cache: None, host: None, ram: Some(ram << 20), disk: true };
            plan_one_memory(&DEMAND, &supply)
        };
        let cached = |n_ring, n_records| {
            let (spare, budget) = (None, None);
            Ok(Some(ExpertPlan::Cached { n_slots: 0, n_ring, spare, budget, n_records: Some(n_records) }))
        };
        assert_eq!(planned(24 << 10), Ok(None));
        assert_eq!(planned(8 << 10), cached(96, 928));
        assert_eq!(planned(8 * 160), cached(20, 140));
        assert_eq!(planned(8 * 55), cached(6, 49));
        let text = planned(8 * 49).unwrap_err().to_string();
        assert!(text.contains("392.0 MiB") && text.contains("least is --ram 400.0 MiB"), "{text}");
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let bytes = |text: &str| text.parse::<ByteCount>().map(|count| count.0);
        assert_eq!(bytes("6GiB"), Ok(6 * GIB));
        assert_eq!(bytes("7.5 GB"), Ok(7_500_000_000));
        assert_eq!(bytes("4096"), Ok(4096));
        for wrong in ["", "GiB", "-1", "1e3", "6 apples", "99999999999 GiB"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        assert_eq!("96slots".parse(), Ok(CacheSize::Slots(96)));
        assert_eq!("12.5%".parse(), Ok(CacheSize::Percent(12.5)));
        for wrong in ["101%", "-5%", "slots", "%", "x"] {
            assert!(wrong.parse::<CacheSize>().is_err(), "{wrong}");
        }
    }
}
