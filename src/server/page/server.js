// The calls to the server: with a key where it wants one, errors as sentences, streams as objects.

import { byId } from "./dom.js";

const KEY = "freetoken.key";

/** What the server refused, in its words. */
export class ServerError extends Error {
  constructor(words, status) {
    super(asSentence(words));
    this.status = status;
  }
}

const asSentence = (words) => words.charAt(0).toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");

/** The JSON of a path. */
export async function get(path, signal) {
  return (await call(path, { signal })).json();
}

/** Whether and how far the model is loaded: an answer that comes with status 503 too. */
export async function health() {
  return (await reach("health", {})).json();
}

/** The JSON that a path answers to JSON. */
export async function post(path, body, signal) {
  return (await send(path, body, signal)).json();
}

/** The objects of a streamed answer. */
export async function* stream(path, body, signal) {
  const response = await send(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await read(reader, signal);
    if (done) throw new ServerError("The connection ended before the answer did.");
    text += value;
    const lines = text.split(/\r?\n/);
    text = lines.pop();
    for (const line of lines) {
      const event = line.startsWith("data:") ? line.slice("data:".length).trim() : "";
      if (event === "[DONE]") return;
      if (event === "") continue;
      const object = JSON.parse(event);
      if (object.error) throw new ServerError(object.error.message);
      yield object;
    }
  }
}

async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ServerError("The connection to the server broke.");
  }
}

const send = (path, body, signal) =>
  call(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });

async function call(path, options) {
  const key = sessionStorage.getItem(KEY);
  const response = await reach(path, {
    ...options,
    headers: { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) },
  });
  if (response.ok) return response;
  const error = new ServerError(await words(response), response.status);
  // Somebody may have given a key while this call was under way.
  if (response.status === 401 && (sessionStorage.getItem(KEY) !== key || (await askForKey(error.message)))) {
    return call(path, options);
  }
  throw error;
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ServerError("The server cannot be reached: is it running?");
  }
}

async function words(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

let asking = null;

/** Asks for the key, once for all calls that want one. Whether there is one now. */
function askForKey(reason) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key-reason").textContent = reason;
    byId("key").value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const key = byId("key").value.trim();
      const isGiven = dialog.returnValue === "use" && key !== "";
      if (isGiven) sessionStorage.setItem(KEY, key);
      resolve(isGiven);
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}
