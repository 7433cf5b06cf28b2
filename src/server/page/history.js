// Chats that this browser keeps: the newest ones, as many as have room. It knows what a chat is made of, and not how it looks.

const KEY = "freetoken.chats";
const MOST_CHATS = 100;
/** Characters of all chats together; browsers give a page about five million. */
const MOST_CHARACTERS = 2_000_000;
const MOST_TITLE = 80;

/** A chat that nobody has said anything in. */
export function emptyChat() {
  return { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`, changed: 0, messages: [] };
}

/** All chats, the newest first. */
export function chats() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found.filter((chat) => Array.isArray(chat?.messages)) : [];
  } catch {
    // Not what we wrote: the next chat takes its place.
    return [];
  }
}

/** Keeps a chat, and lets go of the oldest ones where there is no room. Whether this one has room. */
export function keep(chat) {
  const others = chats().filter((other) => other.id !== chat.id);
  const texts = [];
  let characters = 0;
  for (const one of [{ ...chat, changed: Date.now() }, ...others].slice(0, MOST_CHATS)) {
    const text = JSON.stringify(one);
    characters += text.length;
    if (characters > MOST_CHARACTERS) break;
    texts.push(text);
  }
  for (; texts.length > 0; texts.pop()) {
    if (stored(`[${texts.join(",")}]`)) return true;
  }
  return false;
}

/** Forgets a chat. */
export function forget(id) {
  stored(JSON.stringify(chats().filter((chat) => chat.id !== id)));
}

/** Forgets all chats. */
export const forgetAll = () => localStorage.removeItem(KEY);

/** The beginning of a chat. */
export function titleOf(chat) {
  const text = chat.messages[0]?.content.trim().replace(/\s+/g, " ") ?? "";
  return text.length > MOST_TITLE ? `${text.slice(0, MOST_TITLE - 1)}…` : text || "Empty chat";
}

function stored(text) {
  try {
    localStorage.setItem(KEY, text);
    return true;
  } catch {
    // The browser has less room than we hoped for, or gives none.
    return false;
  }
}
