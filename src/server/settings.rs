//! [`Settings`]: what the person who starts the server decides.

use std::time::Duration;

/// Checked settings of a server.
#[derive(Clone)]
pub struct Settings {
    /// The model's name for clients.
    pub model_name: String,
    /// Whether another name in a request is an error.
    pub strict_model: bool,
    /// What clients must send, where anything.
    pub api_key: Option<String>,
    /// Origins whose pages may ask; `*` allows all.
    pub cors_origins: Vec<String>,
    /// The largest body.
    pub max_body_bytes: usize,
    /// How long a client may take to send the head of a request, also behind an earlier one.
    pub head_time: Duration,
    /// How long it may send nothing while its body is not whole, and how long a small body may take.
    pub body_time: Duration,
    /// Requests that one client may have at a time.
    pub max_requests_per_client: usize,
    /// How long a stream is silent before it says that it lives.
    pub keep_alive: Duration,
}

impl Settings {
    /// Settings of a server for this machine alone.
    pub fn local(model_name: impl Into<String>) -> Self {
        Settings {
            model_name: model_name.into(),
            strict_model: false,
            api_key: None,
            cors_origins: Vec::new(),
            max_body_bytes: 32 << 20,
            head_time: Duration::from_secs(30),
            body_time: Duration::from_secs(30),
            max_requests_per_client: 64,
            keep_alive: Duration::from_secs(10),
        }
    }
}
