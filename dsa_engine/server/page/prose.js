/** Text as models write it, Markdown: shown block by block while it comes. Only text nodes and a few elements are made,
 * never HTML from the text, and links stay text. What is no Markdown is shown as it is. */

import { make } from "./elements.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`\n]*)$/;
const HEADING = /^(#{1,6})\s+(\S.*)$/;
const ITEM = /^(\s*)([-*+]|(\d{1,9})[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ROW = /^\s*\|.*\|\s*$/;
const UNDER_HEADER = /^[\s:|]*-[\s:|-]*$/;
const INLINE =
  /(?<!`)(?<ticks>`{1,2})(?!`)(?<code>[^\n]+?)(?<!`)\k<ticks>(?!`)|\*\*(?=[^\s*])(?<strong>[^\n]+?)(?<=[^\s*])\*\*|(?<![\w*])\*(?=[^\s*])(?<em>[^*\n]+?)(?<=[^\s*])\*(?![\w*])/g;

export class Prose {
  #element;
  #open = ""; // source of the last block, which may go on
  #shown = []; // nodes of the last block

  constructor(element) {
    this.#element = element;
    element.replaceChildren();
  }

  get empty() {
    return !this.#element.hasChildNodes();
  }

  /** Appends text; only the last block is made again. */
  push(text) {
    this.#open += text;
    for (let end; (end = endOfBlock(this.#open)); ) {
      this.#show(this.#open.slice(0, end));
      this.#open = this.#open.slice(end);
      this.#shown = [];
    }
    this.#show(this.#open);
  }

  #show(source) {
    for (const node of this.#shown) node.remove();
    this.#shown = source.trim() ? block(source) : [];
    this.#element.append(...this.#shown);
  }
}

/** The length of the first block of `text` with the blank lines after it; 0 if it may go on. */
function endOfBlock(text) {
  const open = FENCE.exec(text.slice(0, text.indexOf("\n") + 1).trimEnd());
  if (open) {
    const close = new RegExp(`\\n {0,3}${open[1][0]}{${open[1].length},}[ \\t]*\\n`).exec(text);
    return close ? close.index + close[0].length : 0;
  }
  const blank = /\n[ \t]*\n+/.exec(text);
  const fence = /\n {0,3}(?:`{3,}[^`\n]*|~{3,}[^\n]*)\n/.exec(text);
  if (fence && (!blank || fence.index < blank.index)) return fence.index + 1;
  return blank ? blank.index + blank[0].length : 0;
}

/** The nodes of a block. */
function block(source) {
  const lines = source.replace(/^(?:[ \t]*\n)+|\n+$/g, "").split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) {
    const last = lines.at(-1).trim();
    const closed = lines.length > 1 && last.length >= fence[1].length && !last.replaceAll(fence[1][0], "");
    return [scroller("pre", make("code", lines.slice(1, closed ? -1 : undefined).join("\n")))];
  }
  const nodes = [];
  for (let i = 0; i < lines.length; ) {
    const run = (test) => {
      const start = i;
      while (i < lines.length && test(lines[i])) i++;
      return lines.slice(start, i);
    };
    const heading = HEADING.exec(lines[i]);
    if (heading) {
      nodes.push(make("h4", ...inline(heading[2]))); // under "Answer", an h3; models skip levels
      i++;
    } else if (RULE.test(lines[i])) {
      nodes.push(make("hr"));
      i++;
    } else if (ROW.test(lines[i]) && UNDER_HEADER.test(lines[i + 1] ?? "")) {
      nodes.push(table(run((line) => ROW.test(line))));
    } else if (ITEM.test(lines[i])) {
      nodes.push(...lists(run((line) => ITEM.test(line) || /^\s+\S/.test(line))));
    } else if (lines[i].startsWith(">")) {
      const inner = run((line) => line.startsWith(">")).map((line) => line.replace(/^> ?/, ""));
      nodes.push(make("blockquote", make("p", ...inline(inner.join("\n")))));
    } else {
      const first = lines[i++];
      const rest = run((line) => ![HEADING, RULE, ITEM].some((kind) => kind.test(line)));
      nodes.push(make("p", ...inline([first, ...rest].join("\n"))));
    }
  }
  return nodes;
}

/** Lists of lines that begin an item or go on with one; deeper indentation is a list in an item. */
function lists(lines) {
  const roots = [];
  const open = []; // {indent, list}, outermost first
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (!item) {
      open.at(-1).list.lastElementChild.append("\n", ...inline(line.trim()));
      continue;
    }
    const [, { length: indent }, , number, text] = item;
    while (open.length && open.at(-1).indent > indent) open.pop();
    const kind = number ? "OL" : "UL";
    if (open.at(-1)?.indent === indent && open.at(-1).list.tagName !== kind) open.pop();
    if (open.at(-1)?.indent !== indent) {
      const list = make(kind);
      if (number) list.start = Number(number);
      const parent = open.at(-1)?.list.lastElementChild;
      if (parent) parent.append(list);
      else roots.push(list);
      open.push({ indent, list });
    }
    open.at(-1).list.append(make("li", ...inline(text)));
  }
  return roots;
}

function table([header, , ...rows]) {
  const row = (line, kind) => {
    const cells = line.trim().slice(1, -1).split("|");
    return make("tr", ...cells.map((cell) => make(kind, ...inline(cell.trim()))));
  };
  const grid = make("table", make("thead", row(header, "th")), make("tbody", ...rows.map((line) => row(line, "td"))));
  return scroller("div", grid);
}

/** An element that scrolls sideways on a narrow page, by the keyboard too. */
function scroller(name, child) {
  const element = make(name, child);
  element.className = "scroller";
  element.tabIndex = 0;
  return element;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const { code, strong, em } = match.groups;
    if (match.index > end) nodes.push(text.slice(end, match.index));
    if (code !== undefined) nodes.push(make("code", code));
    else nodes.push(make(strong === undefined ? "em" : "strong", ...inline(strong ?? em)));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}
