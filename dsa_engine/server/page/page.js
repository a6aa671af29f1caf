/** The page: a conversation beside a document. Connects its elements with the server and the turns. */

import { Turn, messagesOf } from "./conversation.js";
import { $, say } from "./elements.js";
import { Lens, offsetsOf, peakOf, tokensIn, wordsOf } from "./lens.js";
import { DocumentPane } from "./pane.js";
import { Recorded } from "./recorded.js";
import { Server } from "./server.js";

const RETRY_MS = 3_000; // between two looks at a server that is not ready
const MAX_LOOKS = 8; // tokens of a word that the lens asks for
const ANNOUNCED = 600; // characters of an answer that a screen reader is told at once

const recorded = $("recorded") && new Recorded(JSON.parse($("recorded").textContent)); // in a file of `dsa-engine lens`
const server = recorded ?? new Server();
const state = { model: recorded && "recorded", turns: [], running: null };
const pane = new DocumentPane({
  mayChange: mayBeginAnew,
  countTokens: (text, signal) => server.countTokens(state.model, text, signal),
  afterChange: () => $("question").focus(),
});

// Conversation

async function ask(question) {
  const turn = new Turn(state.turns.length + 1, question, $("turn"));
  state.turns.push(turn);
  turn.parts.look.addEventListener("click", () => look(turn, 0));
  turn.parts.content.addEventListener("click", (event) => lookAtClick(turn, event));
  turn.parts.again.addEventListener("click", () => {
    if (state.running) return;
    $("question").focus(); // the button goes
    answer(turn);
  });
  $("welcome").hidden = true;
  $("turns").append(turn.element);
  await answer(turn);
}

async function answer(turn) {
  const controller = new AbortController();
  const running = (state.running = { controller });
  showRunning();
  turn.begin();
  scrollDown(turn === state.turns.at(-1));
  say("The question is sent.");
  let outcome = {};
  try {
    state.model ??= (await server.model()).id;
    for await (const chunk of server.chat(body(turn), controller.signal)) {
      if (turn.take(chunk)) say("The answer begins.");
    }
  } catch (error) {
    outcome = error.name === "AbortError" ? { stopped: true } : { problem: error.message };
    if (error.status === 0 || error.status === 503) connect();
  }
  turn.end(outcome);
  turn.parts.look.hidden = !(turn.tokens && pane.document && turn.content.trim());
  if (state.running !== running) return; // another conversation has begun
  state.running = null;
  showRunning();
  scrollDown();
  if (!recorded) announce(turn, outcome);
}

function body(turn) {
  const number = (id) => ($(id).value === "" ? undefined : $(id).valueAsNumber);
  return {
    model: state.model,
    messages: messagesOf(state.turns, turn, pane.document, $("system-prompt").value.trim()),
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    return_token_ids: pane.document !== null, // for the lens
    // The names of this switch in the conversations of DeepSeek and of GLM; each ignores the other.
    chat_template_kwargs: $("thinking").checked ? { thinking: true, enable_thinking: true } : undefined,
  };
}

function newConversation() {
  state.running?.controller.abort();
  state.running = null;
  for (const turn of state.turns) turn.element.remove();
  state.turns = [];
  closeLens();
  $("welcome").hidden = false;
  showRunning();
  say("A new conversation begins.");
  $("question").focus();
}

function showRunning() {
  const focused = document.activeElement;
  $("send").hidden = state.running !== null;
  $("stop").hidden = state.running === null;
  $("new-conversation").disabled = state.turns.length === 0;
  if ([$("send"), $("stop"), $("new-conversation")].includes(focused)) $("question").focus();
}

/** One message to screen readers: the answer itself if it is short, and how to find it if not. */
function announce(turn, { problem, stopped }) {
  if (problem) return say(problem);
  if (stopped) return say("Stopped.");
  const figures = turn.figures().map(([label, value]) => `${label} ${value}`);
  const text = turn.content.length > ANNOUNCED ? "It is long; it is under the last heading." : turn.content;
  say(`The answer is complete. ${text} ${figures.join(", ")}`);
}

/** Asks before a conversation that has begun ends, since the document stands before its first question. */
function mayBeginAnew() {
  if (!state.turns.length) return true;
  const words = "Another document, or none, begins a new conversation: questions and answers here will be gone.";
  if (recorded || !confirm(words)) return false;
  newConversation();
  return true;
}

/** Follows the answer, unless the reader has scrolled up. */
let follows = true;

function scrollDown(always = false) {
  follows ||= always;
  if (follows) $("turns").scrollTop = $("turns").scrollHeight;
}

// The lens: what a word of an answer looked at in the document

const lens = new Lens($("lens"), $("document-text"), (by) => look(looked.turn, looked.number + by), closeLens);
let looked = { controller: new AbortController() };

/** The words of an answer as it is shown, each with its place in the source, which has more signs. */
function shownWords({ content, parts }) {
  const words = [];
  const walker = document.createTreeWalker(parts.content, NodeFilter.SHOW_TEXT);
  for (let node, place = 0; (node = walker.nextNode()); ) {
    for (const [word, at] of wordsOf(node.data)) {
      if (content.indexOf(word, place) < 0) continue;
      words.push({ word, node, at, place: content.indexOf(word, place) });
      place = words.at(-1).place + word.length;
    }
  }
  return words;
}

function lookAtClick(turn, { clientX, clientY }) {
  const { offsetNode, offset } = document.caretPositionFromPoint?.(clientX, clientY) ?? {};
  const isAt = ({ word, node, at }) => node === offsetNode && at <= offset && offset <= at + word.length;
  const number = shownWords(turn).findIndex(isAt);
  if (number >= 0 && !turn.parts.look.hidden && getSelection().isCollapsed) look(turn, number);
}

async function look(turn, number) {
  const words = shownWords(turn);
  const { word, node, at, place } = words.at(number % words.length);
  looked.controller.abort();
  looked = { turn, number: number % words.length, controller: new AbortController() };
  const { signal } = looked.controller;
  $("lens").hidden = false;
  if (!$("document").classList.contains("open")) $("toggle-text").click();
  lens.show(word, [], {}, "Asking what it looked at…");
  const range = new StaticRange({ startContainer: node, startOffset: at, endContainer: node, endOffset: at + word.length });
  CSS.highlights?.set("look-word", new Highlight(range));
  try {
    lens.show(word, ...(await looksOf(turn, word, place, signal)));
  } catch (error) {
    if (error.name !== "AbortError") lens.show(word, [], {}, error.message);
  }
}

/** What the tokens of a word at `place` of the answer looked at, and where the document's tokens are: see Lens.show. */
async function looksOf(turn, word, place, signal) {
  const { prompt, output } = turn.tokens;
  const { text, tokens } = (turn.texts ??= await server.texts([...prompt, ...output], signal));
  const offsets = (turn.offsets ??= offsetsOf(text, tokens));
  const start = text.indexOf(pane.document.text);
  const from = text.lastIndexOf(turn.content) + place;
  if (start < 0 || from < place) throw new Error("The model's tokens spell this text in another way: no shades.");
  const numbers = tokensIn(offsets, from, word.length, prompt.length).slice(0, MAX_LOOKS);
  const prompts = numbers.map((one) => [...prompt, ...output.slice(0, one)]);
  const selections = await server.selections(state.model, prompts, signal);
  const looks = selections.map((one, i) => ({ ...one, visible: prompts[i].length }));
  return [looks, { offsets, start, end: start + pane.document.text.length }];
}

/** Shows a recorded answer, and first of its words the one that looked at a token of the document the most. */
async function showRecorded() {
  await pane.set(recorded.name, () => recorded.document);
  await ask(recorded.question);
  const [turn] = state.turns;
  let best = [-1, 0];
  for (const [number, { word, place }] of shownWords(turn).entries()) {
    const [looks, where] = await looksOf(turn, word, place).catch(() => [[]]);
    const peak = peakOf(looks, where);
    if (peak > best[0]) best = [peak, number];
  }
  look(turn, best[1]);
}

function closeLens() {
  looked.controller.abort();
  lens.show("", [], {});
  CSS.highlights?.delete("look-word");
  $("lens").hidden = true;
}

// The server's state

let looking = 0;

/** Looks until the server is ready, and shows its model. */
async function connect() {
  clearTimeout(looking);
  let said = "not ready";
  try {
    const { id } = await server.model();
    const changed = state.model !== id;
    state.model = $("model").textContent = $("model").title = id;
    document.title = `${id} – dsa_engine`;
    if (await server.isReady()) said = "ready";
    if (said === "ready" && changed) pane.count();
  } catch (error) {
    if (!error.status) said = "not reachable";
    if (error.status === 401) said = "needs an API key";
  }
  $("server").dataset.state = said === "ready" ? "ready" : "waiting";
  $("server-state").textContent = said;
  if (said.startsWith("not")) looking = setTimeout(connect, RETRY_MS); // with a key when it is entered
}

// Elements

const question = $("question");

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (!text) return;
  if (state.running) return say("An answer is being written. Escape stops it.");
  question.value = "";
  ask(text);
});

question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (state.running) state.running.controller.abort();
  else closeLens();
});

$("stop").addEventListener("click", () => state.running.controller.abort());
$("new-conversation").addEventListener("click", newConversation);

$("turns").addEventListener("painted", () => scrollDown());
$("turns").addEventListener("scroll", () => {
  const { scrollHeight, scrollTop, clientHeight } = $("turns");
  follows = scrollHeight - scrollTop - clientHeight < 80;
});

$("open-settings").addEventListener("click", () => $("settings").showModal());
$("api-key").addEventListener("change", () => {
  server.key = $("api-key").value.trim();
  connect();
});

if (matchMedia("(pointer: fine)").matches) question.focus();
showRunning();
if (recorded) showRecorded();
else connect();
