// Markdown as nodes, also of a text that still streams in. What a model writes is hostile: it becomes text nodes, elements come from
// the list of tags in this file, and links have a scheme of `SAFE_SCHEMES`. It knows no HTML, and loads nothing.
//
// `open` says that the text goes on: what its end leaves undecided is shown as what it most likely becomes.

import { become, element } from "./dom.js";

const SAFE_SCHEMES = ["http:", "https:", "mailto:"];
/** Lists, quotes and emphasis inside of each other; deeper ones are text. */
const MOST_DEPTH = 12;

const FENCE = /^[ \t]*(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:([ \t]+)|$)/;
/** A last line that may yet become the beginning of a block. */
const UNDECIDED = /^[ \t]*(?:\d{1,9}[.)]?|[-*+_]{1,2}|#{1,6}|`{1,2}|~{1,2}|\||>)[ \t]*$/;

/** What each element shows now: the sources of its blocks. */
const shown = new WeakMap();

/** Shows a text in `parent`. Blocks that did not change since the last call are not touched. */
export function show(parent, text, open = false) {
  const blocks = split(linesOf(text, open), open, 0);
  const before = shown.get(parent) ?? [];
  blocks.forEach((block, index) => {
    const now = parent.childNodes[index];
    if (now && before[index] === block.source) return;
    const node = block.build();
    if (now) become(now, node);
    else parent.append(node);
  });
  while (parent.childNodes.length > blocks.length) parent.lastChild.remove();
  shown.set(parent, blocks.map((block) => block.source));
}

/** A text as nodes. */
export function nodes(text, open = false) {
  return split(linesOf(text, open), open, 0).map((block) => block.build());
}

function linesOf(text, open) {
  const lines = text.split(/\r\n?|\n/);
  if (open && UNDECIDED.test(lines.at(-1))) lines.pop();
  return lines;
}

// Blocks. A reader looks at the lines from `at` on and says where its block ends and how it is built, or nothing.

const READERS = [fence, heading, rule, quote, list, table, paragraph];

function split(lines, open, depth) {
  const readers = depth < MOST_DEPTH ? READERS : [fence, paragraph];
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const scene = { lines, at, open, depth };
    const block = readers.reduce((found, reader) => found ?? reader(scene), null);
    const isLast = open && block.end >= lines.length;
    blocks.push({ source: `${isLast ? "+" : "="}${lines.slice(at, block.end).join("\n")}`, build: block.build });
    at = block.end;
  }
  return blocks;
}

function fence({ lines, at, open }) {
  const head = FENCE.exec(lines[at]);
  if (!head) return null;
  const [, mark, words] = head;
  const closes = (line) => {
    const text = line.trim();
    return text.length >= mark.length && text === mark[0].repeat(text.length);
  };
  const last = endOf(lines, at + 1, (line) => !closes(line));
  const columns = indent(lines[at]);
  const code = lines.slice(at + 1, last).map((line) => dedent(line, columns)).join("\n");
  const language = words.trim().split(/[\s{]/)[0].slice(0, 40);
  const label = language || (ends(lines, at + 1, open) ? "" : "text");
  return { end: Math.min(last + 1, lines.length), build: () => codeBlock(label, code) };
}

/** Code with a label and a button (`data-action="copy-code"`) that somebody has to wire. */
export function codeBlock(label, code) {
  const copy = element("button", { type: "button", class: "quiet", "data-action": "copy-code" }, "Copy");
  // Chromium gives a scroller the focus by itself, others need to be told.
  const pre = element("pre", { tabindex: "0" }, element("code", {}, code));
  return element("figure", { class: "code" }, element("figcaption", {}, element("span", {}, label), copy), pre);
}

function heading({ lines, at, open }) {
  const head = HEADING.exec(lines[at]);
  if (!head) return null;
  let text = lines[at].slice(head[0].length).trim();
  const bare = withoutTail(text, "#");
  if (bare === "" || bare.endsWith(" ")) text = bare.trim();
  // The page has headings of its own above these.
  const level = Math.min(head[1].length + 3, 6);
  return { end: at + 1, build: () => element(`h${level}`, {}, ...inline(text, ends(lines, at + 1, open))) };
}

function rule({ lines, at }) {
  return RULE.test(lines[at]) ? { end: at + 1, build: () => element("hr") } : null;
}

function quote({ lines, at, open, depth }) {
  const end = endOf(lines, at, (line) => QUOTE.test(line));
  if (end === at) return null;
  const inner = () => split(lines.slice(at, end).map((line) => line.replace(QUOTE, "")), ends(lines, end, open), depth + 1);
  return { end, build: () => element("blockquote", {}, ...inner().map((block) => block.build())) };
}

function list({ lines, at, open, depth }) {
  const first = markerOf(lines[at]);
  if (!first) return null;
  const items = [];
  let end = at;
  let content = 0;
  let nested = 0;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const marker = markerOf(line);
    if (isBlank(line)) {
      items.at(-1).push("");
    } else if (items.length > 0 && indent(line) >= nested) {
      items.at(-1).push(dedent(line, content));
    } else if (marker && marker.isOrdered === first.isOrdered && !RULE.test(line)) {
      ({ content, nested } = marker);
      items.push([marker.text]);
    } else if (isBlank(lines[end - 1]) || startsBlock(line)) {
      break;
    } else {
      items.at(-1).push(line.trimStart());
    }
  }
  const build = () => {
    const made = first.isOrdered ? element("ol") : element("ul");
    if (first.isOrdered && first.number !== 1) made.setAttribute("start", first.number);
    items.forEach((item, index) => {
      const goesOn = index === items.length - 1 && ends(lines, end, open);
      made.append(element("li", {}, ...itemNodes(split(item, goesOn, depth + 1))));
    });
    return made;
  };
  return { end, build };
}

/** The first paragraph of an item stands bare, so that an item looks the same before and after the next one arrives. */
function itemNodes(blocks) {
  const built = blocks.map((block) => block.build());
  return built.flatMap((node, index) => (index === 0 && node.nodeName === "P" ? [...node.childNodes] : [node]));
}

/** An item's marker: where its content begins, and from which column on a line belongs to it. */
function markerOf(line) {
  const found = MARKER.exec(line);
  if (!found) return null;
  const [all, space, mark, gap = " "] = found;
  const columns = indent(space);
  const content = columns + mark.length + (gap.length > 4 ? 1 : gap.length);
  const isOrdered = mark.length > 1 || /\d/.test(mark);
  return { isOrdered, number: parseInt(mark, 10), content, nested: columns + 2, text: line.slice(all.length) };
}

function table({ lines, at, open }) {
  if (!lines[at].includes("|")) return null;
  const head = cells(lines[at]);
  const next = lines[at + 1] ?? "";
  const isComing = ends(lines, at + 2, open) && lines[at].trimStart().startsWith("|") && /^[\s|:-]*$/.test(next);
  if (!isComing && !isSeparator(next, head.length)) return null;
  const end = endOf(lines, Math.min(at + 2, lines.length), (line) => line.includes("|"));
  const sides = cells(next).map((cell) => {
    const right = cell.endsWith(":");
    return right && cell.startsWith(":") ? "center" : right ? "right" : "left";
  });
  const build = () => {
    const row = (tag, texts, isOpen) =>
      element("tr", {}, ...head.map((_, column) => {
        const isLast = isOpen && column === texts.length - 1;
        return element(tag, { class: sides[column] ?? "left" }, ...inline(texts[column] ?? "", isLast));
      }));
    const goesOn = ends(lines, end, open);
    const rows = lines.slice(at + 2, end).map((line, index) => row("td", cells(line), goesOn && at + 2 + index === end - 1));
    const made = element("table", {}, element("thead", {}, row("th", head, goesOn)), element("tbody", {}, ...rows));
    return element("div", { class: "wide", tabindex: "0" }, made);
  };
  return { end, build };
}

function isSeparator(line, columns) {
  const found = line.includes("-") ? cells(line) : [];
  return found.length === columns && found.every((cell) => /^:?-+:?$/.test(cell));
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "");
  const found = text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  if (found.length > 1 && found.at(-1) === "") found.pop();
  return found;
}

function paragraph({ lines, at, open }) {
  const end = endOf(lines, at + 1, (line, index) => {
    const isTable = line.includes("|") && isSeparator(lines[index + 1] ?? "", cells(line).length);
    return !isBlank(line) && !startsBlock(line) && !isTable;
  });
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return { end, build: () => element("p", {}, ...inline(text, ends(lines, end, open))) };
}

/** Whether a line ends a paragraph. A number does only where it is the first: "1986. A good year" is none. */
function startsBlock(line) {
  const marker = markerOf(line);
  const isItem = marker && marker.text !== "" && (!marker.isOrdered || marker.number === 1);
  return isItem || [FENCE, HEADING, RULE, QUOTE].some((form) => form.test(line));
}

function endOf(lines, from, goesOn) {
  let end = from;
  while (end < lines.length && goesOn(lines[end], end)) end += 1;
  return end;
}

/** Whether the text that ends in front of line `end` still goes on. */
const ends = (lines, end, open) => open && end >= lines.length;

/** The text without the run of a letter at its end. */
function withoutTail(text, letter) {
  let end = text.length;
  while (text[end - 1] === letter) end -= 1;
  return text.slice(0, end);
}

const isBlank = (line) => line.trim() === "";

function indent(line) {
  let columns = 0;
  for (const letter of line) {
    if (letter === "\t") columns += 4 - (columns % 4);
    else if (letter === " ") columns += 1;
    else break;
  }
  return columns;
}

/** The line without `columns` of white space, as far as it has so much. */
function dedent(line, columns) {
  const space = /^[ \t]*/.exec(line)[0];
  return " ".repeat(Math.max(indent(space) - columns, 0)) + line.slice(space.length);
}

// Text inside of a block.

const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;
const AUTOLINK = /<([a-z][a-z0-9+.-]{1,31}:[^\s<>]*)>/iy;
const TARGET = /\(\s{0,8}(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const PART_OF_TARGET = /\([^\s)]*$/y;
const BARE_LINK = /https?:\/\/[^\s<>"`|\\^{}]*/y;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

/** The nodes of a text. */
function inline(text, open, links = true) {
  // The innermost emphasis is the last frame. Likely is what does not begin inside of a word, as in 2*3.
  const frames = [{ mark: "", nodes: [] }];
  const closings = brackets(text);
  const put = (node) => frames.at(-1).nodes.push(node);
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const special = SPECIAL.exec(text);
    put(text.slice(at, special?.index ?? text.length));
    if (!special) break;
    at = special.index;
    const letter = text[at];
    const found =
      (letter === "\\" && escaped(text, at)) ||
      (letter === "`" && codeSpan(text, at, open)) ||
      (letter === "<" && autolink(text, at, links)) ||
      ((letter === "[" || letter === "!") && links && link(text, at, open, closings)) ||
      (letter === "h" && links && bareLink(text, at)) ||
      (letter === "\n" && { end: at + 1, node: element("br") });
    if (found) {
      put(found.node);
      at = found.end;
    } else if (letter === "*" || letter === "_" || letter === "~") {
      at = delimiters(text, at, open, frames);
    } else {
      put(special[0]);
      at += special[0].length;
    }
  }
  while (frames.length > 1) close(frames, open && frames.at(-1).isLikely);
  return joined(frames[0].nodes);
}

/** Ends the innermost emphasis, or takes its mark for what it literally is. */
function close(frames, isEmphasis) {
  const { mark, nodes } = frames.pop();
  const outer = frames.at(-1).nodes;
  if (!isEmphasis) outer.push(mark, ...nodes);
  else if (nodes.some((node) => node !== "")) outer.push(element(TAGS[mark], {}, ...joined(nodes)));
}

function delimiters(text, at, open, frames) {
  const letter = text[at];
  let left = 1;
  while (text[at + left] === letter) left += 1;
  const end = at + left;
  const before = at === 0 ? " " : text[at - 1];
  const after = text[end] ?? " ";
  const [spaceBefore, spaceAfter] = [before, after].map((side) => /\s/.test(side));
  const [markBefore, markAfter] = [before, after].map((side) => PUNCTUATION.test(side));
  const mayOpen = !spaceAfter && (!markAfter || spaceBefore || markBefore) && (letter !== "_" || spaceBefore || markBefore);
  const mayClose = !spaceBefore && (!markBefore || spaceAfter || markAfter) && (letter !== "_" || spaceAfter || markAfter);
  while (mayClose && left > 0) {
    const index = frames.findLastIndex(({ mark }) => mark[0] === letter && mark.length <= left);
    if (index < 1) break;
    left -= frames[index].mark.length;
    while (frames.length > index + 1) close(frames, false);
    close(frames, true);
  }
  const marks = { 1: [letter], 2: [letter.repeat(2)], 3: [letter.repeat(2), letter] }[left] ?? [];
  const isUndecided = open && end === text.length;
  if (mayOpen && marks.length > 0 && marks.every((mark) => TAGS[mark]) && frames.length < MOST_DEPTH) {
    frames.push(...marks.map((mark) => ({ mark, isLikely: spaceBefore || markBefore, nodes: [] })));
  } else if (!isUndecided) {
    frames.at(-1).nodes.push(letter.repeat(left));
  }
  return end;
}

/** Neighbouring texts as one. */
function joined(nodes) {
  const all = [];
  for (const node of nodes) {
    if (typeof node === "string" && typeof all.at(-1) === "string") all.push(all.pop() + node);
    else all.push(node);
  }
  return all.filter((node) => node !== "").map((node) => (typeof node === "string" ? document.createTextNode(node) : node));
}

function escaped(text, at) {
  const next = text[at + 1];
  return next && /[!-/:-@[-`{-~]/.test(next) ? { end: at + 2, node: next } : null;
}

function codeSpan(text, at, open) {
  const runs = /`+/g;
  runs.lastIndex = at;
  const mark = runs.exec(text)[0];
  const from = at + mark.length;
  let run = null;
  while ((run = runs.exec(text)) && run[0].length !== mark.length);
  if (run) return { end: runs.lastIndex, node: code(text.slice(from, run.index)) };
  if (open) return { end: text.length, node: from < text.length ? code(withoutTail(text.slice(from), "`")) : "" };
  return { end: from, node: mark };
}

function code(text) {
  const line = text.replaceAll("\n", " ");
  const isPadded = line.startsWith(" ") && line.endsWith(" ") && line.trim() !== "";
  return element("code", {}, isPadded ? line.slice(1, -1) : line);
}

/** For each `[` its `]`. */
function brackets(text) {
  const [opened, closings] = [[], new Map()];
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "[") opened.push(at);
    else if (text[at] === "]" && opened.length > 0) closings.set(opened.pop(), at);
  }
  return closings;
}

/** `[text](target)`. Of an image the text is shown as a link: nothing is loaded from anywhere. */
function link(text, at, open, closings) {
  const from = text[at] === "!" ? at + 1 : at;
  const until = closings.get(from);
  if (until === undefined) return null;
  const label = text.slice(from + 1, until);
  TARGET.lastIndex = until + 1;
  const target = TARGET.exec(text);
  if (target) {
    const href = target[1] ?? target[2].replace(/\\([!-/:-@[-`{-~])/g, "$1");
    const node = anchor(href, label.trim() === "" ? [href] : inline(label, false, false));
    return node && { end: TARGET.lastIndex, node };
  }
  PART_OF_TARGET.lastIndex = until + 1;
  return open && PART_OF_TARGET.test(text) ? { end: text.length, node: label } : null;
}

function autolink(text, at, links) {
  AUTOLINK.lastIndex = at;
  const found = links && AUTOLINK.exec(text);
  const node = found && anchor(found[1], [found[1]]);
  return node && { end: AUTOLINK.lastIndex, node };
}

function bareLink(text, at) {
  BARE_LINK.lastIndex = at;
  const [all] = BARE_LINK.exec(text);
  let unopened = all.split(")").length - all.split("(").length;
  let end = all.length;
  while (/[.,;:!?'*_~\]]/.test(all[end - 1]) || (all[end - 1] === ")" && unopened > 0)) {
    if (all[end - 1] === ")") unopened -= 1;
    end -= 1;
  }
  const href = all.slice(0, end);
  const node = anchor(href, [href]);
  return node && { end: at + end, node };
}

/** A link, or nothing where its target is not one that may be followed. */
function anchor(target, children) {
  const url = URL.canParse(target) ? new URL(target) : null;
  if (!url || !SAFE_SCHEMES.includes(url.protocol)) return null;
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}
