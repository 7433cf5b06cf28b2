//! Models by name: where one lies on this machine, and how it comes here from the Hugging Face hub. It knows files by their
//! names, sizes and checksums; of their content only which shards an index lists.

mod client;
mod download;
mod error;
mod listing;
mod name;
mod places;
mod pull;

pub use client::Hub;
pub use error::HubError;
pub use name::ModelName;
pub use places::{find, models_dir, offline_by_environment};
pub use pull::Pull;
