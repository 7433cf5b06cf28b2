//! `freetoken pull`, as a user starts it, against a hub that this test plays.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::{Arc, Mutex},
    thread,
};

use serde_json::{Value, json};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo");
const MODEL: &str = "org/demo";
const COMMIT: &str = "c0ffee";
/// A file with a checksum, and the SHA-256 of its content.
const LARGE: (&str, &[u8], &str) = (
    "model.safetensors",
    b"0123456789abcdef",
    "9f9f5111f7b27a781f1f1ddde5ebc2dd2b796bfc7365c9c28b548e564176929f",
);

/// What the hub does to whoever asks.
#[derive(Clone, Default)]
struct Manners {
    /// Answers to everything with this status.
    status: Option<u16>,
    /// Cuts the first so many answers of the large file in the middle.
    cuts: usize,
    /// Gives whole files only.
    no_ranges: bool,
    /// Files beside those of the model: name and size.
    more: Vec<(String, u64)>,
    /// Other bytes of the large file.
    damaged: bool,
    /// Only this token comes in.
    token: Option<&'static str>,
    /// The files are elsewhere.
    redirect: Option<String>,
}

/// A request: path, range, token.
type Asked = (String, Option<String>, Option<String>);

struct Server {
    endpoint: String,
    asked: Arc<Mutex<Vec<Asked>>>,
    manners: Arc<Mutex<Manners>>,
}

impl Server {
    fn start(manners: Manners) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
        let server = Server { endpoint, asked: Arc::default(), manners: Arc::new(Mutex::new(manners)) };
        let (asked, manners) = (server.asked.clone(), server.manners.clone());
        // It ends with the test's process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let _ = serve(stream.expect("a connection"), &asked, &manners);
            }
        });
        server
    }

    fn asked(&self) -> Vec<Asked> {
        self.asked.lock().expect("no panic").clone()
    }

    /// Ranges of the large file that were asked for.
    fn ranges(&self) -> Vec<Option<String>> {
        let large = |asked: &Asked| asked.0.ends_with(LARGE.0);
        self.asked().into_iter().filter(large).map(|asked| asked.1).collect()
    }
}

fn contents() -> BTreeMap<&'static str, Vec<u8>> {
    [
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", b"{\"model\": 1}".to_vec()),
        ("README.md", b"read me".to_vec()),
        (LARGE.0, LARGE.1.to_vec()),
    ]
    .into()
}

fn listing(manners: &Manners) -> Value {
    let mut siblings: Vec<Value> = contents()
        .into_iter()
        .map(|(name, content)| match name == LARGE.0 {
            true => json!({"rfilename": name, "size": content.len(), "lfs": {"sha256": LARGE.2, "size": content.len()}}),
            false => json!({"rfilename": name, "size": content.len()}),
        })
        .collect();
    siblings.extend(manners.more.iter().map(|(name, size)| json!({"rfilename": name, "size": size})));
    json!({"sha": COMMIT, "siblings": siblings, "cardData": {"license": "apache-2.0"}})
}

fn serve(mut stream: TcpStream, asked: &Mutex<Vec<Asked>>, manners: &Mutex<Manners>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().expect("a request")?;
    let path = request.split(' ').nth(1).expect("a path").to_owned();
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let range = headers.get("range").cloned();
    let token = headers.get("authorization").cloned();
    asked.lock().expect("no panic").push((path.clone(), range.clone(), token.clone()));

    let mut manners = manners.lock().expect("no panic");
    let mut answer = |status: &str, more: &str, length: usize, body: &[u8]| {
        let head =
            format!("HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n{more}\r\n");
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)
    };
    let refused = manners.status.or_else(|| {
        let expected = manners.token.map(|token| format!("Bearer {token}"));
        (expected.is_some() && expected != token).then_some(if token.is_some() { 403 } else { 401 })
    });
    if let Some(status) = refused {
        return answer(&status.to_string(), "", 2, b"no");
    }
    if path == format!("/api/models/{MODEL}/revision/main?blobs=true") {
        let body = listing(&manners).to_string();
        return answer("200", "", body.len(), body.as_bytes());
    }
    let name = path.rsplit('/').next().expect("a name");
    let Some(mut content) =
        contents().remove(name).filter(|_| path == format!("/{MODEL}/resolve/{COMMIT}/{name}"))
    else {
        return answer("404", "", 2, b"no");
    };
    if let Some(elsewhere) = &manners.redirect {
        return answer("302", &format!("Location: {elsewhere}{path}\r\n"), 0, b"");
    }
    if name == LARGE.0 && manners.damaged {
        content[3] = b'x';
    }
    let start: usize = match &range {
        Some(range) if !manners.no_ranges => {
            range.trim_start_matches("bytes=").trim_end_matches('-').parse().expect("a range")
        }
        _ => 0,
    };
    let rest = &content[start..];
    let (status, more) = match start {
        0 => ("200", String::new()),
        _ => ("206", format!("Content-Range: bytes {start}-{}/{}\r\n", content.len() - 1, content.len())),
    };
    if name == LARGE.0 && manners.cuts > 0 {
        manners.cuts -= 1;
        return answer(status, &more, rest.len(), &rest[..rest.len() / 2]);
    }
    answer(status, &more, rest.len(), rest)
}

/// A machine with nothing on it.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Home(tempfile::tempdir().expect("a folder"))
    }

    fn model(&self) -> PathBuf {
        self.0.path().join("freetoken/models").join(MODEL)
    }

    fn command(&self, server: &Server, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_freetoken"));
        for name in [
            "HF_TOKEN",
            "HF_TOKEN_PATH",
            "HF_HUB_CACHE",
            "HF_HUB_OFFLINE",
            "HTTP_PROXY",
            "http_proxy",
            "ALL_PROXY",
            "all_proxy",
        ] {
            command.env_remove(name);
        }
        command.env("FREETOKEN_HOME", self.0.path().join("freetoken"));
        command.env("HF_HOME", self.0.path().join("huggingface"));
        command.env("HF_ENDPOINT", &server.endpoint);
        command.args(args);
        command
    }

    fn pull(&self, server: &Server) -> Output {
        self.command(server, &["pull", MODEL]).output().expect("the binary starts")
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .map(|entries| {
            entries.map(|entry| entry.expect("listed").file_name().into_string().expect("UTF-8")).collect()
        })
        .unwrap_or_default();
    names.sort();
    names
}

/// That the model is there and nothing else is.
fn came(home: &Home, output: &Output) {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).trim_end(), home.model().to_str().expect("UTF-8"));
    assert_eq!(files(&home.model()), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(fs::read(home.model().join(LARGE.0)).expect("is there"), LARGE.1);
    assert_eq!(files(home.model().parent().expect("a folder")), ["demo"]);
}

/// That one sentence says why, and that there is no model.
fn refused(home: &Home, output: &Output, reasons: &[&str]) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let last = said.trim_end().lines().last().expect("a sentence");
    assert!(
        last.starts_with("error: ") && reasons.iter().all(|reason| last.contains(reason)),
        "{reasons:?} in {said}"
    );
    assert!(output.stdout.is_empty() && !home.model().exists());
}

#[test]
fn a_model_comes_with_what_is_read_of_it_and_only_once() {
    let (home, server) = (Home::new(), Server::start(Manners::default()));
    let output = home.pull(&server);
    came(&home, &output);
    let said = text(&output.stderr);
    assert!(said.starts_with("org/demo (licence apache-2.0): 3 files, 0.0 MiB, into "), "{said}");
    let n_asked = server.asked().len();
    came(&home, &home.pull(&server));
    assert_eq!(server.asked().len(), n_asked);
}

#[test]
fn a_connection_that_is_cut_goes_on_where_it_was() {
    let (home, server) = (Home::new(), Server::start(Manners { cuts: 2, ..Manners::default() }));
    came(&home, &home.pull(&server));
    assert_eq!(server.ranges(), [None, Some("bytes=8-".into()), Some("bytes=12-".into())]);
}

#[test]
fn a_pull_that_was_stopped_goes_on_where_it_was() {
    let (home, server) = (Home::new(), Server::start(Manners::default()));
    let part = home.model().with_file_name(".demo.part");
    fs::create_dir_all(&part).expect("is made");
    let part = part.join(format!("{}.{}.part", LARGE.0, &LARGE.2[..16]));
    fs::write(&part, &LARGE.1[..5]).expect("is written");
    let output = home.pull(&server);
    came(&home, &output);
    assert!(text(&output.stderr).contains("of it to come"), "{}", text(&output.stderr));
    assert_eq!(server.ranges(), [Some("bytes=5-".into())]);

    // A server without parts gives it anew.
    let (home, server) =
        (Home::new(), Server::start(Manners { cuts: 1, no_ranges: true, ..Manners::default() }));
    came(&home, &home.pull(&server));
    assert_eq!(server.ranges(), [None, Some("bytes=8-".into())]);
}

#[test]
fn damaged_files_are_removed_and_said() {
    let (home, server) = (Home::new(), Server::start(Manners { damaged: true, ..Manners::default() }));
    refused(&home, &home.pull(&server), &["model.safetensors came damaged", "SHA-256", LARGE.2]);
    server.manners.lock().expect("no panic").damaged = false;
    came(&home, &home.pull(&server));
    assert_eq!(server.ranges(), [None, None]);
}

#[test]
fn refusals_of_the_hub_say_what_to_do() {
    for (status, reasons) in [
        (401, ["without a token (401)", "HF_TOKEN"]),
        (403, ["(403)", "HF_TOKEN"]),
        (404, ["there is no", "spelling"]),
    ] {
        let (home, server) =
            (Home::new(), Server::start(Manners { status: Some(status), ..Manners::default() }));
        refused(&home, &home.pull(&server), &reasons);
    }
    let gated = Server::start(Manners { token: Some("right"), ..Manners::default() });
    let home = Home::new();
    let with_token =
        |token| home.command(&gated, &["pull", MODEL]).env("HF_TOKEN", token).output().expect("starts");
    refused(&home, &with_token("wrong"), &["refuses the token"]);
    came(&home, &with_token("right"));
    let home = Home::new();
    fs::create_dir_all(home.0.path().join("huggingface")).expect("is made");
    fs::write(home.0.path().join("huggingface/token"), "right\n").expect("is written");
    came(&home, &home.pull(&gated));
}

#[test]
fn the_token_stays_with_the_hub() {
    let elsewhere = Server::start(Manners::default());
    // Another name of this machine is another host.
    let address = elsewhere.endpoint.replace("127.0.0.1", "localhost");
    let hub = Server::start(Manners { token: Some("right"), redirect: Some(address), ..Manners::default() });
    let home = Home::new();
    let output = home.command(&hub, &["pull", MODEL]).env("HF_TOKEN", "right").output().expect("starts");
    came(&home, &output);
    assert!(elsewhere.asked().iter().all(|asked| asked.2.is_none()) && elsewhere.asked().len() == 3);
}

#[test]
fn a_disk_that_is_too_small_is_told_before_anything_comes() {
    let more = vec![("LICENSE".to_owned(), 1 << 60)];
    let (home, server) = (Home::new(), Server::start(Manners { more, ..Manners::default() }));
    refused(
        &home,
        &home.pull(&server),
        &["org/demo needs 1073741824.0 GiB more", "are free", "FREETOKEN_HOME"],
    );
    assert_eq!(server.asked().len(), 1);
}

#[test]
fn files_stay_in_their_folder() {
    for name in ["../evil.safetensors", "a/../../evil.json", "/evil", "..\\evil.json"] {
        let more = vec![(name.to_owned(), 1)];
        let (home, server) = (Home::new(), Server::start(Manners { more, ..Manners::default() }));
        refused(&home, &home.pull(&server), &["org/demo has a file named", "no name of a file"]);
        assert_eq!(server.asked().len(), 1);
    }
    let home = Home::new();
    let server = Server::start(Manners::default());
    for name in ["../evil", "org/..", "org/a b"] {
        let output = home.command(&server, &["pull", name]).output().expect("starts");
        assert_eq!(output.status.code(), Some(2), "{name}");
    }
    assert!(server.asked().is_empty());
}

#[test]
fn one_pull_at_a_time() {
    let (home, server) = (Home::new(), Server::start(Manners::default()));
    fs::create_dir_all(home.model().parent().expect("a folder")).expect("is made");
    let lock = fs::File::create(home.model().with_file_name(".demo.lock")).expect("is made");
    lock.lock().expect("is free");
    refused(&home, &home.pull(&server), &["another freetoken"]);
    drop(lock);
    came(&home, &home.pull(&server));
}

#[test]
fn a_model_is_found_by_its_name_or_brought() {
    let inspect =
        |home: &Home, server: &Server| home.command(server, &["inspect", MODEL]).output().expect("starts");
    let copy = |to: &Path| {
        fs::create_dir_all(to).expect("is made");
        for file in fs::read_dir(DEMO).expect("the demo model is there") {
            let file = file.expect("is listed");
            fs::copy(file.path(), to.join(file.file_name())).expect("is copied");
        }
    };
    let server = Server::start(Manners::default());
    let home = Home::new();
    copy(&home.model());
    assert_eq!(inspect(&home, &server).status.code(), Some(0));
    let home = Home::new();
    let cached = home.0.path().join("huggingface/hub/models--org--demo");
    copy(&cached.join("snapshots").join(COMMIT));
    fs::create_dir_all(cached.join("refs")).expect("is made");
    fs::write(cached.join("refs/main"), COMMIT).expect("is written");
    let output = inspect(&home, &server);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let pulled = home.pull(&server);
    assert_eq!(
        text(&pulled.stdout).trim_end(),
        cached.join("snapshots").join(COMMIT).to_str().expect("UTF-8")
    );
    assert!(server.asked().is_empty());

    let home = Home::new();
    let offline = |args: &[&str], hub_offline: &str| {
        let args = [&["run", "--prompt", "hi", "--model", MODEL], args].concat();
        home.command(&server, &args).env("HF_HUB_OFFLINE", hub_offline).output().expect("the binary starts")
    };
    refused(&home, &offline(&["--offline"], "0"), &["org/demo is not on this machine", "--offline"]);
    refused(&home, &offline(&[], "1"), &["org/demo is not on this machine"]);
    assert!(server.asked().is_empty());
    // It comes, and then its files turn out to be none.
    let output = offline(&[], "0");
    assert!(home.model().exists() && output.status.code() == Some(1), "{}", text(&output.stderr));
}
