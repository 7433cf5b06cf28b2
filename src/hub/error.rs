//! Why a model does not come here, each in one sentence that says what to do.

use std::{io, path::Path};

/// Why a model could not be found or downloaded.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// No name of a model on the hub.
    #[error("`{name}` is no name of a model: give ORG/NAME, as on huggingface.co, or ORG/NAME@REVISION")]
    Name {
        /// What was given.
        name: String,
    },
    /// It is not on this machine, and nothing may be downloaded.
    #[error(
        "{name} is not on this machine, and --offline forbids to download it: run `freetoken pull {name}` when there is a network"
    )]
    Offline {
        /// The model.
        name: String,
    },
    /// The hub wants to know who asks.
    #[error(
        "{url} lets nobody in without a token ({status}): the model is gated, private or not there; accept its terms on its \
         page, make a token on huggingface.co/settings/tokens, and give it as HF_TOKEN"
    )]
    NoToken {
        /// What was asked for.
        url: String,
        /// HTTP status.
        status: u16,
    },
    /// The token is not enough.
    #[error(
        "{url} refuses the token that was given ({status}): accept the model's terms on its page with the same account, or give \
         another HF_TOKEN"
    )]
    TokenRefused {
        /// What was asked for.
        url: String,
        /// HTTP status.
        status: u16,
    },
    /// Neither model nor revision, or no such file.
    #[error("there is no {url} (404): check the spelling of ORG/NAME and of the revision")]
    NotFound {
        /// What was asked for.
        url: String,
    },
    /// Any other answer that is no success.
    #[error("{url} answers {status}: try again later, or set HF_ENDPOINT to a mirror")]
    Status {
        /// What was asked for.
        url: String,
        /// HTTP status.
        status: u16,
    },
    /// No answer, or half of one.
    #[error(
        "{url} cannot be read ({reason}): check the network and run the command again, it goes on where it stopped"
    )]
    Network {
        /// What was asked for.
        url: String,
        /// The client's reason.
        reason: String,
    },
    /// The hub's description of the model makes no sense.
    #[error("what {url} says of the model cannot be used: {reason}; is HF_ENDPOINT a Hugging Face hub?")]
    Listing {
        /// What was asked for.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// A file would be written where it does not belong.
    #[error("{name} has a file named {file:?}, which is no name of a file: this model is not downloaded")]
    FileName {
        /// The model.
        name: String,
        /// The file.
        file: String,
    },
    /// The model has other files than freetoken reads.
    #[error(
        "{name} has no {file}: freetoken runs models in safetensors; look for another upload of the model"
    )]
    Missing {
        /// The model.
        name: String,
        /// The file.
        file: String,
    },
    /// The disk is too small.
    #[error(
        "{name} needs {needed} more in {dir}, and {free} are free: make room, or set FREETOKEN_HOME to another disk"
    )]
    DiskFull {
        /// The model.
        name: String,
        /// Bytes to come, in words.
        needed: String,
        /// Bytes there are, in words.
        free: String,
        /// The folder.
        dir: String,
    },
    /// What came is not what the hub announced.
    #[error("{file} came damaged ({reason}) and was removed: run the command again")]
    Damaged {
        /// The file.
        file: String,
        /// What differs.
        reason: String,
    },
    /// Another process downloads the same model.
    #[error("{dir} is being filled by another freetoken: wait for it")]
    Busy {
        /// The folder.
        dir: String,
    },
    /// A file of this machine.
    #[error("{path} cannot be written: {source}")]
    Disk {
        /// The path.
        path: String,
        /// The system's reason.
        source: io::Error,
    },
}

impl HubError {
    /// For `map_err` on what the disk says of `path`.
    pub(super) fn disk(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.display().to_string();
        move |source| HubError::Disk { path, source }
    }
}
