//! Signals that end a server: Ctrl-C, and where there is one, the signal to terminate.

use anyhow::{Context, Result};

/// Ctrl-C and, where there is one, the signal to terminate.
pub(super) struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    /// Takes the signals over: from now on they end nothing by themselves.
    pub(super) fn listen() -> Result<Self> {
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            Ok(Signals { terminate: signal(SignalKind::terminate()).context("cannot listen to signals")? })
        }
        #[cfg(not(unix))]
        Ok(Signals {})
    }

    /// Resolves when a signal comes.
    pub(super) async fn next(&mut self) {
        #[cfg(unix)]
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        #[cfg(not(unix))]
        // Where Ctrl-C cannot be heard, nothing ends the server but the system.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending().await
        }
    }
}
