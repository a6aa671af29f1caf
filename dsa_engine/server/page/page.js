/** The page: a conversation beside a document. Connects the elements with the server, the document and the turns. */

import { Turn, counted, messagesOf } from "./conversation.js";
import { Document, readText } from "./document.js";
import { Server } from "./server.js";

const RETRY_MS = 3_000; // between two looks at a server that is not ready
const LONG_PASTE = 10_000; // characters pasted into the question that are a document
const ANNOUNCED = 600; // characters of an answer that a screen reader is told at once

const $ = (id) => document.getElementById(id);
const server = new Server();
const state = { model: null, document: null, turns: [], running: null, counting: null };

// Conversation

async function ask(question) {
  const turn = new Turn(state.turns.length + 1, question, $("turn"));
  state.turns.push(turn);
  turn.parts.again.addEventListener("click", () => state.running || answer(turn));
  $("welcome").hidden = true;
  $("turns").append(turn.element);
  await answer(turn);
}

async function answer(turn) {
  const controller = new AbortController();
  const running = { turn, controller };
  state.running = running;
  showRunning();
  turn.begin();
  scrollDown(true);
  say("The question is sent.");
  let outcome;
  try {
    state.model ??= (await server.model()).id;
    for await (const chunk of server.chat(body(turn), controller.signal)) {
      if (turn.take(chunk)) say("The answer begins.");
    }
    outcome = {};
  } catch (error) {
    outcome = error.name === "AbortError" ? { stopped: true } : { problem: error.message };
    if (error.status === 0 || error.status === 503) connect();
  }
  turn.end(outcome);
  if (state.running !== running) return; // another conversation has begun
  state.running = null;
  showRunning();
  scrollDown();
  announce(turn, outcome);
}

function body(turn) {
  const number = (id) => ($(id).value === "" ? undefined : $(id).valueAsNumber);
  return {
    model: state.model,
    messages: messagesOf(state.turns, turn, state.document, $("system-prompt").value.trim()),
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    // The names of this switch in the conversations of DeepSeek and of GLM; each ignores the other.
    chat_template_kwargs: $("thinking").checked ? { thinking: true, enable_thinking: true } : undefined,
  };
}

function stop() {
  state.running?.controller.abort();
}

function newConversation() {
  stop();
  state.running = null;
  for (const turn of state.turns) turn.element.remove();
  state.turns = [];
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

function say(text) {
  $("status").textContent = text;
}

/** Follows the answer, unless the reader has scrolled up. */
let follows = true;

function scrollDown(always = false) {
  follows ||= always;
  if (follows) $("turns").scrollTop = $("turns").scrollHeight;
}

// Document

async function setDocument(name, read) {
  showProblem("");
  let chosen;
  try {
    chosen = name === null ? null : new Document(name, await read());
  } catch (error) {
    showProblem(error.message);
    return;
  }
  if (state.turns.length) {
    if (!(await confirmed())) return;
    newConversation();
  }
  const fromDrop = $("drop").contains(document.activeElement);
  state.document = chosen;
  showDocument();
  if (fromDrop) question.focus(); // the focused button is hidden now
  countTokens();
}

function confirmed() {
  const dialog = $("replace");
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "begin"), { once: true });
  });
}

function showDocument() {
  const { document: chosen } = state;
  $("document-heading").textContent = chosen?.name ?? "Document";
  $("document-heading").title = chosen?.name ?? "";
  $("drop").hidden = chosen !== null;
  for (const id of ["document-text", "toggle-text", "remove-document"]) $(id).hidden = chosen === null;
  $("document").classList.toggle("filled", chosen !== null);
  toggleText(false);
  if (chosen) chosen.show($("document-text"));
  else $("document-text").replaceChildren();
}

/** On a narrow page the document's text is shown only on request. */
function toggleText(shown) {
  $("document").classList.toggle("open", shown);
  $("toggle-text").setAttribute("aria-expanded", String(shown));
  $("toggle-text").textContent = shown ? "Hide" : "Show";
}

async function countTokens() {
  state.counting?.abort();
  const { document: chosen } = state;
  const controller = (state.counting = new AbortController());
  $("document-counts").textContent = chosen ? `${counted(chosen.characters, "character")}, counting tokens…` : "";
  $("document-counts").classList.remove("warning");
  if (!chosen) return say("The document is removed.");
  let tokens = "";
  try {
    state.model ??= (await server.model()).id;
    const { count, limit } = await server.countTokens(state.model, chosen.text, controller.signal);
    tokens = `, ${counted(count, "token")}`;
    if (limit && count >= limit) {
      tokens += `: more than the model’s ${limit.toLocaleString("en")}`;
      $("document-counts").classList.add("warning");
    }
  } catch (error) {
    if (controller.signal.aborted) return;
    tokens = ", tokens not counted";
    if (error.status === 0) connect();
  }
  if (controller.signal.aborted) return;
  $("document-counts").textContent = counted(chosen.characters, "character") + tokens;
  say(`Document ${chosen.name}: ${$("document-counts").textContent}`);
}

function showProblem(text) {
  $("document-problem").textContent = text;
  $("document-problem").hidden = !text;
}

function takeFiles(files) {
  if (files.length > 1) return showProblem("One document at a time is possible: drop a single file.");
  const [file] = files;
  if (file) setDocument(file.name, () => readText(file));
}

// The server's state

let looking = 0;

/** Looks until the server is ready, and shows its model. */
async function connect() {
  clearTimeout(looking);
  const show = (name, text) => {
    $("server").dataset.state = name;
    $("server-state").textContent = text;
  };
  try {
    const model = await server.model();
    const changed = state.model !== model.id;
    state.model = model.id;
    $("model").textContent = model.id;
    $("model").title = model.id;
    document.title = `${model.id} – dsa_engine`;
    if (await server.isReady()) {
      show("ready", "ready");
      if (changed && state.document) countTokens();
      return;
    }
    show("waiting", "not ready");
  } catch (error) {
    show("waiting", error.status === 401 ? "needs an API key" : error.status ? "not ready" : "not reachable");
    if (error.status === 401) return; // until a key is entered
  }
  looking = setTimeout(connect, RETRY_MS);
}

// Elements

const question = $("question");

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (!text) return;
  if (state.running) return say("An answer is being written. Escape stops it.");
  question.value = "";
  fitQuestion();
  ask(text);
});

question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});

question.addEventListener("input", fitQuestion);

/** As high as its text, up to the limit of the style sheet. */
function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.running && !document.querySelector("dialog[open]")) stop();
});

$("stop").addEventListener("click", stop);
$("new-conversation").addEventListener("click", newConversation);
$("toggle-text").addEventListener("click", () => toggleText(!$("document").classList.contains("open")));

$("remove-document").addEventListener("click", async () => {
  await setDocument(null);
  if (!state.document) $("choose-file").focus();
});

$("turns").addEventListener("painted", () => scrollDown());
$("turns").addEventListener("scroll", () => {
  const { scrollHeight, scrollTop, clientHeight } = $("turns");
  follows = scrollHeight - scrollTop - clientHeight < 80;
});

$("choose-file").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  takeFiles($("file").files);
  $("file").value = ""; // so that the same file can be chosen again
});

// A page from another machine without TLS has no clipboard to read; Ctrl+V works everywhere.
$("paste").hidden = !navigator.clipboard?.readText;
$("paste").addEventListener("click", () => {
  setDocument("Pasted text", async () => {
    try {
      return await navigator.clipboard.readText();
    } catch {
      throw new Error("The browser does not let this page read the clipboard: press Ctrl+V (or ⌘V) instead.");
    }
  });
});

document.addEventListener("paste", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const { files } = event.clipboardData;
  const text = event.clipboardData.getData("text/plain");
  const typing = event.target.closest?.("input, textarea");
  if (files.length ? typing && text : !text || (typing && text.length < LONG_PASTE)) return;
  event.preventDefault();
  if (files.length) takeFiles(files);
  else setDocument("Pasted text", () => text);
});

// The whole page takes a drop: a file beside the target must not replace the page.
const hasData = (event) => event.dataTransfer?.types.some((type) => type === "Files" || type === "text/plain");
let inside = 0;

function showDrop(change) {
  inside = change === 0 ? 0 : Math.max(0, inside + change);
  $("drop-here").hidden = inside === 0;
}

document.addEventListener("dragenter", (event) => hasData(event) && showDrop(1));
document.addEventListener("dragleave", (event) => hasData(event) && showDrop(-1));
document.addEventListener("dragover", (event) => hasData(event) && event.preventDefault());
document.addEventListener("drop", (event) => {
  showDrop(0);
  const { files } = event.dataTransfer;
  if (!hasData(event) || (!files.length && event.target === question)) return;
  event.preventDefault();
  if (document.querySelector("dialog[open]")) return;
  const text = event.dataTransfer.getData("text/plain");
  if (files.length) takeFiles(files);
  else if (text) setDocument("Dropped text", () => text);
});

$("open-settings").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("close", () => {
  if (server.key === $("api-key").value.trim()) return;
  server.key = $("api-key").value.trim();
  connect();
});

if (matchMedia("(pointer: fine)").matches) question.focus();
showRunning();
connect();
