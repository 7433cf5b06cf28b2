//! `GET /metrics`: figures in Prometheus' text format.

use std::{
    fmt::{Display, Write as _},
    sync::Arc,
};

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};

use super::{
    Server,
    journal::{BOUNDS, Histogram},
};

/// All figures.
pub(super) async fn metrics(State(server): State<Arc<Server>>) -> Response {
    let totals = server.journal.totals();
    let mut page = Page(String::new());
    page.head("requests_ended_total", "counter", "Requests that ended, by route and status.");
    for ((path, status), count) in &totals.ended {
        page.sample("requests_ended_total", &format!("{{path=\"{path}\",status=\"{status}\"}}"), count);
    }
    page.one("requests_active", "gauge", "Requests that are answered now.", totals.n_active);
    page.histogram("request_seconds", "From request to end.", &totals.whole);
    page.histogram("time_to_first_token_seconds", "From request to first token.", &totals.to_first_token);
    page.one("loaded", "gauge", "1 where the model is loaded.", u8::from(server.running().is_some()));
    if let Some(stats) = server.running().map(|service| service.stats()) {
        let counters = [
            ("engine_requests_ended_total", "Requests that the engine ended.", stats.n_ended),
            ("engine_requests_cancelled_total", "Of those, whose client left.", stats.n_cancelled),
            ("prefilled_tokens_total", "Prompt tokens that were computed.", stats.prefilled_tokens),
            ("cached_tokens_total", "Prompt tokens that were found in the cache.", stats.cached_tokens),
            ("decoded_tokens_total", "Tokens drawn.", stats.decoded_tokens),
        ];
        for (name, help, value) in counters {
            page.one(name, "counter", help, value);
        }
        let gauges = [
            ("engine_requests_running", "Requests whose tokens are computed now.", stats.n_running),
            ("engine_requests_waiting", "Requests that wait.", stats.n_waiting),
            ("kv_tokens", "Tokens that the key-value cache has room for.", stats.cache.kv_tokens),
            ("kv_tokens_running", "Of those, held by running requests.", stats.cache.kv_tokens_running),
            ("kv_tokens_kept", "Of those, kept for prompts to come.", stats.cache.kv_tokens_kept),
        ];
        for (name, help, value) in gauges {
            page.one(name, "gauge", help, value);
        }
        if let Some(states) = stats.cache.states {
            page.one("state_slots", "gauge", "Places of kept states on the device.", states.n_slots);
            page.head("states_kept", "gauge", "States kept for prompts to come, by where they are.");
            page.sample("states_kept", "{place=\"slot\"}", states.n_in_slots);
            page.sample("states_kept", "{place=\"host\"}", states.n_in_host);
            page.head("state_hits_total", "counter", "Requests that went on from a state, by where it was.");
            page.sample("state_hits_total", "{place=\"slot\"}", states.slot_hits);
            page.sample("state_hits_total", "{place=\"host\"}", states.host_hits);
            page.one("states_spilled_total", "counter", "States that went to host memory.", states.spilled);
            page.one("states_dropped_total", "counter", "States that left for others.", states.dropped);
        }
        if let Some(experts) = stats.cache.experts {
            page.one("expert_slots", "gauge", "Places of experts on the device.", experts.n_slots);
            page.head("experts_total", "counter", "Routed experts of decode steps, by layer and place.");
            for (layer, routed) in stats.layers.iter().enumerate() {
                let places = [
                    ("hit", routed.hits),
                    ("fetched", routed.fetched),
                    ("in_place", routed.in_place),
                    ("host", routed.on_host),
                ];
                for (place, value) in places {
                    let labels = format!("{{layer=\"{layer}\",place=\"{place}\"}}");
                    page.sample("experts_total", &labels, value);
                }
            }
        }
        page.one("uptime_seconds", "gauge", "Since the model was loaded.", stats.uptime_seconds);
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], page.0).into_response()
}

struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        self.write(format_args!("# HELP freetoken_{name} {help}\n# TYPE freetoken_{name} {kind}\n"));
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        self.write(format_args!("freetoken_{name}{labels} {value}\n"));
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.head(name, kind, help);
        self.sample(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        for (bound, count) in BOUNDS.iter().zip(histogram.at_most) {
            self.sample(&format!("{name}_bucket"), &format!("{{le=\"{bound}\"}}"), count);
        }
        self.sample(&format!("{name}_bucket"), "{le=\"+Inf\"}", histogram.count);
        self.sample(&format!("{name}_sum"), "", histogram.seconds);
        self.sample(&format!("{name}_count"), "", histogram.count);
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        self.0.write_fmt(text).expect("a string takes all");
    }
}
