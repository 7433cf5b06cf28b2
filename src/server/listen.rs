//! A socket for an app: connections, bounds on slow clients, and the end in two steps. Requests that run when the end is asked
//! for may finish; being asked twice ends them.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::Extension;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::net::{TcpListener, TcpStream};

use super::{Server, access::Peer, app};

/// How long a client may take to send the head of a request, also behind an earlier one.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// Bytes that the head of a request may have.
const MOST_HEAD_BYTES: usize = 64 << 10;
/// How long to wait where the system gives no connection, for want of file descriptors for example.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Answers connections until `end` resolves, then lets running requests finish, or stops at once when `at_once` resolves.
pub async fn listen(
    listener: TcpListener,
    server: Arc<Server>,
    end: impl Future<Output = ()>,
    at_once: impl Future<Output = ()>,
) {
    let routes = app(server.clone());
    let connections = GracefulShutdown::new();
    tokio::pin!(end);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut end => break,
        };
        match accepted {
            Ok((stream, peer)) => connect(stream, peer, &routes, &connections),
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
    drop(listener);
    server.drain();
    tokio::select! {
        () = connections.shutdown() => {}
        () = at_once => {}
    }
}

fn connect(stream: TcpStream, peer: SocketAddr, routes: &axum::Router, connections: &GracefulShutdown) {
    // Small events must not wait for more; a system that cannot promise it sends them a little later.
    let _: io::Result<()> = stream.set_nodelay(true);
    let routes = routes.clone().layer(Extension(Peer(peer.ip())));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(MOST_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    let connection = connections.watch(connection);
    // A connection that breaks is its client's affair.
    tokio::spawn(async move { _ = connection.await });
}
