// The chat: what is said, asking for answers, and the buttons. How a message looks is in message.js, what is kept in history.js.

import { byId, element } from "./dom.js";
import * as history from "./history.js";
import { MessageView } from "./message.js";
import { tokens } from "./numbers.js";
import { ServerError, get, stream } from "./server.js";
import * as settings from "./settings.js";

/** How far from the end, in pixels, the reader may be for the log to follow the answer. */
const NEAR_END = 48;

let chat = history.emptyChat();
/** One for each message, in order. */
let views = [];
/** The answer that streams in, as `{ asking, message, clock }`; `asking` is its `AbortController`. */
let running = null;
let isEditing = false;
let model = null;

/** Wires the view. */
export function begin() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("input", fitPrompt);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.asking.abort();
  });
  byId("stop").addEventListener("click", () => running?.asking.abort());
  byId("new-chat").addEventListener("click", () => open(history.emptyChat()));
  byId("cancel-edit").addEventListener("click", () => setEditing(false));
  byId("messages").addEventListener("click", act);
  byId("open-settings").addEventListener("click", () => byId("settings-dialog").showModal());
  byId("open-history").addEventListener("click", () => {
    listChats();
    byId("history-dialog").showModal();
  });
  byId("forget-all").addEventListener("click", () => {
    history.forgetAll();
    listChats();
  });
  byId("to-end").addEventListener("click", toEnd);
  byId("log").addEventListener("scroll", offerEnd, { passive: true });
  new ResizeObserver(offerEnd).observe(byId("messages"));
  fitPrompt();
}

/** The model that is asked from now on. */
export function setModel(id) {
  model = id;
}

// Talking.

async function send() {
  const prompt = byId("prompt");
  const text = prompt.value.trim();
  if (text === "" || running || !settings.areValid()) return;
  if (isEditing) {
    const last = chat.messages.findLastIndex(({ role }) => role === "user");
    while (chat.messages.length > last) drop();
    setEditing(false);
  }
  add({ role: "user", content: text });
  prompt.value = "";
  fitPrompt();
  await answer();
}

/** Asks for the next message. */
async function answer() {
  const messages = [...settings.systemMessages(), ...chat.messages.flatMap(asked)];
  const message = { role: "assistant", content: "", reasoning: "", calls: [] };
  const view = add(message);
  const asking = new AbortController();
  const clock = { began: performance.now(), first: null, last: null };
  const mine = { asking, message, clock };
  setRunning(mine);
  toEnd();
  view.begin(clock);
  say("The model is answering.");
  try {
    model ??= (await get("v1/models", asking.signal)).data[0].id;
    const body = { model, messages, stream: true, stream_options: { include_usage: true }, ...settings.fields() };
    for await (const chunk of stream("v1/chat/completions", body, asking.signal)) take(chunk, message, clock, view);
  } catch (error) {
    if (asking.signal.aborted) message.finish = "stopped";
    else if (error instanceof ServerError) message.error = error.message;
    else throw error;
  } finally {
    measure(message, clock);
    view.end();
    // The chat may be another one by now: then this answer was kept when it was left.
    if (running === mine) {
      setRunning(null);
      keep();
      say(message.error ?? (message.usage ? `The answer is there, ${tokens(message.usage.tokens)}.` : "The answer was stopped."));
    }
  }
}

/** What the server is told of a message. An answer that never came is no part of the conversation. */
function asked({ role, content, reasoning }) {
  if (role === "user") return [{ role, content }];
  if (content === "") return [];
  return [{ role, content, ...(reasoning && { reasoning_content: reasoning }) }];
}

/** Takes a piece of an answer. */
function take({ choices, usage }, message, clock, view) {
  if (usage) {
    message.usage = {
      tokens: usage.completion_tokens,
      prompt: usage.prompt_tokens,
      cached: usage.prompt_tokens_details?.cached_tokens,
    };
  }
  const choice = choices[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
  if (content || reasoning || calls) {
    clock.last = performance.now();
    clock.first ??= clock.last;
  }
  message.reasoning += reasoning ?? "";
  message.content += content ?? "";
  if ((content || calls) && message.reasoning !== "") message.reasoning_seconds ??= (clock.last - clock.first) / 1000;
  for (const { index, function: part } of calls ?? []) {
    message.calls[index] ??= { name: "", arguments: "" };
    message.calls[index].name += part.name ?? "";
    message.calls[index].arguments += part.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
  view.change();
}

/** Notes what an answer took. Rates begin with the first token: what came before was the prompt. */
function measure(message, { began, first, last }) {
  if (first === null) return;
  message.first_seconds = (first - began) / 1000;
  message.seconds = (last - first) / 1000;
  if (message.reasoning !== "") message.reasoning_seconds ??= message.seconds;
}

// Buttons of messages.

function act(event) {
  const button = event.target.closest("button[data-action]");
  if (!button) return;
  const view = views.find(({ node }) => node.contains(button));
  const actions = {
    retry: () => {
      setEditing(false);
      drop();
      answer();
    },
    edit: () => setEditing(true),
    copy: () => copy(view.message.content, button),
    "copy-code": () => copy(button.closest("figure").querySelector("code").textContent, button),
  };
  actions[button.dataset.action]();
}

async function copy(text, button) {
  const said = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // A page that did not come over TLS or from this machine has no clipboard.
    button.textContent = copyBySelection(text) ? "Copied" : "Not allowed";
  }
  setTimeout(() => (button.textContent = said === "Copied" ? "Copy" : said), 1500);
}

function copyBySelection(text) {
  const field = element("textarea", { class: "unseen" });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}

function setEditing(on) {
  if (on) byId("prompt").value = chat.messages.findLast(({ role }) => role === "user").content;
  else if (isEditing) byId("prompt").value = "";
  isEditing = on;
  byId("editing").hidden = !on;
  byId("prompt").focus();
  fitPrompt();
}

// What is on the page.

function add(message) {
  const view = new MessageView(message, follow);
  chat.messages.push(message);
  views.push(view);
  byId("messages").append(view.node);
  mark();
  return view;
}

function drop() {
  chat.messages.pop();
  views.pop().node.remove();
}

/** Marks the messages that may be edited or asked for again: the last ones. */
function mark() {
  const lastAsked = chat.messages.findLastIndex(({ role }) => role === "user");
  views.forEach((view, index) => view.setLast(!running && (index === lastAsked || index === views.length - 1)));
  byId("greeting").hidden = views.length > 0;
}

function open(next) {
  if (running) {
    const { asking, message, clock } = running;
    running = null;
    asking.abort();
    message.finish = "stopped";
    measure(message, clock);
    keep();
  }
  setEditing(false);
  const { messages } = next;
  chat = { ...next, messages: [] };
  views = [];
  byId("messages").replaceChildren();
  for (const message of messages) add(message).end();
  setRunning(null);
  toEnd();
  byId("prompt").focus();
}

function keep() {
  const hasRoom = history.keep(chat);
  byId("notice").hidden = hasRoom;
  if (!hasRoom) byId("notice").textContent = "This chat is longer than what this browser can keep: it lasts until you close the page.";
}

function listChats() {
  const items = history.chats().map((kept) => {
    const show = element("button", { type: "button", class: "quiet title" }, history.titleOf(kept));
    if (kept.id === chat.id) show.setAttribute("aria-current", "true");
    show.addEventListener("click", () => {
      byId("history-dialog").close();
      if (kept.id !== chat.id) open(kept);
    });
    const forget = element("button", { type: "button", class: "quiet", "aria-label": `Forget: ${history.titleOf(kept)}` }, "Forget");
    forget.addEventListener("click", () => {
      history.forget(kept.id);
      listChats();
    });
    return element("li", {}, show, forget);
  });
  byId("history").replaceChildren(...items);
  byId("forget-all").hidden = items.length === 0;
}

function setRunning(next) {
  running = next;
  byId("send").hidden = next !== null;
  byId("stop").hidden = next === null;
  byId("view-chat").dataset.state = next ? "answering" : "idle";
  mark();
}

/** For those who listen: that an answer begins and ends, not each word of it. */
function say(sentence) {
  byId("announcement").textContent = sentence;
}

/** Makes a change of the log, and stays at its end where the reader is. */
function follow(change) {
  const log = byId("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function toEnd() {
  byId("log").scrollTop = byId("log").scrollHeight;
}

function offerEnd() {
  const log = byId("log");
  byId("to-end").hidden = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
}

/** The field grows with its text; the style sheet says how far. */
function fitPrompt() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  // Without a size while the other view is shown.
  if (prompt.scrollHeight > 0) prompt.style.height = `${prompt.scrollHeight}px`;
}
