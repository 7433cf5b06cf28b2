// Elements in a line each. Text becomes text nodes, attributes are set by name: nothing here parses HTML.

/** An element with attributes and children; a child is a node or a text. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** The element of the page with this id. */
export const byId = (id) => document.getElementById(id);

/** Brings the children of `parent` in line with `fresh`: what is equal stays, with its selection, scroll position and focus. */
export function align(parent, fresh) {
  fresh.forEach((next, index) => {
    const now = parent.childNodes[index];
    if (!now) parent.append(next);
    else if (!now.isEqualNode(next)) become(now, next);
  });
  while (parent.childNodes.length > fresh.length) parent.lastChild.remove();
}

/** Brings one node in line with another, and puts that in its place where it cannot. */
export function become(now, next) {
  const isText = now.nodeType === Node.TEXT_NODE && next.nodeType === Node.TEXT_NODE;
  if (isText && next.data.startsWith(now.data)) now.appendData(next.data.slice(now.data.length));
  else if (isText) now.data = next.data;
  else if (now.cloneNode(false).isEqualNode(next.cloneNode(false))) align(now, [...next.childNodes]);
  else now.replaceWith(next);
}
