/** The lens: what the model looked at in a document for a word of its answer, as shades of the text. The shades are
 * highlights of the browser, so the text stays as it is, however long it is. */

import { make } from "./elements.js";

const SHADES = 6; // in lens.css
const APART = 16; // characters at most between two tokens that are text themselves
const TICKS = 100; // beside the text, at the strongest tokens
const RULES = { all: "all it selected", recent: "missed by recency", random: "missed at random" };

/** The place of each token in a text, and the text's length. What is no whole character lies before the next token. */
export function offsetsOf(text, tokens) {
  let at = 0;
  const offsets = tokens.map((token) => {
    const after = token.includes("\ufffd") ? -1 : text.slice(at, at + token.length + APART).indexOf(token);
    if (after < 0) return at;
    at += after + token.length;
    return at - token.length;
  });
  return [...offsets, text.length];
}

/** The numbers, from `first` on, of the tokens with a part in `length` characters from `start` on. */
export function tokensIn(offsets, start, length, first) {
  const numbers = [];
  for (let i = first; i + 1 < offsets.length && offsets[i] < start + length; i++) {
    if (offsets[i + 1] > start) numbers.push(i - first);
  }
  return numbers;
}

/** The words of a text, each with its place. */
export const wordsOf = (text) => [...text.matchAll(/\S+/g)].map((match) => [match[0], match.index]);

/** Whether `count` of `visible` positions, chosen at random, lack this one; the same each time. */
function lacks(position, visible, count) {
  let bits = Math.imul(position ^ Math.imul(visible, 0x9e3779b1), 0x85ebca6b);
  bits = Math.imul(bits ^ (bits >>> 13), 0xc2b2ae35);
  return ((bits ^ (bits >>> 16)) >>> 0) / 2 ** 32 >= count / visible;
}

/** `weights` by position, on average over the tokens of a word and over `layers`, of what `rule` leaves; the whole
 * `weight` that each rule leaves, and how many tokens were `selected`.
 *
 * `looks`: for each token `{visible, positions, weights}`: the number of tokens before it; of each layer what it
 * selected. */
export function sum(looks, layers, rule) {
  const weights = new Map();
  const left = { all: 0, recent: 0, random: 0 };
  let selected = 0;
  for (const { visible, positions, weights: given } of looks) {
    for (const layer of layers) {
      const count = positions[layer].length;
      selected += count / layers.length / looks.length;
      positions[layer].forEach((position, i) => {
        const weight = given[layer][i] / layers.length / looks.length;
        const leaves = { all: true, recent: position < visible - count, random: lacks(position, visible, count) };
        for (const name in RULES) if (leaves[name]) left[name] += weight;
        if (leaves[rule]) weights.set(position, (weights.get(position) ?? 0) + weight);
      });
    }
  }
  return { weights, left, selected: Math.round(selected) };
}

/** Whether a token is one of the document. */
const isInside = (position, { offsets, start, end }) => offsets[position] >= start && offsets[position + 1] <= end;

/** The largest weight of a single token of the document, in any layer. */
export function peakOf(looks, place) {
  const peaks = looks.map(({ positions, weights }) => {
    const flat = positions.flat();
    return weights.flat().reduce((peak, weight, i) => (weight > peak && isInside(flat[i], place) ? weight : peak), -1);
  });
  return Math.max(-1, ...peaks);
}

export class Lens {
  #looks = [];
  #place = {}; // offsets of all tokens, start and end of the document among them
  #word = make("strong");
  #layer = Object.assign(make("select"), { ariaLabel: "Layer", onchange: () => this.#paint() });
  #rule = Object.assign(make("select"), { ariaLabel: "What is shaded", onchange: () => this.#paint() });
  #said = Object.assign(make("p"), { role: "status", className: "hint" });
  #ticks = Object.assign(make("div"), { className: "ticks", ariaHidden: "true" });

  /** Makes the controls in `bar`. The children of `text` have a text node each. `step(by)` shows another word. */
  constructor(bar, text, step, close) {
    this.text = text;
    const button = (label, title, onclick) => 
      Object.assign(make("button", label), { type: "button", title, ariaLabel: title, onclick });
    this.#rule.append(...Object.entries(RULES).map(([value, label]) => new Option(label, value)));
    const steps = [button("‹", "Word before", () => step(-1)), this.#word, button("›", "Next word", () => step(1))];
    const controls = [...steps, this.#layer, this.#rule, button("×", "Close", close)];
    bar.replaceChildren(make("div", ...controls), this.#said);
    text.after(this.#ticks);
  }

  /** Shows `looks`, see `sum`, at a word; none: says `words`, and nothing is shaded. */
  show(word, looks, place, words = "") {
    [this.#looks, this.#place] = [looks, place];
    this.#word.textContent = word;
    this.#said.textContent = words;
    const layers = looks[0]?.positions.length ?? 0;
    if (layers && this.#layer.length !== layers + 1) {
      const names = Array.from({ length: layers }, (_, i) => `layer ${i + 1} of ${layers}`);
      this.#layer.replaceChildren(...["all layers", ...names].map((name, value) => new Option(name, value)));
    }
    const strongest = this.#paint();
    const reveal = (times) => {
      const [at, frame] = [strongest, this.text].map((one) => one.getBoundingClientRect());
      if (at.top < frame.top || at.bottom > frame.bottom) this.text.scrollTop += at.top - frame.top - frame.height / 3;
      if (times > 1) requestAnimationFrame(() => reveal(times - 1)); // when what is in view now has its height
    };
    if (strongest) reveal(4);
  }

  /** Shades the text; returns the range of the strongest token. */
  #paint() {
    for (let shade = 0; shade < SHADES; shade++) CSS.highlights?.delete(`look-${shade}`);
    this.#ticks.replaceChildren();
    if (!this.#looks.length) return null;
    if (!CSS.highlights) return void (this.#said.textContent = "This browser cannot shade text (CSS.highlights).");
    const layers = this.#looks[0].positions.map((_, layer) => layer);
    const chosen = this.#layer.value > 0 ? [this.#layer.value - 1] : layers;
    const { weights, left, selected } = sum(this.#looks, chosen, this.#rule.value);
    const { offsets, start } = this.#place;
    const inside = [...weights].filter(([position]) => isInside(position, this.#place));
    const shaded = inside.sort((one, other) => other[1] - one[1]);
    const strength = (weight) => Math.sqrt(weight / (shaded[0][1] || 1));
    const rangeOf = ranges(this.text, start);
    const shades = Array.from({ length: SHADES }, () => new Highlight());
    const found = shaded.map(([position, weight]) => {
      const range = rangeOf(offsets[position], offsets[position + 1]);
      shades[Math.min(SHADES - 1, Math.floor(strength(weight) * SHADES))].add(range);
      return range;
    });
    shades.forEach((one, shade) => CSS.highlights.set(`look-${shade}`, one));
    const top = this.text.getBoundingClientRect().top - this.text.scrollTop;
    for (const [i, range] of found.slice(0, TICKS).entries()) {
      const tick = this.#ticks.appendChild(document.createElement("i"));
      tick.style.top = `${((range.getBoundingClientRect().top - top) / this.text.scrollHeight) * 100}%`;
      tick.style.opacity = strength(shaded[i][1]);
    }
    const percent = (part) => part.toLocaleString("en", { style: "percent", maximumFractionDigits: 1 });
    const here = percent(shaded.reduce((total, [, weight]) => total + weight, 0));
    const [many, of] = [selected, this.#looks.at(-1).visible].map((number) => number.toLocaleString("en"));
    this.#said.textContent =
      `It selected ${many} of ${of} tokens in each layer; ${here} of its attention is shaded. The latest ${many} tokens ` +
      `alone would miss ${percent(left.recent)} of it, ${many} random ones ${percent(left.random)}.`;
    return found[0];
  }
}

/** A function that makes the range of `[start, end)` of a text whose part from `first` on is in `element`. */
function ranges(element, first) {
  const nodes = [...element.childNodes].map((child) => child.firstChild ?? child);
  const ends = [];
  for (const node of nodes) ends.push((ends.at(-1) ?? first) + node.length);
  return (start, end) => {
    const range = document.createRange();
    const at = (offset, number) => [nodes[number], offset - ends[number] + nodes[number].length];
    range.setStart(...at(start, ends.findIndex((one) => start < one)));
    range.setEnd(...at(end, ends.findIndex((one) => end <= one)));
    return range;
  };
}
