//! Programs: what a backend records once and replays once a step, and the questions it asks the host on the way.

use crate::{Error, ExpertMlp, Op, Result};

/// A MoE layer whose experts may be elsewhere: the only place in a step where the host decides. Ops before it end with
/// the router, ops after it start with the combine.
#[derive(Debug, Clone)]
pub struct RoutePoint {
    /// The work: its experts are a pool with host banks.
    pub mlp: ExpertMlp,
}

/// Part of a program.
#[derive(Debug, Clone)]
pub enum Stage {
    /// Ops in order.
    Ops(Vec<Op>),
    /// A question to the host, then the experts' work.
    Route(RoutePoint),
}

/// What the host sees at a route point.
#[derive(Debug)]
pub struct RouteAsk<'a> {
    /// Row of the pool's table: counts MoE layers.
    pub layer: u32,
    /// Rows of the batch.
    pub n_rows: usize,
    /// Routes of a row.
    pub top_k: usize,
    /// Expert ids, `[n_rows, top_k]`; -1 for padding.
    pub ids: &'a [i32],
    /// Router weights, `[n_rows, top_k]`.
    pub weights: &'a [f32],
    /// What the experts multiply, `[n_rows, hidden]`; may be empty where every route has a slot.
    pub rows: &'a [f32],
    /// What the device measured of its link since the last question, where it measures.
    pub link: Option<LinkSample>,
}

/// Bytes that a device brought over its link, and how long that took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkSample {
    /// Bytes.
    pub bytes: u64,
    /// Seconds.
    pub seconds: f64,
}

/// One write to the slot table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableChange {
    /// Entry, `layer * n_experts + expert`.
    pub entry: u32,
    /// Its slot from now on, or -1.
    pub slot: i32,
}

/// What the host answers. Experts in none of the lists are hits; where every route hits, the reply is empty. The lists keep their
/// capacity from step to step.
#[derive(Default)]
pub struct RouteReply {
    /// Applied in order before anything is computed: former owners leave, arrivals enter.
    pub table: Vec<TableChange>,
    /// (expert, slot): bring the record from the host bank into the slot.
    pub fetch: Vec<(u32, u32)>,
    /// Experts to read from the host bank without a slot.
    pub read_in_place: Vec<u32>,
    /// Experts whose rows the host computes, in [`RouteServer::compute`].
    pub host: Vec<u32>,
}

impl RouteReply {
    /// An empty reply with room for a layer of `n_experts`.
    pub fn with_capacity(n_experts: usize) -> Self {
        RouteReply {
            table: Vec::with_capacity(2 * n_experts),
            fetch: Vec::with_capacity(n_experts),
            read_in_place: Vec::with_capacity(n_experts),
            host: Vec::with_capacity(n_experts),
        }
    }

    /// Forgets the last answer and keeps the room.
    pub fn clear(&mut self) {
        self.table.clear();
        self.fetch.clear();
        self.read_in_place.clear();
        self.host.clear();
    }
}

/// The host's side of a program: decides at each route point, and computes what it takes on itself.
pub trait RouteServer {
    /// Fills the (empty) reply. The device waits.
    fn answer(&mut self, ask: &RouteAsk<'_>, reply: &mut RouteReply) -> Result<()>;

    /// Computes the routes whose expert is in `host`, each into its own row of `parts` `[n_rows, top_k, hidden]`, weighted, and
    /// leaves the other rows alone. Called once the reply is on its way, so that the device works meanwhile.
    fn compute(&mut self, ask: &RouteAsk<'_>, host: &[u32], parts: &mut [f32]) -> Result<()>;
}

/// The server of programs without route points.
pub struct NoRoutePoints;

impl RouteServer for NoRoutePoints {
    fn answer(&mut self, ask: &RouteAsk<'_>, _: &mut RouteReply) -> Result<()> {
        let why = "the program asks for experts, and all of them should have a place".into();
        Err(Error::StepFailed { layer: ask.layer, why })
    }

    fn compute(&mut self, ask: &RouteAsk<'_>, _: &[u32], _: &mut [f32]) -> Result<()> {
        Err(Error::StepFailed { layer: ask.layer, why: "nothing was given to the host".into() })
    }
}

/// A recorded list of stages with everything it needs already made: a replay allocates nothing and compiles nothing.
pub trait Program: Send {
    /// Runs the whole program in order behind all earlier work, asks `server` at each route point, and returns when the
    /// outputs can be read. After an error nothing it wrote may be used.
    fn replay(&mut self, server: &mut dyn RouteServer) -> Result<()>;

    /// Queues the whole program in [`crate::Lane::Compute`] and returns; its outputs are not brought to the host. Asserts that
    /// it holds no route point.
    fn submit(&mut self) -> Result<()>;

    /// The `i`-th output named when the program was recorded, as the last replay left it: f32 or i32 as 32-bit words.
    fn output(&self, i: usize) -> &[u32];
}
