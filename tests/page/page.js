// Checks of the whole page in front of a server with a model, any model: it is used as people use it, in a frame.

import { holds, run, same } from "./check.js";

const PATIENCE_MS = 30000;

const frame = document.querySelector("iframe");
const page = () => frame.contentDocument;
const byId = (id) => page().getElementById(id);
const all = (selector) => [...page().querySelectorAll(selector)];
const last = (part) => all(`[data-role=assistant] [data-part=${part}]`).at(-1);
const stateOf = () => all("[data-role=assistant]").at(-1)?.dataset.state;

/** Waits until a condition holds. */
async function until(condition, what) {
  const began = performance.now();
  while (!condition()) {
    if (performance.now() - began > PATIENCE_MS) throw new Error(`waited in vain: ${what}`);
    await new Promise((go) => setTimeout(go, 20));
  }
}

async function open(path) {
  const loaded = new Promise((go) => frame.addEventListener("load", go, { once: true }));
  frame.src = path;
  await loaded;
}

function fill(id, value) {
  const field = byId(id);
  field.value = value;
  field.dispatchEvent(new frame.contentWindow.Event("input", { bubbles: true }));
  field.dispatchEvent(new frame.contentWindow.Event("change", { bubbles: true }));
}

function press(key) {
  byId("prompt").dispatchEvent(new frame.contentWindow.KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
}

const idle = () => until(() => byId("view-chat").dataset.state === "idle", "the end of an answer");

async function say(text) {
  fill("prompt", text);
  press("Enter");
  await idle();
}

const set = (settings) => Object.entries(settings).forEach(([id, value]) => fill(id, value));

async function chat() {
  const hostile = "<img src=x onerror=alert(1)>";
  set({ temperature: "0", "max-tokens": "8" });
  await say(hostile);
  same(stateOf(), "done", "an answer");
  same(all("[data-role=user] [data-part=content]")[0].textContent, hostile, "what was said");
  same(all("#messages img").length, 0, "images");
  holds(/\btokens? · .*first token after .* of .* prompt tokens cached$/.test(last("usage").textContent), `figures: ${last("usage").textContent}`);
  const first = last("content").textContent + last("thoughts").textContent;
  holds(first !== "", "some text");

  all("[data-action=retry]").at(-1).click();
  await idle();
  same(last("content").textContent + last("thoughts").textContent, first, "the same again at temperature 0");
  same(all("[data-role=assistant]").length, 1, "one answer in the place of the other");

  set({ "max-tokens": "1" });
  await say("And now?");
  holds(/\b1 token\b/.test(last("usage").textContent), `one token: ${last("usage").textContent}`);
  same(all("#messages article").length, 4, "messages");

  all("[data-role=user] [data-action=edit]").at(-1).click();
  same(byId("prompt").value, "And now?", "the message to edit");
  await say("And then?");
  same(all("[data-role=user] [data-part=content]").map((node) => node.textContent), [hostile, "And then?"], "the edited chat");
}

async function errors() {
  set({ "top-k": "5000000000" });
  await say("Too much");
  same(stateOf(), "failed", "a refused request");
  holds(/^Top_k .*\. Try again$/.test(last("error").textContent), `a sentence: ${last("error").textContent}`);
  set({ "top-k": "" });
  last("error").querySelector("[data-action=retry]").click();
  await idle();
  same(stateOf(), "done", "the second try");
}

async function kept() {
  const messages = all("#messages article").length;
  await open("/?again");
  same(all("#messages article").length, 0, "messages of a new page");
  same(byId("temperature").value, "0", "settings that are kept");
  byId("open-history").click();
  all("#history button")[0].click();
  same(all("#messages article").length, messages, "messages of the chat that was kept");
  byId("new-chat").click();
  same(all("#messages article").length, 0, "messages of a new chat");
}

async function dashboard() {
  const figure = (name) => page().querySelector(`[data-figure=${name}]`).textContent;
  byId("to-dashboard").click();
  await until(() => !byId("stats").hidden, "stats");
  holds(Number(figure("decoded").replaceAll(",", "")) >= 3, `tokens drawn: ${figure("decoded")}`);
  await until(() => /^[\d.,]+$/.test(figure("decode-rate")), "a rate");
  holds(all(".chart[aria-label]").length > 0, "charts have words");

  const reply = await (await fetch("/v1/stats")).json();
  const { cache } = reply.service;
  same(byId("kv-tokens").valueAsNumber, cache.kv_tokens, "the slider of the key-value cache");
  same(byId("expert-slots").closest(".experts").hidden, cache.experts === null, "experts");
  same(all(".columns > div").length, reply.service.layers.length, "a column for each layer");
  if (cache.experts) await experts(figure);
  fill("kv-tokens", byId("kv-tokens").max);
  await until(() => ["done", "refused"].includes(byId("division-state").dataset.state), "a division");
  const after = await (await fetch("/v1/stats")).json();
  await until(() => byId("kv-tokens").valueAsNumber === after.service.cache.kv_tokens, "the slider shows what is");
}

/** What is drawn of experts behind a cache. */
async function experts(figure) {
  holds(/^\d.* %$/.test(figure("hit-rate")), `hits: ${figure("hit-rate")}`);
  holds(/^from [\d.]+ % hits in layer \d+ to [\d.]+ % hits in layer \d+, /.test(figure("layers")), `layers: ${figure("layers")}`);
  for (const column of all(".columns > div")) {
    holds(/^Layer \d+: .* hits, .* fetched, .* read in place, .* on the CPU$/.test(column.title), column.title);
    const height = [...column.children].reduce((sum, piece) => sum + piece.offsetHeight, 0);
    holds(Math.abs(height - column.offsetHeight) <= column.children.length, `a column is full: ${height} of ${column.offsetHeight}`);
  }
  const wanted = byId("expert-slots").valueAsNumber + 8;
  fill("expert-slots", wanted);
  await until(() => byId("division-state").dataset.state === "done", "more slots");
  await until(() => byId("expert-slots-value").textContent.startsWith(`${wanted} of`), "the slider shows them");
  same((await (await fetch("/v1/stats")).json()).service.cache.experts.n_slots, wanted, "slots");
  byId("division-state").dataset.state = "idle";
}

run(async () => {
  localStorage.clear();
  await open("/");
  await until(() => /^\S/.test(byId("model").textContent) && !byId("model").textContent.startsWith("loading"), "the model's name");
  await chat();
  await errors();
  await kept();
  await dashboard();
});
