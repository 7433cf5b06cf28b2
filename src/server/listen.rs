//! A socket for an app: connections, bounds on slow clients, and an end that lets running requests finish.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::Extension;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
};

use super::{Server, access::Peer, app};

/// Bytes that the head of a request may have.
const MOST_HEAD_BYTES: usize = 64 << 10;
/// Connections at a time; more wait to be accepted.
const MOST_CONNECTIONS: usize = 1024;
/// How long to wait where the system gives no connection, for want of file descriptors for example.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Answers connections until `end` is sent or dropped, then lets running requests finish.
pub async fn listen(listener: TcpListener, server: Arc<Server>, mut end: oneshot::Receiver<()>) {
    let routes = app(server.clone());
    let connections = GracefulShutdown::new();
    let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let accept = async {
            let place = room.clone().acquire_owned().await.expect("it is never closed");
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            accepted = accept => accepted,
            _ = &mut end => break,
        };
        match accepted {
            Ok((stream, peer)) => connect(stream, peer, place, &routes, &server, &connections),
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
    drop(listener);
    server.drain();
    connections.shutdown().await;
}

fn connect(
    stream: TcpStream,
    peer: SocketAddr,
    place: OwnedSemaphorePermit,
    routes: &axum::Router,
    server: &Server,
    connections: &GracefulShutdown,
) {
    // Small events must not wait for more; a system that cannot promise it sends them a little later.
    let _: io::Result<()> = stream.set_nodelay(true);
    let routes = routes.clone().layer(Extension(Peer(peer.ip())));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(server.settings().head_time)
        .max_buf_size(MOST_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    let connection = connections.watch(connection);
    // A connection that breaks is its client's affair.
    tokio::spawn(async move {
        let _ = connection.await;
        drop(place);
    });
}
