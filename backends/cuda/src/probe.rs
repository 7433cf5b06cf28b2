//! What NVIDIA cards there are, asked so that no machine panics: the library first, its version second, then each card.
//! Knows no context: nothing is allocated on a card that is only looked at.

use std::{fmt, str::FromStr};

use cudarc::driver::{DriverError, result, sys::CUdevice_attribute as Attribute};

use crate::driver;

/// CUDA version that a driver must have, as the driver counts: `1000 * major + 10 * minor`.
const DRIVER_FLOOR: i32 = 12_080;
/// Compute capability from which on there are kernels.
const CAPABILITY_FLOOR: (u32, u32) = (8, 0);

/// Why CUDA cannot be used here, in words the owner of the machine can act on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// The library of the driver is not there.
    #[error("no NVIDIA driver was found: install one of R570 or later to use an NVIDIA card")]
    NoDriver,
    /// The driver is older than the kernels.
    #[error(
        "the NVIDIA driver supports CUDA {}.{} and 12.8 is needed: update the driver to R570 or later",
        version / 1000,
        version % 1000 / 10
    )]
    OldDriver {
        /// CUDA version of the driver, `1000 * major + 10 * minor`.
        version: i32,
    },
    /// The driver is there and has no card.
    #[error(
        "the NVIDIA driver is installed and sees no card: check that one is plugged in and visible to this process"
    )]
    NoCard,
    /// The driver does not answer as it should.
    #[error("the NVIDIA driver does not answer ({0}): reboot, or reinstall the driver")]
    Driver(String),
    /// No card of that number or UUID.
    #[error("there is no CUDA card `{choice}`; there are: {found}")]
    Unknown {
        /// What was asked for.
        choice: CardChoice,
        /// The cards there are.
        found: String,
    },
    /// The card is older than the kernels.
    #[error(
        "{name} has compute capability {}.{}, and 8.0 (RTX 30 series) or later is needed: choose another device with --backend",
        capability.0,
        capability.1
    )]
    OldCard {
        /// Name of the card.
        name: String,
        /// Its compute capability.
        capability: (u32, u32),
    },
}

/// Which card.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum CardChoice {
    /// The first that the kernels run on.
    #[default]
    First,
    /// By the driver's number.
    Ordinal(usize),
    /// By UUID as `nvidia-smi -L` prints it, `GPU-` with or without.
    Uuid(String),
}

impl FromStr for CardChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(ordinal) = text.parse() {
            return Ok(CardChoice::Ordinal(ordinal));
        }
        let uuid = text.strip_prefix("GPU-").unwrap_or(text).to_ascii_lowercase();
        let digits = uuid.bytes().filter(u8::is_ascii_hexdigit).count();
        if digits == 32 && uuid.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-') {
            return Ok(CardChoice::Uuid(uuid));
        }
        Err(format!(
            "`{text}` is neither the number of a CUDA card nor its UUID (`freetoken devices` lists them)"
        ))
    }
}

impl fmt::Display for CardChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CardChoice::First => f.write_str("first"),
            CardChoice::Ordinal(ordinal) => write!(f, "{ordinal}"),
            CardChoice::Uuid(uuid) => write!(f, "GPU-{uuid}"),
        }
    }
}

/// A card as the driver shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    /// The driver's number, as `--backend cuda:N` takes it.
    pub ordinal: usize,
    /// Marketing name.
    pub name: String,
    /// `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, the same whichever cards are visible.
    pub uuid: String,
    /// Memory in bytes.
    pub total_bytes: u64,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
}

impl Card {
    /// Whether there are kernels for it.
    ///
    /// # Errors
    /// [`ProbeError::OldCard`].
    pub fn check(&self) -> Result<(), ProbeError> {
        if self.capability >= CAPABILITY_FLOOR {
            return Ok(());
        }
        Err(ProbeError::OldCard { name: self.name.clone(), capability: self.capability })
    }
}

/// Every card that the driver shows, the ones that are too old included, by number.
///
/// # Errors
/// [`ProbeError`]: no driver, one that is too old, or no card.
pub fn cards() -> Result<Vec<Card>, ProbeError> {
    if !driver::is_present() {
        return Err(ProbeError::NoDriver);
    }
    check_version(driver::version().map_err(refused)?)?;
    result::init().map_err(refused)?;
    let n_cards = result::device::get_count().map_err(refused)?;
    let cards = (0..n_cards).map(card).collect::<Result<Vec<_>, _>>().map_err(refused)?;
    if cards.is_empty() { Err(ProbeError::NoCard) } else { Ok(cards) }
}

/// The chosen card of `cards`, if kernels run on it.
pub(crate) fn choose<'a>(cards: &'a [Card], choice: &CardChoice) -> Result<&'a Card, ProbeError> {
    let found = match choice {
        CardChoice::First => cards.iter().find(|card| card.check().is_ok()).or(cards.first()),
        CardChoice::Ordinal(ordinal) => cards.iter().find(|card| card.ordinal == *ordinal),
        CardChoice::Uuid(uuid) => cards.iter().find(|card| plain(&card.uuid) == plain(uuid)),
    };
    let Some(card) = found else {
        let names = cards.iter().map(|card| format!("{} ({}, GPU-{})", card.ordinal, card.name, card.uuid));
        return Err(ProbeError::Unknown {
            choice: choice.clone(),
            found: names.collect::<Vec<_>>().join(", "),
        });
    };
    card.check().map(|()| card)
}

fn card(ordinal: i32) -> Result<Card, DriverError> {
    let device = result::device::get(ordinal)?;
    let capability = |part| driver::attribute(device, part).map(|number| number.unsigned_abs());
    Ok(Card {
        ordinal: ordinal as usize,
        name: result::device::get_name(device)?,
        uuid: uuid_text(result::device::get_uuid(device)?.bytes.map(|byte| byte as u8)),
        total_bytes: driver::total_bytes(device)? as u64,
        capability: (
            capability(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            capability(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
    })
}

/// A UUID's digits.
fn plain(uuid: &str) -> String {
    uuid.chars().filter(|c| *c != '-').collect()
}

fn refused(error: DriverError) -> ProbeError {
    use cudarc::driver::sys::CUresult::CUDA_ERROR_NO_DEVICE;
    if error.0 == CUDA_ERROR_NO_DEVICE {
        ProbeError::NoCard
    } else {
        ProbeError::Driver(driver::describe(error))
    }
}

fn check_version(version: i32) -> Result<(), ProbeError> {
    if version < DRIVER_FLOOR { Err(ProbeError::OldDriver { version }) } else { Ok(()) }
}

/// `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`
fn uuid_text(bytes: [u8; 16]) -> String {
    let hex =
        |range: std::ops::Range<usize>| bytes[range].iter().map(|b| format!("{b:02x}")).collect::<String>();
    [hex(0..4), hex(4..6), hex(6..8), hex(8..10), hex(10..16)].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(ordinal: usize, uuid: &str, capability: (u32, u32)) -> Card {
        Card { ordinal, name: format!("card {ordinal}"), uuid: uuid.into(), total_bytes: 8 << 30, capability }
    }

    const A: &str = "00000000-0000-0000-0000-00000000000a";
    const B: &str = "00000000-0000-0000-0000-00000000000b";

    #[test]
    fn a_machine_without_a_driver_gets_a_sentence_and_no_panic() {
        match cards() {
            Ok(cards) => assert!(!cards.is_empty()),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("NVIDIA driver") && text.contains(':'), "{text}");
                assert_eq!(driver::is_present(), error != ProbeError::NoDriver);
            }
        }
    }

    #[test]
    fn drivers_below_the_floor_are_named_with_their_version() {
        assert_eq!(check_version(12_080), Ok(()));
        assert_eq!(check_version(13_000), Ok(()));
        let text = check_version(12_040).unwrap_err().to_string();
        assert!(text.contains("CUDA 12.4 ") && text.contains("R570"), "{text}");
        assert!(check_version(0).is_err());
    }

    #[test]
    fn choices_are_numbers_or_uuids() {
        assert_eq!("1".parse(), Ok(CardChoice::Ordinal(1)));
        assert_eq!(format!("GPU-{}", A.to_uppercase()).parse(), Ok(CardChoice::Uuid(A.into())));
        assert_eq!(A.parse(), Ok(CardChoice::Uuid(A.into())));
        for wrong in ["", "-1", "GPU-", "first", "1.0", "g0000000-0000-0000-0000-00000000000a"] {
            assert!(wrong.parse::<CardChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_first_card_is_the_first_that_kernels_run_on() {
        let cards = [card(0, A, (7, 5)), card(1, B, (8, 9))];
        assert_eq!(choose(&cards, &CardChoice::First), Ok(&cards[1]));
        assert_eq!(choose(&cards, &CardChoice::Uuid(B.into())), Ok(&cards[1]));
        let old = choose(&cards, &CardChoice::Ordinal(0)).unwrap_err().to_string();
        assert!(old.contains("card 0") && old.contains("7.5"), "{old}");
        let unknown = choose(&cards, &CardChoice::Ordinal(2)).unwrap_err().to_string();
        assert!(unknown.contains("`2`") && unknown.contains(A) && unknown.contains("card 1"), "{unknown}");
        assert!(matches!(choose(&cards[..1], &CardChoice::First), Err(ProbeError::OldCard { .. })));
    }

    #[test]
    fn uuids_read_as_nvidia_smi_prints_them() {
        let bytes = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(uuid_text(bytes), "00112233-4455-6677-8899-aabbccddeeff");
    }
}
