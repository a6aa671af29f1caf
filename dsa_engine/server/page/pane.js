/** The pane of the document: how a document comes in (drop, paste, file picker), and what is shown of it. */

import { Document, readText } from "./document.js";
import { $, counted, make, say } from "./elements.js";

const LONG_PASTE = 10_000; // characters pasted into the question that are a document

export class DocumentPane {
  document = null;
  #counting = new AbortController();
  #page;

  /** `page`: `mayChange()`, whether another document may come now; `countTokens(text, signal)`; `afterChange()`. */
  constructor(page) {
    this.#page = page;
    $("toggle-text").addEventListener("click", () => this.#toggleText(!$("document").classList.contains("open")));
    $("remove-document").addEventListener("click", () => this.#show(null) && $("choose-file").focus());
    $("choose-file").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", () => {
      const [file] = $("file").files;
      if (file) this.set(file.name, () => readText(file));
      $("file").value = ""; // so that the same file can be chosen again
    });
    // A page from another machine without TLS has no clipboard to read; Ctrl+V works everywhere.
    $("paste").hidden = !navigator.clipboard?.readText;
    $("paste").addEventListener("click", () => this.set("Pasted text", readClipboard));
    document.addEventListener("paste", (event) => this.#onPaste(event));
    // The whole page takes a drop: a file beside the target must not replace the page.
    document.addEventListener("dragover", (event) => {
      if (!holdsText(event)) return;
      event.preventDefault();
      $("drop-here").hidden = false;
    });
    document.addEventListener("dragleave", (event) => ($("drop-here").hidden = !event.relatedTarget)); // none: outside
    document.addEventListener("drop", (event) => this.#onDrop(event));
  }

  /** Counts the tokens of the document, if there is one, and shows the counts. */
  async count() {
    this.#counting.abort();
    if (!this.document) return;
    const { name, text, characters } = this.document;
    const { signal } = (this.#counting = new AbortController());
    const show = (tokens, tooLong = false) => {
      $("document-counts").textContent = `${counted(characters, "character")}, ${tokens}`;
      $("document-counts").classList.toggle("warning", tooLong);
    };
    show("counting tokens…");
    const { count, limit } = await this.#page.countTokens(text, signal).catch(() => ({}));
    if (signal.aborted) return;
    const tokens = count === undefined ? "tokens not counted" : counted(count, "token");
    const tooLong = count >= limit;
    show(tooLong ? `${tokens}: more than the model’s ${limit.toLocaleString("en")}` : tokens, tooLong);
    say(`Document ${name}: ${$("document-counts").textContent}`);
  }

  /** Takes the text that `read()` gives as the document, or shows why not. */
  async set(name, read) {
    this.#showProblem("");
    try {
      if (this.#show(new Document(name, await read()))) this.#page.afterChange();
    } catch (error) {
      this.#showProblem(error.message);
    }
  }

  /** Shows a document, or none; returns whether it may change. */
  #show(chosen) {
    if (!this.#page.mayChange()) return false;
    this.document = chosen;
    if (!chosen) say("The document is removed.");
    this.count();
    $("document-heading").textContent = chosen?.name ?? "Document";
    $("document-heading").title = chosen?.name ?? "";
    $("drop").hidden = chosen !== null;
    for (const id of ["document-text", "toggle-text", "remove-document"]) $(id).hidden = chosen === null;
    $("document").classList.toggle("filled", chosen !== null);
    this.#toggleText(false);
    $("document-text").replaceChildren(...(chosen?.pieces() ?? []).map((text) => make("div", text)));
    $("document-text").scrollTop = 0;
    return true;
  }

  /** On a narrow page the document's text is shown only on request. */
  #toggleText(shown) {
    $("document").classList.toggle("open", shown);
    $("toggle-text").setAttribute("aria-expanded", String(shown));
    $("toggle-text").textContent = shown ? "Hide" : "Show";
  }

  #showProblem(text) {
    $("document-problem").textContent = text;
    $("document-problem").hidden = !text;
  }

  /** Takes the file of a transfer, or its text under a `name`. */
  #take(transfer, name) {
    const [file, second] = transfer.files;
    if (second) return this.#showProblem("One document at a time is possible: choose a single file.");
    if (file) return this.set(file.name, () => readText(file));
    const text = transfer.getData("text/plain");
    if (text) this.set(name, () => text);
  }

  #onPaste(event) {
    if (document.querySelector("dialog[open]")) return;
    const { files } = event.clipboardData;
    const text = event.clipboardData.getData("text/plain");
    const typing = event.target.closest?.("input, textarea");
    if (files.length ? typing && text : !text || (typing && text.length < LONG_PASTE)) return;
    event.preventDefault();
    this.#take(event.clipboardData, "Pasted text");
  }

  #onDrop(event) {
    $("drop-here").hidden = true;
    const { files } = event.dataTransfer;
    if (!holdsText(event) || (!files.length && event.target.closest("textarea"))) return;
    event.preventDefault();
    if (!document.querySelector("dialog[open]")) this.#take(event.dataTransfer, "Dropped text");
  }
}

function holdsText(event) {
  return event.dataTransfer?.types.some((type) => type === "Files" || type === "text/plain");
}

async function readClipboard() {
  try {
    return await navigator.clipboard.readText();
  } catch {
    throw new Error("The browser does not let this page read the clipboard: press Ctrl+V (or ⌘V) instead.");
  }
}
