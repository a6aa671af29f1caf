/** Turns of a conversation: what was asked and answered, how it is shown, and the messages that go to the server. */

import { counted, make } from "./elements.js";
import { Prose } from "./prose.js";

const UPDATES_EVERY = 1_000; // milliseconds between two states of the progress line

/** The messages of a request for the answer of `turn`: system prompt, document and earlier turns come first and stay
 * the same from question to question, so that the server finds them in its prefix cache. Turns without an answer are
 * left out, and so are thoughts, as the models' own formats do. */
export function messagesOf(turns, turn, document, systemPrompt) {
  const messages = systemPrompt ? [{ role: "system", content: systemPrompt }] : [];
  const earlier = turns.slice(0, turns.indexOf(turn)).filter((other) => other.content.trim());
  for (const [number, each] of [...earlier, turn].entries()) {
    const first = number === 0 && document;
    messages.push({ role: "user", content: first ? document.before(each.question) : each.question });
    if (each !== turn) messages.push({ role: "assistant", content: each.content });
  }
  return messages;
}

export class Turn {
  content = "";
  tokens = null; // ids of the prompt and of the output, if the server says them
  #pending = { thought: "", content: "" }; // came since the page was last painted
  #frame = 0;
  #timer = 0;
  #times = {}; // milliseconds: sent, first piece, first of the content, last piece
  #usage = null;
  #finish = null;
  #prose = null; // the shown thought and content

  constructor(number, question, template) {
    this.question = question;
    this.element = template.content.firstElementChild.cloneNode(true);
    const words = [`Question ${number}`, question, `Answer ${number}`];
    words.forEach((text, i) => (this.element.children[i].textContent = text));
    const named = [...this.element.querySelectorAll("[data-part]")];
    this.parts = Object.fromEntries(named.map((element) => [element.dataset.part, element]));
  }

  /** Before a request, the first or another one. */
  begin() {
    const { details, thought, content, problem, figures } = this.parts;
    this.content = "";
    this.tokens = null;
    this.#times = { sent: performance.now() };
    this.#usage = this.#finish = null;
    this.#prose = { thought: new Prose(thought), content: new Prose(content) };
    details.hidden = problem.hidden = figures.hidden = this.parts.look.hidden = true;
    this.#showProgress();
    this.#timer = setInterval(() => this.#showProgress(), UPDATES_EVERY);
  }

  /** Takes a chunk of the stream. Returns whether it is the first with a part of the answer. */
  take(chunk) {
    if (chunk.usage) this.#usage = chunk.usage;
    const { delta = {}, finish_reason, token_ids = [] } = chunk.choices?.[0] ?? {};
    if (chunk.prompt_token_ids) this.tokens = { prompt: chunk.prompt_token_ids, output: [] };
    this.tokens?.output.push(...token_ids);
    if (finish_reason) this.#finish = finish_reason;
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    const content = delta.content ?? "";
    if (!thought && !content) return false;
    const times = this.#times;
    const first = times.first === undefined;
    times.last = performance.now();
    times.first ??= times.last;
    if (content) times.content ??= times.last;
    this.#showProgress();
    this.content += content;
    this.#pending.thought += thought;
    this.#pending.content += content;
    this.#frame ||= requestAnimationFrame(() => this.#paint());
    return first;
  }

  /** After the last chunk. `problem`: words for a person; `stopped`: by this person. */
  end({ problem = "", stopped = false } = {}) {
    clearInterval(this.#timer);
    cancelAnimationFrame(this.#frame);
    this.#paint();
    const { parts } = this;
    const notes = { length: "Ended at the limit of tokens.", tool_calls: "The model called a tool; here is none." };
    parts.progress.textContent = stopped ? "Stopped." : (notes[this.#finish] ?? "");
    if (!problem && !stopped && !this.content.trim()) parts.progress.textContent ||= "The answer is empty.";
    parts.problem.hidden = !problem;
    parts.problem.firstElementChild.textContent = problem;
    const figures = this.figures();
    parts.figures.hidden = !figures.length;
    const pairs = figures.map(([label, value]) => make("div", make("dt", label), make("dd", value)));
    parts.figures.replaceChildren(...pairs);
  }

  /** The measured figures as [label, value] pairs; times are as this page saw them. */
  figures() {
    const { sent, first, last } = this.#times;
    if (first === undefined) return [];
    const figures = [["TTFT", duration(first - sent)]];
    const { completion_tokens: tokens, prompt_tokens: prompt, prompt_tokens_details: details } = this.#usage ?? {};
    if (tokens > 1 && last > first) {
      const rate = ((tokens - 1) / (last - first)) * 1_000;
      figures.push(["Speed", `${rate.toLocaleString("en", { maximumSignificantDigits: 3 })} tokens/s`]);
    }
    if (tokens) figures.push(["Answer", counted(tokens, "token")]);
    if (prompt) {
      const cached = (details?.cached_tokens ?? 0).toLocaleString("en");
      figures.push(["Cached", `${cached} of ${counted(prompt, "prompt token")}`]);
    }
    return figures;
  }

  #showProgress() {
    const { sent, first, content } = this.#times;
    const seconds = Math.floor((performance.now() - sent) / 1_000);
    const doing = first === undefined ? "Reading the prompt" : content === undefined ? "Thinking" : "Writing";
    this.parts.progress.textContent = seconds ? `${doing}… ${seconds} s` : `${doing}…`;
  }

  #paint() {
    this.#frame = 0;
    const { details, summary } = this.parts;
    const { first, content: began } = this.#times;
    for (const part of ["thought", "content"]) {
      if (this.#pending[part]) this.#prose[part].push(this.#pending[part]);
      this.#pending[part] = "";
    }
    details.hidden = this.#prose.thought.empty;
    summary.textContent = began ? `Thought for ${duration(began - first)}` : "Thoughts";
    if (this.element.isConnected) this.element.dispatchEvent(new Event("painted", { bubbles: true }));
  }
}

function duration(milliseconds) {
  if (milliseconds < 1_000) return `${Math.round(milliseconds)} ms`;
  if (milliseconds < 60_000) return `${(milliseconds / 1_000).toFixed(milliseconds < 10_000 ? 2 : 1)} s`;
  return `${Math.floor(milliseconds / 60_000)} min ${Math.round((milliseconds % 60_000) / 1_000)} s`;
}
