// How one message looks, whole or while it streams in. It changes no message and asks nobody.

import { align, element } from "./dom.js";
import * as markdown from "./markdown.js";
import { count, duration, short, tokens } from "./numbers.js";

/** A message on the page. `node` is its element; its `data-state` is `waiting`, `thinking`, `answering`, `done`, `stopped` or `failed`. */
export class MessageView {
  #parts = {};
  #clock = null;
  #frame = 0;
  #ticks = 0;
  #follow;

  /** `follow` is called with each change of the page, to make it. */
  constructor(message, follow) {
    this.message = message;
    this.#follow = follow;
    const isUser = message.role === "user";
    const part = (name, made) => {
      made.dataset.part = name;
      this.#parts[name] = made;
      return made;
    };
    const heading = element("h3", { class: "unseen" }, isUser ? "You" : "Answer");
    const content = part("content", element("div", { class: isUser ? "said" : "text" }));
    const actions = part("actions", element("span", { class: "actions" }));
    if (isUser) {
      content.textContent = message.content;
      actions.append(button("edit", "Edit"));
      this.node = element("article", { class: "message user", "data-role": "user", "data-state": "done" }, heading, content, actions);
      return;
    }
    actions.append(button("copy", "Copy"), button("retry", "Answer again"));
    const thinking = part("thinking", element("details", { class: "thinking" }, part("thought", element("summary"))));
    thinking.append(part("thoughts", element("div", { class: "text" })));
    const calls = part("calls", element("div", { class: "text" }));
    const error = part("error", element("p", { class: "error", role: "alert" }));
    const foot = element("footer", {}, part("usage", element("span", { class: "usage" })), actions);
    this.node = element("article", { class: "message", "data-role": "assistant" }, heading, thinking, content, calls, error, foot);
    thinking.hidden = true;
    error.hidden = true;
  }

  /** The answer is asked for; `clock` has when, and when its first token came. */
  begin(clock) {
    this.#clock = clock;
    this.#ticks = setInterval(() => this.change(), 1000);
    this.#show();
  }

  /** The message changed; the page will, with the next frame. */
  change() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#show();
    });
  }

  /** The message is whole. */
  end() {
    clearInterval(this.#ticks);
    cancelAnimationFrame(this.#frame);
    this.#clock = null;
    if (this.message.role === "assistant") this.#show();
  }

  /** Whether it may be edited, or asked for again. */
  setLast(isLast) {
    for (const made of this.node.querySelectorAll("[data-action=edit], [data-action=retry]")) made.hidden = !isLast;
  }

  #state() {
    const { content, reasoning, calls, error, finish } = this.message;
    if (!this.#clock) return error ? "failed" : finish === "stopped" ? "stopped" : "done";
    if (content !== "" || calls.length > 0) return "answering";
    return reasoning !== "" ? "thinking" : "waiting";
  }

  #show() {
    this.#follow(() => {
      const { content, calls, error } = this.message;
      const state = this.#state();
      this.node.dataset.state = state;
      this.node.setAttribute("aria-busy", String(this.#clock !== null));
      this.#showThinking(state);
      markdown.show(this.#parts.content, content, this.#clock !== null);
      align(this.#parts.calls, calls.map(({ name, arguments: json }) => markdown.codeBlock(`call of ${name}`, json)));
      this.#parts.error.hidden = !error;
      if (error && this.#parts.error.textContent === "") this.#parts.error.append(`${error} `, button("retry", "Try again"));
      this.#parts.usage.textContent = this.#clock ? waiting(state, this.#clock) : usage(this.message);
      this.#parts.actions.hidden = this.#clock !== null;
      this.#parts.actions.querySelector("[data-action=copy]").hidden = content === "";
    });
  }

  /** Thinking is open while it goes on, and folded once; later it is as the reader leaves it. */
  #showThinking(state) {
    const { thinking, thought, thoughts } = this.#parts;
    const { reasoning, reasoning_seconds: seconds } = this.message;
    const was = thinking.dataset.state;
    thinking.hidden = reasoning === "";
    thinking.dataset.state = state === "thinking" ? "open" : "whole";
    if (was !== thinking.dataset.state) thinking.open = state === "thinking";
    const soFar = () => Math.floor((performance.now() - this.#clock.first) / 1000);
    thought.textContent = state === "thinking" ? `Thinking, ${soFar()} s` : `Thought for ${duration(seconds ?? 0)}`;
    markdown.show(thoughts, reasoning, state === "thinking");
  }
}

function button(action, text) {
  return element("button", { type: "button", class: "quiet", "data-action": action }, text);
}

function waiting(state, clock) {
  if (state !== "waiting") return "";
  const seconds = Math.floor((performance.now() - clock.began) / 1000);
  return seconds < 1 ? "Reading the prompt" : `Reading the prompt, ${seconds} s`;
}

/** The quiet line under an answer. */
function usage({ usage, seconds, first_seconds: first, finish }) {
  const parts = [];
  if (finish === "stopped") parts.push("stopped");
  if (finish === "length") parts.push("cut off: no more tokens were allowed");
  if (usage) {
    parts.push(tokens(usage.tokens));
    if (usage.tokens > 1 && seconds > 0) parts.push(`${short((usage.tokens - 1) / seconds)} tok/s`);
  }
  if (first !== undefined) parts.push(`first token after ${duration(first)}`);
  if (usage?.cached !== undefined) parts.push(`${count(usage.cached)} of ${count(usage.prompt)} prompt tokens cached`);
  return parts.join(" · ");
}
