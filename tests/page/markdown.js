// Checks of the page's Markdown: that hostile texts stay texts, that forms become elements, and that streaming in is calm.

import { nodes, show } from "../page/markdown.js";
import { holds, run, same } from "./check.js";

const TAGS = new Set(
  "P H4 H5 H6 HR BLOCKQUOTE UL OL LI DIV TABLE THEAD TBODY TR TH TD FIGURE FIGCAPTION SPAN BUTTON PRE CODE EM STRONG DEL A BR".split(" "),
);
const ATTRIBUTES = new Set(["class", "type", "data-action", "tabindex", "start", "href", "target", "rel"]);

const HOSTILE = [
  "<img src=x onerror=alert(1)>",
  "<script>alert(1)</script>",
  "</div></article><style>*{display:none}</style>",
  "# <svg onload=alert(1)>",
  "- <iframe src=javascript:alert(1)>",
  "| <b onclick=alert(1)>a</b> | b |\n|---|---|\n| <img src=x onerror=alert(1)> | `<i>` |",
  "```<img src=x>\n<script>alert(1)</script>\n```",
  "```\" onmouseover=\"alert(1)\n<b>\n```",
  "``` unclosed\n<img src=x onerror=alert(1)>",
  "~~~\n</code></pre><img src=x onerror=alert(1)>",
  "[a](javascript:alert(1))",
  "[a](JaVaScRiPt:alert(1))",
  "[a](java\tscript:alert(1))",
  "[a](<java\tscript:alert(1)>)",
  "[a](<\u0001javascript:alert(1)>)",
  "[a](data:text/html,<script>alert(1)</script>)",
  "[a](vbscript:msgbox)",
  "[a](file:///etc/passwd)",
  "[a](blob:https://example.com/1)",
  "[a](//example.com)",
  "[a](/v1/stats)",
  "<javascript:alert(1)>",
  "<data:text/html,a>",
  "![a](javascript:alert(1))",
  "![a](https://example.com/a.png\" onerror=\"alert(1))",
  "[<img src=x onerror=alert(1)>](https://example.com)",
  "[a](https://example.com/\"onclick=\"alert(1))",
  "https://example.com/\"onclick=\"alert(1)",
  "**<u>a</u>** _<b>b</b>_ ~~<s>c</s>~~ `<code>`",
  "> > <marquee>",
  "&lt;img src=x onerror=alert(1)&gt;",
];

/** Long texts that a careless reader takes long for, or falls over. */
const HEAVY = [
  "*a ".repeat(20000),
  "**".repeat(20000),
  "_a_".repeat(20000),
  "[".repeat(50000),
  "![".repeat(20000),
  "[a](".repeat(20000),
  "[a](<".repeat(20000),
  "`".repeat(50001),
  Array.from({ length: 400 }, (_, n) => "`".repeat(n + 1)).join(" "),
  "<a:".repeat(20000),
  ">".repeat(20000),
  Array.from({ length: 2000 }, (_, n) => `${" ".repeat(n)}- a`).join("\n"),
  "- ".repeat(20000),
  "|".repeat(20000),
  `|${"-|".repeat(5000)}\n|${"-|".repeat(5000)}`,
  `# ${"#".repeat(50000)}a`,
  `# a${" ".repeat(50000)}b`,
  `\`\`\`${" ".repeat(50000)}\``,
  `a${" ".repeat(50000)}\nb`,
  `https://example.com/${")".repeat(50000)}`,
  "-\t".repeat(20000),
  "1. a\n\n".repeat(5000),
  "\\".repeat(50001),
];

function html(text, open = false) {
  const box = document.createElement("div");
  box.append(...nodes(text, open));
  return box.innerHTML;
}

/** That all of an element comes from the lists above, and no link leads where it must not. */
function isSafe(root) {
  return [...root.querySelectorAll("*")].every(
    (node) =>
      TAGS.has(node.nodeName) &&
      [...node.attributes].every(({ name }) => ATTRIBUTES.has(name)) &&
      (node.nodeName !== "A" || /^(https?|mailto):/.test(node.href)),
  );
}

function hostileTexts() {
  for (const text of HOSTILE) {
    for (let end = 1; end <= text.length; end += 1) {
      for (const open of [false, true]) {
        const box = document.createElement("div");
        box.append(...nodes(text.slice(0, end), open));
        holds(isSafe(box), `safe, ${open ? "open" : "whole"}: ${text.slice(0, end)}`);
      }
    }
  }
  same(html("<img src=x onerror=alert(1)>"), "<p>&lt;img src=x onerror=alert(1)&gt;</p>", "an element");
  same(html("[a](javascript:alert(1))"), "<p>[a](javascript:alert(1))</p>", "a scheme that is not safe");
  same(html("&lt;b&gt;"), "<p>&amp;lt;b&amp;gt;</p>", "an entity");
}

function heavyTexts() {
  for (const text of HEAVY) {
    for (const open of [false, true]) {
      const began = performance.now();
      const box = document.createElement("div");
      box.append(...nodes(text, open));
      const took = performance.now() - began;
      holds(isSafe(box), `safe: ${text.slice(0, 20)} ...`);
      holds(took < 3000, `quick: ${text.slice(0, 20)} ... took ${Math.round(took)} ms`);
    }
  }
}

const link = (href, text) => `<a href="${href}" target="_blank" rel="noopener noreferrer nofollow">${text}</a>`;
const code = (language, text) =>
  `<figure class="code"><figcaption><span>${language}</span><button type="button" class="quiet" data-action="copy-code">Copy</button>` +
  `</figcaption><pre tabindex="0"><code>${text}</code></pre></figure>`;

function forms() {
  const cases = [
    ["a\nb", "<p>a<br>b</p>"],
    ["a\n\nb", "<p>a</p><p>b</p>"],
    ["# a", "<h4>a</h4>"],
    ["## a ##", "<h5>a</h5>"],
    ["####### a", "<p>####### a</p>"],
    ["#a", "<p>#a</p>"],
    ["---", "<hr>"],
    ["* * *", "<hr>"],
    ["> a\n> b", "<blockquote><p>a<br>b</p></blockquote>"],
    ["- a\n- b", "<ul><li>a</li><li>b</li></ul>"],
    ["- a\n\n- b", "<ul><li>a</li><li>b</li></ul>"],
    ["3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'],
    ["1. a\n   - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"],
    ["1. a\n  - b", "<ol><li>a<ul><li>b</li></ul></li></ol>"],
    ["- a\n\n  b\n\nc", "<ul><li>a<p>b</p></li></ul><p>c</p>"],
    ["- a\n  ```js\n  b\n  ```", `<ul><li>a${code("js", "b")}</li></ul>`],
    ["in 1986\n1987. was", "<p>in 1986<br>1987. was</p>"],
    ["```\na\n\n  b\n```\nc", `${code("text", "a\n\n  b")}<p>c</p>`],
    ["````\n```\n````", code("text", "```")],
    ["```py\na", code("py", "a")],
    ["*a* **b** ***c*** ~~d~~ _e_ __f__", "<p><em>a</em> <strong>b</strong> <strong><em>c</em></strong> <del>d</del> <em>e</em> <strong>f</strong></p>"],
    ["**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"],
    ["*a **b*", "<p><em>a **b</em></p>"],
    ["a_b_c 2*3*4 2 * 3 * 4", "<p>a_b_c 2<em>3</em>4 2 * 3 * 4</p>"],
    ["**a", "<p>**a</p>"],
    ["\\*a\\* \\<b>", "<p>*a* &lt;b&gt;</p>"],
    ["`a*b*` ``c`d``", "<p><code>a*b*</code> <code>c`d</code></p>"],
    ["[a *b*](https://example.com/c_d)", `<p>${link("https://example.com/c_d", "a <em>b</em>")}</p>`],
    ['[a](https://example.com "title")', `<p>${link("https://example.com/", "a")}</p>`],
    ["[a](https://example.com/b_(c))", `<p>${link("https://example.com/b_(c)", "a")}</p>`],
    ["![a](https://example.com/b.png)", `<p>${link("https://example.com/b.png", "a")}</p>`],
    ["(https://example.com/a_b).", `<p>(${link("https://example.com/a_b", "https://example.com/a_b")}).</p>`],
    ["**https://example.com**", `<p><strong>${link("https://example.com/", "https://example.com")}</strong></p>`],
    ["<mailto:a@example.com>", `<p>${link("mailto:a@example.com", "mailto:a@example.com")}</p>`],
    ["[1] and [x]", "<p>[1] and [x]</p>"],
    [
      "a\n| b | c |\n|:-:|--:|\n| `d` | e\\|f |\n\ng",
      '<p>a</p><div class="wide" tabindex="0"><table><thead><tr><th class="center">b</th><th class="right">c</th></tr></thead><tbody>' +
        '<tr><td class="center"><code>d</code></td><td class="right">e|f</td></tr></tbody></table></div><p>g</p>',
    ],
    ["a | b", "<p>a | b</p>"],
  ];
  for (const [text, expected] of cases) same(html(text), expected, text);
}

function openTexts() {
  const cases = [
    ["a **b", "<p>a <strong>b</strong></p>"],
    ["a **", "<p>a </p>"],
    ["a `b", "<p>a <code>b</code></p>"],
    ["a [b](https://exa", "<p>a b</p>"],
    ["a\n-", "<p>a</p>"],
    ["a\n``", "<p>a</p>"],
    ["2*3 is", "<p>2*3 is</p>"],
    ["| a | b", '<div class="wide" tabindex="0"><table><thead><tr><th class="left">a</th><th class="left">b</th></tr></thead><tbody></tbody></table></div>'],
  ];
  for (const [text, expected] of cases) same(html(text, true), expected, `open: ${text}`);
}

/** Letter by letter: what is whole stays the same node, code grows in place, and the end is as if it had come at once. */
function streaming() {
  const text = "# a\n\nb **c** d\n\n```js\nlet e = 1;\nlet f = 2;\n```\n\n| g | h |\n|---|---|\n| i | j |\n\n1. k\n2. l\n\n[m](https://example.com) n";
  const box = document.createElement("div");
  let first = null;
  let pre = null;
  for (let end = 1; end <= text.length; end += 1) {
    const before = box.textContent.length;
    show(box, text.slice(0, end), true);
    holds(box.textContent.length >= before - "](".length, `nothing vanishes: ${text.slice(0, end)}`);
    if (text[end] === "b") first = box.firstChild;
    if (text.slice(end).startsWith("let f")) pre = box.querySelector("pre");
  }
  show(box, text);
  same(box.innerHTML, html(text), "streamed and at once");
  holds(first !== null && box.firstChild === first, "a heading stays the same node");
  holds(pre !== null && box.querySelector("pre") === pre, "a code block stays the same node");
  show(box, "o");
  same(box.innerHTML, "<p>o</p>", "another text");
}

run(() => {
  hostileTexts();
  heavyTexts();
  forms();
  openTexts();
  streaming();
});
