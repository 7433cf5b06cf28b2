//! [`Hub`]: requests to a Hugging Face hub. The token goes to the hub alone: not to where it redirects, and not over a
//! connection that others can read.

use std::{env, fs, io::Read, time::Duration};

use ureq::{Agent, Body, http::Response};

use super::{HubError, listing::Remote, name::ModelName, places};

const ENDPOINT: &str = "https://huggingface.co";
/// The longest description of a model, or list of shards.
const MAX_ANSWER_BYTES: u64 = 64 << 20;
/// The longest token file that is read.
const MAX_TOKEN_BYTES: u64 = 4096;
/// A connection that gives nothing for so long is taken for broken.
const SILENCE: Duration = Duration::from_secs(60);

/// A hub, and who asks.
pub struct Hub {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    /// The time before the first new attempt after a failure; it doubles with each.
    pub(super) pause: Duration,
}

impl Hub {
    /// The hub that the environment names, as Hugging Face's tools read it: `HF_ENDPOINT`, and the token of `HF_TOKEN`, else of
    /// the file `HF_TOKEN_PATH`, else of the one that their login wrote.
    pub fn from_env() -> Self {
        let set = |name: &str| {
            env::var(name).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
        };
        Hub::new(&set("HF_ENDPOINT").unwrap_or(ENDPOINT.into()), set("HF_TOKEN").or_else(token_file))
    }

    fn new(endpoint: &str, token: Option<String>) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .user_agent(concat!("freetoken/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(SILENCE))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .build();
        let endpoint = endpoint.trim_end_matches('/');
        let is_private = endpoint.starts_with("https://")
            || ["http://127.0.0.1", "http://localhost", "http://[::1]"].iter().any(|own| {
                endpoint.strip_prefix(own).is_some_and(|rest| rest.is_empty() || rest.starts_with([':', '/']))
            });
        Hub {
            agent: config.into(),
            endpoint: endpoint.into(),
            token: token.filter(|_| is_private),
            pause: Duration::from_secs(1),
        }
    }

    /// What the hub says of a model.
    pub(super) fn model(&self, name: &ModelName) -> Result<Remote, HubError> {
        let url = format!(
            "{}/api/models/{}/revision/{}?blobs=true",
            self.endpoint,
            name.repository(),
            name.revision()
        );
        let remote = Remote::parse(&self.bytes(&url)?).map_err(|reason| HubError::Listing { url, reason })?;
        remote.check_names(name)?;
        Ok(remote)
    }

    /// The address of a file.
    pub(super) fn file_url(&self, name: &ModelName, remote: &Remote, file: &str) -> String {
        format!("{}/{}/resolve/{}/{file}", self.endpoint, name.repository(), remote.commit)
    }

    /// A short answer. What may be a passing failure is tried again.
    pub(super) fn bytes(&self, url: &str) -> Result<Vec<u8>, HubError> {
        let network =
            |error: &dyn std::error::Error| HubError::Network { url: url.into(), reason: error.to_string() };
        self.patiently(|| {
            let mut bytes = Vec::new();
            let body = self.get(url, 0)?.into_body();
            body.into_reader()
                .take(MAX_ANSWER_BYTES + 1)
                .read_to_end(&mut bytes)
                .map_err(|error| network(&error))?;
            if bytes.len() as u64 > MAX_ANSWER_BYTES {
                let reason = format!("it has more than {} MiB", MAX_ANSWER_BYTES >> 20);
                return Err(HubError::Listing { url: url.into(), reason });
            }
            Ok(bytes)
        })
    }

    /// The file at `url` from byte `start` on, or all of it where the server knows no parts.
    pub(super) fn get(&self, url: &str, start: u64) -> Result<Response<Body>, HubError> {
        // The agent drops the token where it is sent elsewhere.
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if start > 0 {
            request = request.header("Range", format!("bytes={start}-"));
        }
        let response = request
            .call()
            .map_err(|error| HubError::Network { url: url.into(), reason: error.to_string() })?;
        let url = url.to_owned();
        match response.status().as_u16() {
            200 | 206 => Ok(response),
            status @ (401 | 403) if self.token.is_some() => Err(HubError::TokenRefused { url, status }),
            status @ (401 | 403) => Err(HubError::NoToken { url, status }),
            404 => Err(HubError::NotFound { url }),
            status => Err(HubError::Status { url, status }),
        }
    }

    /// Does it again, a few times and ever later, where waiting may help.
    pub(super) fn patiently<T>(&self, mut work: impl FnMut() -> Result<T, HubError>) -> Result<T, HubError> {
        let mut pause = self.pause;
        for _ in 0..MAX_RETRIES {
            match work() {
                Err(error) if may_pass(&error) => std::thread::sleep(pause),
                done => return done,
            }
            pause *= 2;
        }
        work()
    }
}

/// Attempts after a failure, unless something came in between.
const MAX_RETRIES: usize = 4;

fn may_pass(error: &HubError) -> bool {
    match error {
        HubError::Network { .. } => true,
        HubError::Status { status, .. } => *status == 429 || *status >= 500,
        _ => false,
    }
}

fn token_file() -> Option<String> {
    let path =
        places::env_dir("HF_TOKEN_PATH").or_else(|| Some(places::hugging_face_dir()?.join("token")))?;
    fs::metadata(&path).ok().filter(|file| file.len() <= MAX_TOKEN_BYTES)?;
    let token = fs::read_to_string(path).ok()?.trim().to_owned();
    (!token.is_empty()).then_some(token)
}
