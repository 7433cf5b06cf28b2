// The dashboard: what `/v1/stats` says, once a second while somebody looks, and the sliders that divide device memory.
// Rates are differences of sums over this page's clock.

import { Columns, Line, Parts, SPAN } from "./chart.js";
import { byId } from "./dom.js";
import { bytes, count, duration, share, short } from "./numbers.js";
import { ServerError, get, post } from "./server.js";

const EVERY_MS = 1000;
/** Seconds that "now" is long for shares, which jump from second to second. */
const NOW_SECONDS = 5;
/** Arrow keys move a slider step by step: it is let go of when it rests so long. */
const REST_MS = 400;
/** How many times of what it has the key-value cache may be asked to have, where nothing says what there is. */
const MOST_GROWTH = 4;

const SUMS = ["decoded_tokens", "prefilled_tokens", "cached_tokens"];
const EXPERT_SUMS = ["hits", "fetched", "in_place", "on_host", "streamed"];
const ROUTED = ["hits", "fetched", "in_place", "on_host"];
const PLACES = ["hits", "fetched", "read in place", "on the CPU"];

/** What was read in the last two minutes, as `{ at, stats }`, oldest first. */
let samples = [];
let isWatched = false;
let timer = 0;
let isReading = false;
/** Whether the sliders show what somebody wants, and not what is. */
let isHeld = false;
let resting = 0;
let mostKvTokens = 0;
let lines;
let layers;
let parts;

/** Wires the view. */
export function begin() {
  const one = (kind, name) => document.querySelector(`[data-${kind}=${name}]`);
  lines = {
    decode: new Line(one("chart", "decode"), { name: "Decode", unit: "tok/s" }),
    prefill: new Line(one("chart", "prefill"), { name: "Prefill", unit: "tok/s" }),
    hits: new Line(one("chart", "hits"), { name: "Hits", unit: "%", top: 100 }),
  };
  layers = new Columns(one("chart", "layers"), { name: "Experts by layer", tones: ["hit", "fetch", "place", "host"] });
  parts = {
    prefix: new Parts(one("parts", "prefix"), [["hit", "tokens found in the cache"], ["rest", "tokens computed"]]),
    kv: new Parts(one("parts", "kv"), [
      ["hit", "tokens of running requests"],
      ["fetch", "tokens kept for prompts to come"],
      ["rest", "tokens free"],
    ]),
    experts: new Parts(one("parts", "experts"), [
      ["hit", "hits: already in device memory"],
      ["fetch", "fetched over the link into a slot"],
      ["place", "read in place, over the link"],
      ["host", "computed on the CPU"],
    ]),
    memory: new Parts(one("parts", "memory"), [["hit", "expert slots"], ["fetch", "key-value cache"], ["place", "states of running requests"]]),
  };
  for (const slider of sliders()) {
    slider.addEventListener("input", () => {
      isHeld = true;
      clearTimeout(resting);
      showSliders();
    });
    slider.addEventListener("change", () => {
      clearTimeout(resting);
      resting = setTimeout(divide, REST_MS);
    });
  }
  byId("division").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("visibilitychange", read);
}

/** Whether the view is the one that is shown. */
export function watch(on) {
  isWatched = on;
  read();
}

/** Reads now, and again and again while somebody looks. */
async function read() {
  clearTimeout(timer);
  if (!isWatched || document.hidden || isReading) return;
  isReading = true;
  const began = performance.now();
  try {
    const reply = await get("v1/stats");
    // Null while the model loads.
    const stats = reply.service;
    if (stats) take(stats);
    notice(stats ? "" : "The model is loading: there is nothing to count yet.");
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    notice(error.message);
    // Nobody wants to be asked for the key every second; coming back to this view asks again.
    if (error.status === 401) isWatched = false;
  } finally {
    isReading = false;
  }
  timer = setTimeout(read, Math.max(EVERY_MS - (performance.now() - began), 0));
}

function notice(sentence) {
  byId("stats-notice").textContent = sentence;
  byId("stats-notice").hidden = sentence === "";
}

function take(stats) {
  const at = performance.now() / 1000;
  const before = samples.at(-1);
  if (before && isAnother(before.stats, stats)) samples = [];
  samples = samples.filter((sample) => at - sample.at <= SPAN);
  samples.push({ at, stats });
  byId("stats").hidden = false;
  show(stats, at);
}

/** Whether a server that began anew says this: its sums are smaller. */
function isAnother(before, stats) {
  const [old, experts] = [before.cache.experts, stats.cache.experts];
  const isSmaller = (was, is) => (name) => is[name] < was[name];
  return SUMS.some(isSmaller(before, stats)) || !old !== !experts || (experts && EXPERT_SUMS.some(isSmaller(old, experts)));
}

// Figures.

function show(stats, now) {
  const { cache, cached_tokens: cached, prefilled_tokens: prefilled } = stats;
  const decode = rates((sample) => sample.decoded_tokens);
  const prefill = rates((sample) => sample.prefilled_tokens);
  lines.decode.draw(decode, now);
  lines.prefill.draw(prefill, now);
  const used = cache.kv_tokens_running + cache.kv_tokens_kept;
  const free = Math.max(cache.kv_tokens - used, 0);
  const kv = [cache.kv_tokens_running, cache.kv_tokens_kept, free];
  parts.prefix.draw([cached, prefilled], [cached, prefilled].map(count));
  parts.kv.draw(kv, kv.map(count));
  figures({
    "decode-rate": latest(decode),
    "prefill-rate": latest(prefill),
    running: count(stats.n_running),
    waiting: count(stats.n_waiting),
    ended: count(stats.n_ended),
    cancelled: count(stats.n_cancelled),
    decoded: count(stats.decoded_tokens),
    uptime: duration(stats.uptime_seconds),
    "prefix-share": share(cached, cached + prefilled),
    "kv-used": share(used, cache.kv_tokens),
    "kv-tokens": count(cache.kv_tokens),
  });
  for (const card of document.querySelectorAll(".experts")) card.hidden = !cache.experts;
  if (cache.experts) showExperts(stats, now);
  showMemory(cache);
}

function showExperts({ cache: { experts }, layers: ofLayers }, now) {
  const { cache, layers: before } = samples.find((sample) => now - sample.at <= NOW_SECONDS).stats;
  const isDecoding = ROUTED.some((name) => experts[name] > cache.experts[name]);
  const span = isDecoding ? `in the last ${NOW_SECONDS} seconds` : "since the start";
  const routed = (places, earlier) => ROUTED.map((name) => places[name] - (isDecoding ? earlier[name] : 0));
  const shares = sharesOf(routed(experts, cache.experts));
  parts.experts.draw(routed(experts, cache.experts), shares);
  const crossed = rates(({ cache: { experts: e } }) => (e.fetched + e.in_place + e.streamed) * e.record_bytes);
  lines.hits.draw(hitRates(), now);
  figures({
    "hit-rate": shares[0],
    "hit-span": span,
    "link-rate": bytes(crossed.at(-1)?.value ?? 0),
    layers: showLayers(ofLayers.map((places, layer) => routed(places, before[layer])), span),
  });
}

/** Draws what each layer routed, and says it in a line. */
function showLayers(ofLayers, span) {
  const drawn = ofLayers.map((sizes, layer) => {
    const words = sharesOf(sizes).map((share, place) => `${share} ${PLACES[place]}`);
    return { name: `layer ${layer}`, sizes, hits: sizes[0] / sum(sizes), text: `Layer ${layer}: ${words.join(", ")}` };
  });
  const byHits = drawn.filter(({ hits }) => hits >= 0).sort((one, other) => one.hits - other.hits);
  const ends = byHits.length > 0 ? [byHits[0], byHits.at(-1)] : [];
  const told = ends.map(({ name, hits }) => `${share(hits, 1)} hits in ${name}`);
  const line = ends.length > 0 ? `from ${told.join(" to ")}, ${span}` : "nothing was decoded yet";
  layers.draw(drawn, line);
  return line;
}

const sharesOf = (sizes) => sizes.map((size) => share(size, sum(sizes)));
const sum = (numbers) => numbers.reduce((all, number) => all + number, 0);

/** What a sum grew by in a second, between each two samples. */
function rates(sumOf) {
  return samples.slice(1).map(({ at, stats }, index) => {
    const before = samples[index];
    return { at, value: (sumOf(stats) - sumOf(before.stats)) / (at - before.at) };
  });
}

/** Percent of hits between each two samples with decode steps between them. */
function hitRates() {
  return samples.slice(1).flatMap(({ at, stats }, index) => {
    const before = samples[index].stats.cache.experts;
    const routed = ROUTED.map((name) => stats.cache.experts[name] - before[name]);
    return sum(routed) > 0 ? [{ at, value: (100 * routed[0]) / sum(routed) }] : [];
  });
}

const latest = (points) => (points.length > 0 ? short(points.at(-1).value) : "–");

function figures(texts) {
  for (const [name, text] of Object.entries(texts)) {
    document.querySelector(`[data-figure=${name}]`).textContent = text;
  }
}

// Device memory.

const sliders = () => [byId("expert-slots"), byId("kv-tokens")];

function showMemory(cache) {
  const { experts, kv_tokens: kvTokens, kv_token_bytes: tokenBytes, state_bytes: stateBytes } = cache;
  const sizes = [experts ? experts.n_slots * experts.record_bytes : 0, kvTokens * tokenBytes, stateBytes];
  const bar = document.querySelector("[data-parts=memory]");
  // Not every server says how many bytes a token takes.
  bar.hidden = !tokenBytes;
  if (tokenBytes) parts.memory.draw(sizes, sizes.map((size) => size > 0 && bytes(size)));
  if (isHeld) return;
  const most = tokenBytes && experts ? Math.floor((sizes[0] + sizes[1]) / tokenBytes) : MOST_GROWTH * kvTokens;
  mostKvTokens = Math.max(mostKvTokens, most);
  const [slots, tokens] = sliders();
  if (experts) {
    slots.max = experts.n_experts;
    slots.value = experts.n_slots;
  }
  tokens.min = tokens.step;
  tokens.max = mostKvTokens;
  tokens.value = kvTokens;
  showSliders();
}

function showSliders() {
  const { experts, kv_token_bytes: tokenBytes } = samples.at(-1).stats.cache;
  const [slots, tokens] = sliders().map((slider) => slider.valueAsNumber);
  const texts = [
    experts ? `${count(slots)} of ${count(experts.n_experts)} experts, ${bytes(slots * experts.record_bytes)}` : "",
    tokenBytes ? `${count(tokens)} tokens, ${bytes(tokens * tokenBytes)}` : `${count(tokens)} tokens`,
  ];
  sliders().forEach((slider, index) => {
    byId(`${slider.id}-value`).textContent = texts[index];
    slider.setAttribute("aria-valuetext", texts[index]);
  });
}

async function divide() {
  const { experts } = samples.at(-1).stats.cache;
  const [slots, tokens] = sliders().map((slider) => slider.valueAsNumber);
  state("pending", "Dividing memory …");
  try {
    await post("v1/cache/resize", { ...(experts && { expert_slots: slots }), kv_tokens: tokens });
    state("done", "Memory is divided anew.");
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    state("refused", error.message);
  } finally {
    isHeld = false;
    showMemory(samples.at(-1).stats.cache);
    read();
  }
}

function state(word, sentence) {
  byId("division-state").dataset.state = word;
  byId("division-state").textContent = sentence;
}
