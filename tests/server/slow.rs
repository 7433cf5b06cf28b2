//! Clients on real sockets that are slower than anybody may be.

use std::time::{Duration, Instant};

use freetoken::{
    scheduler::Stop,
    server::{Settings, listen::listen},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    time::{sleep, timeout},
};

use crate::fake::{Script, client_with};

/// How long heads and bodies may take here.
const SHORT: Duration = Duration::from_millis(300);
/// Between two bytes of a slow client, which is never silent for long.
const PAUSE: Duration = Duration::from_millis(20);
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

fn body() -> String {
    json!({ "model": "tiny", "max_tokens": 5, "messages": [{ "role": "user", "content": "Hi." }] })
        .to_string()
}

fn head(path: &str, n_bytes: usize) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {n_bytes}\r\n\r\n")
}

/// Sends `quick` at once and `slow` byte by byte to a server of these times. What it said before it closed the connection, and
/// how many bytes of `slow` it took until then.
async fn said_to(times: [Duration; 2], quick: &str, slow: &str) -> (String, usize) {
    let [head_time, body_time] = times;
    let settings = Settings { head_time, body_time, ..Settings::local("tiny") };
    let client = client_with(settings, [Script::Says("Hello.", Stop::Eos)]);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let (end, ended) = oneshot::channel();
    let listening = tokio::spawn(listen(listener, client.server.clone(), ended));
    let (mut reads, mut writes) = TcpStream::connect(address).await.expect("it listens").into_split();
    let slow = slow.as_bytes().to_vec();
    let sending = async move {
        let sent = writes.write_all(quick.as_bytes()).await;
        let mut n_sent = 0;
        while sent.is_ok() && n_sent < slow.len() && writes.write_all(&slow[n_sent..=n_sent]).await.is_ok() {
            n_sent += 1;
            sleep(PAUSE).await;
        }
        // A client that has closed its half has left.
        (n_sent, writes)
    };
    let mut text = Vec::new();
    let reading = async {
        // A connection that is reset is closed too.
        let _ =
            timeout(PATIENCE, reads.read_to_end(&mut text)).await.expect("the server closes the connection");
    };
    let ((n_sent, writes), ()) = tokio::join!(sending, reading);
    drop(writes);
    drop(end);
    timeout(PATIENCE, listening).await.expect("the server ends").expect("and does not panic");
    (String::from_utf8(text).expect("answers are UTF-8"), n_sent)
}

#[tokio::test]
async fn a_head_that_comes_byte_by_byte_is_not_waited_for() {
    let start = Instant::now();
    let long = format!("GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: {}\r\n\r\n", "x".repeat(2000));
    let (said, n_sent) = said_to([SHORT, PATIENCE], "", &long).await;
    assert!(said.is_empty() || said.starts_with("HTTP/1.1 408 "), "{said}");
    assert!(n_sent < long.len() && start.elapsed() < PATIENCE, "{n_sent} bytes in {:?}", start.elapsed());
}

#[tokio::test]
async fn a_connection_that_says_nothing_is_closed() {
    let (said, _) = said_to([SHORT, PATIENCE], "", "").await;
    assert!(said.is_empty() || said.starts_with("HTTP/1.1 408 "), "{said}");
    // Nor behind a request that was answered.
    let (said, _) = said_to([SHORT, PATIENCE], "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", "").await;
    assert!(said.starts_with("HTTP/1.1 200 ") && said.contains("\"ok\""), "{said}");
}

#[tokio::test]
async fn a_body_that_comes_byte_by_byte_is_refused_in_the_form_of_its_path() {
    let slow = format!("{{\"model\": \"{}\"}}", "x".repeat(2000));
    for path in ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"] {
        let (said, n_sent) = said_to([PATIENCE, SHORT], &head(path, slow.len()), &slow).await;
        assert!(n_sent > 1 && n_sent < slow.len(), "{path}: {n_sent} bytes");
        let (head, body) = said.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{path}: {said}"));
        assert!(head.starts_with("HTTP/1.1 408 "), "{path}: {said}");
        let body: Value = serde_json::from_str(body).expect("JSON");
        assert_eq!(body["error"]["type"], "invalid_request_error", "{body}");
        assert_eq!(body["type"] == "error", path == "/v1/messages", "{body}");
    }
}

#[tokio::test]
async fn a_slow_client_in_time_is_answered() {
    let slow = body();
    let request =
        head("/v1/chat/completions", slow.len()).replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n");
    let (said, n_sent) = said_to([PATIENCE, PATIENCE], &request, &slow).await;
    assert!(said.starts_with("HTTP/1.1 200 ") && said.contains("Hello."), "{said}");
    assert_eq!(n_sent, slow.len());
}
