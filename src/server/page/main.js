// The page: two views, the model's name, and what it says while the model loads.

import * as chat from "./chat.js";
import * as dashboard from "./dashboard.js";
import { byId } from "./dom.js";
import { bytes, count, share } from "./numbers.js";
import { ServerError, get, health } from "./server.js";
import * as settings from "./settings.js";

const VIEWS = ["chat", "dashboard"];
const WAIT_MS = 1000;

function showView() {
  const wanted = location.hash.slice(1);
  const current = VIEWS.includes(wanted) ? wanted : "chat";
  for (const view of VIEWS) {
    byId(`view-${view}`).hidden = view !== current;
    if (view === current) byId(`to-${view}`).setAttribute("aria-current", "page");
    else byId(`to-${view}`).removeAttribute("aria-current");
  }
  document.title = current === "chat" ? "freetoken" : "freetoken dashboard";
  dashboard.watch(current === "dashboard");
}

/** Says which model answers, as soon as one does. */
async function showModel() {
  const line = byId("model");
  try {
    const { status, progress } = await health();
    if (status === "loading") {
      const { loaded_bytes: loaded, total_bytes: total } = progress;
      line.textContent = `loading, ${share(loaded, total)} of ${bytes(total)}`;
      setTimeout(showModel, WAIT_MS);
      return;
    }
    const [model] = (await get("v1/models")).data;
    line.textContent = model.context_length ? `${model.id}, context of ${count(model.context_length)} tokens` : model.id;
    chat.setModel(model.id);
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    line.textContent = error.message;
    if (error.status !== 401) setTimeout(showModel, WAIT_MS);
  }
}

settings.begin();
chat.begin();
dashboard.begin();
addEventListener("hashchange", showView);
showView();
showModel();
