// What is asked of the model beside the messages: the form of the settings, kept in the browser. An empty field is left to the server.

import { byId } from "./dom.js";

const KEY = "freetoken.settings";

/** Brings the form back to what it was, and keeps what changes. */
export function begin() {
  const form = byId("settings");
  for (const [name, value] of Object.entries(kept())) {
    const field = form.elements.namedItem(name);
    if (field) field.value = value;
  }
  form.addEventListener("input", () => {
    try {
      localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(new FormData(form))));
    } catch {
      // Without room in the browser they last as long as the page.
    }
  });
  form.addEventListener("reset", () => localStorage.removeItem(KEY));
}

/** The fields of a request, without its messages. */
export function fields() {
  const form = byId("settings");
  const given = {};
  for (const input of form.querySelectorAll("input[type=number]")) {
    if (input.value !== "") given[input.name] = input.valueAsNumber;
  }
  const effort = form.elements.reasoning_effort.value;
  if (effort !== "") given.reasoning_effort = effort;
  return given;
}

/** The system message, where there is one. */
export function systemMessages() {
  const text = byId("settings").elements.system.value;
  return text.trim() === "" ? [] : [{ role: "system", content: text }];
}

/** Says what is wrong with the form; whether nothing is. */
export function areValid() {
  const form = byId("settings");
  if (form.checkValidity()) return true;
  byId("settings-dialog").showModal();
  form.reportValidity();
  return false;
}

function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEY) ?? "{}") ?? {};
  } catch {
    // Not what we wrote: as if there were none.
    return {};
  }
}
