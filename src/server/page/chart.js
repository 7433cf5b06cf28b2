// Pictures of numbers: a line over the last two minutes, a bar of parts, and columns of parts. They know how to draw, and not what
// is drawn.

import { element } from "./dom.js";
import { short } from "./numbers.js";

const SVG = "http://www.w3.org/2000/svg";
/** Seconds that a line goes back. */
export const SPAN = 120;
/** Seconds between two points from which on nothing is drawn between them. */
const GAP = 5;
const HEIGHT = 100;

/** A line chart in `container`. `top` is the end of the scale, where it does not follow the values. */
export class Line {
  #container;
  #name;
  #unit;
  #top;
  #line = shape("path", { class: "line" });
  #area = shape("path", { class: "area" });
  #scale = [element("span"), element("span"), element("span", {}, "0")];

  constructor(container, { name, unit, top }) {
    [this.#container, this.#name, this.#unit, this.#top] = [container, name, unit, top];
    const grid = [0, HEIGHT / 2, HEIGHT].map((y) => shape("path", { class: "grid", d: `M0 ${y}H${SPAN}` }));
    const plot = shape("svg", { viewBox: `0 0 ${SPAN} ${HEIGHT}`, preserveAspectRatio: "none" });
    plot.append(...grid, this.#area, this.#line);
    const times = ["2 min ago", "1 min ago", "now"].map((time) => element("span", {}, time));
    surround(container, this.#scale, plot, times);
  }

  /** Draws points `{ at, value }`, in seconds, oldest first, up to the second `now`. */
  draw(points, now) {
    const values = points.map(({ value }) => value);
    const highest = Math.max(...values, 0);
    const top = this.#top ?? roundUp(highest);
    const runs = [];
    points.forEach(({ at, value }, index) => {
      const point = [SPAN - (now - at), HEIGHT * (1 - value / top)];
      if (index === 0 || at - points[index - 1].at > GAP) runs.push([point]);
      else runs.at(-1).push(point);
    });
    const path = (run) => run.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join("L");
    this.#line.setAttribute("d", runs.map((run) => `M${path(run)}`).join(""));
    this.#area.setAttribute("d", runs.map((run) => `M${run[0][0]} ${HEIGHT}L${path(run)}L${run.at(-1)[0]} ${HEIGHT}Z`).join(""));
    this.#scale[0].textContent = `${top.toLocaleString("en")} ${this.#unit}`;
    this.#scale[1].textContent = (top / 2).toLocaleString("en");
    const last = values.length > 0 ? `${short(values.at(-1))} ${this.#unit} now, ${short(highest)} at most` : "nothing yet";
    this.#container.setAttribute("aria-label", `${this.#name}, the last two minutes: ${last}.`);
  }
}

/** A bar in `container` that is divided into parts; `parts` has a pair of tone and name for each. */
export class Parts {
  #bar = element("div", { class: "bar-of-parts", "aria-hidden": "true" });
  #parts;

  constructor(container, parts) {
    this.#parts = parts.map(([tone, name]) => {
      const piece = element("span", { "data-tone": tone });
      const figure = element("b", { "data-part": tone });
      const entry = element("li", {}, element("i", { "data-tone": tone, "aria-hidden": "true" }), figure, ` ${name}`);
      return { piece, figure, entry };
    });
    this.#bar.append(...this.#parts.map(({ piece }) => piece));
    container.append(this.#bar, element("ul", { class: "legend" }, ...this.#parts.map(({ entry }) => entry)));
  }

  /** Shows a size and a text for each part; a part without a text is none. */
  draw(sizes, texts) {
    this.#parts.forEach(({ piece, figure, entry }, index) => {
      entry.hidden = !texts[index];
      piece.style.flexGrow = sizes[index];
      piece.hidden = !(sizes[index] > 0);
      figure.textContent = texts[index];
    });
  }
}

/** Columns in `container`, one beside the other, each divided into the parts of a whole; `tones` from the bottom up. */
export class Columns {
  #container;
  #name;
  #tones;
  #columns = element("div", { class: "columns" });
  #ends = [element("span"), element("span")];

  constructor(container, { name, tones }) {
    [this.#container, this.#name, this.#tones] = [container, name, tones];
    const scale = ["100 %", "50", "0"].map((value) => element("span", {}, value));
    surround(container, scale, this.#columns, this.#ends);
  }

  /** Draws columns of `{ name, sizes, text }`; the text is shown to who points at one. */
  draw(columns, summary) {
    while (this.#columns.childElementCount > columns.length) this.#columns.lastChild.remove();
    while (this.#columns.childElementCount < columns.length) {
      const pieces = this.#tones.map((tone) => element("span", { "data-tone": tone }));
      this.#columns.append(element("div", {}, ...pieces));
    }
    columns.forEach(({ sizes, text }, index) => {
      const column = this.#columns.children[index];
      column.title = text;
      sizes.forEach((size, part) => (column.children[part].style.flexGrow = size));
    });
    [columns[0], columns.at(-1)].forEach((column, end) => (this.#ends[end].textContent = column?.name ?? ""));
    this.#container.setAttribute("aria-label", `${this.#name}: ${summary}.`);
  }
}

/** Puts a scale beside a plot, and words below it. */
function surround(container, scale, plot, words) {
  container.setAttribute("role", "img");
  container.append(
    element("div", { class: "scale" }, ...scale),
    element("div", { class: "plot" }, plot),
    element("div", { class: "below" }, ...words),
  );
}

/** The next of 1, 2, 5, 10, 20, 50 ... */
function roundUp(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value);
}

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
