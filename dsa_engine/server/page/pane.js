/** The pane of the document: how a document comes in (drop, paste, file picker), and what is shown of it. */

import { Document, readText } from "./document.js";
import { $, counted, say } from "./elements.js";

const LONG_PASTE = 10_000; // characters pasted into the question that are a document

export class DocumentPane {
  document = null;
  #counting = new AbortController();
  #inside = 0; // elements that a dragged thing has entered and not left
  #page;

  /** `page`: `mayChange()`, whether another document may come now; `countTokens(text, signal)`; `afterChange()`. */
  constructor(page) {
    this.#page = page;
    $("toggle-text").addEventListener("click", () => this.#toggleText(!$("document").classList.contains("open")));
    $("remove-document").addEventListener("click", () => this.#remove());
    $("choose-file").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", () => {
      this.#takeFiles([...$("file").files]);
      $("file").value = ""; // so that the same file can be chosen again
    });
    // A page from another machine without TLS has no clipboard to read; Ctrl+V works everywhere.
    $("paste").hidden = !navigator.clipboard?.readText;
    $("paste").addEventListener("click", () => this.set("Pasted text", readClipboard));
    document.addEventListener("paste", (event) => this.#onPaste(event));
    // The whole page takes a drop: a file beside the target must not replace the page.
    document.addEventListener("dragenter", (event) => holdsText(event) && this.#showDrop(this.#inside + 1));
    document.addEventListener("dragleave", (event) => holdsText(event) && this.#showDrop(this.#inside - 1));
    document.addEventListener("dragover", (event) => holdsText(event) && event.preventDefault());
    document.addEventListener("drop", (event) => this.#onDrop(event));
  }

  /** Counts the tokens of the document, if there is one, and shows the counts. */
  async count() {
    this.#counting.abort();
    if (!this.document) return;
    const { name, text, characters } = this.document;
    const { signal } = (this.#counting = new AbortController());
    this.#showCounts(`${counted(characters, "character")}, counting tokens…`);
    let tokens = "tokens not counted";
    let tooLong = false;
    try {
      const { count, limit } = await this.#page.countTokens(text, signal);
      tooLong = limit !== undefined && count >= limit;
      tokens = counted(count, "token") + (tooLong ? `: more than the model’s ${limit.toLocaleString("en")}` : "");
    } catch {
      // The counts say it.
    }
    if (signal.aborted) return;
    this.#showCounts(`${counted(characters, "character")}, ${tokens}`, tooLong);
    say(`Document ${name}: ${$("document-counts").textContent}`);
  }

  /** Takes the text that `read()` gives as the document, or shows why not. */
  async set(name, read) {
    this.#showProblem("");
    let chosen;
    try {
      chosen = new Document(name, await read());
    } catch (error) {
      return this.#showProblem(error.message);
    }
    if (!this.#page.mayChange()) return;
    this.document = chosen;
    this.#show();
    this.count();
    this.#page.afterChange();
  }

  #remove() {
    if (!this.#page.mayChange()) return;
    this.document = null;
    this.count();
    this.#show();
    this.#showCounts("");
    say("The document is removed.");
    $("choose-file").focus();
  }

  #show() {
    const { document: chosen } = this;
    $("document-heading").textContent = chosen?.name ?? "Document";
    $("document-heading").title = chosen?.name ?? "";
    $("drop").hidden = chosen !== null;
    for (const id of ["document-text", "toggle-text", "remove-document"]) $(id).hidden = chosen === null;
    $("document").classList.toggle("filled", chosen !== null);
    this.#toggleText(false);
    if (chosen) chosen.show($("document-text"));
    else $("document-text").replaceChildren();
  }

  /** On a narrow page the document's text is shown only on request. */
  #toggleText(shown) {
    $("document").classList.toggle("open", shown);
    $("toggle-text").setAttribute("aria-expanded", String(shown));
    $("toggle-text").textContent = shown ? "Hide" : "Show";
  }

  #showCounts(text, warning = false) {
    $("document-counts").textContent = text;
    $("document-counts").classList.toggle("warning", warning);
  }

  #showProblem(text) {
    $("document-problem").textContent = text;
    $("document-problem").hidden = !text;
  }

  #takeFiles(files) {
    if (files.length > 1) return this.#showProblem("One document at a time is possible: choose a single file.");
    const [file] = files;
    if (file) this.set(file.name, () => readText(file));
  }

  #onPaste(event) {
    if (document.querySelector("dialog[open]")) return;
    const { files } = event.clipboardData;
    const text = event.clipboardData.getData("text/plain");
    const typing = event.target.closest?.("input, textarea");
    if (files.length ? typing && text : !text || (typing && text.length < LONG_PASTE)) return;
    event.preventDefault();
    if (files.length) this.#takeFiles([...files]);
    else this.set("Pasted text", () => text);
  }

  #onDrop(event) {
    this.#showDrop(0);
    const { files } = event.dataTransfer;
    if (!holdsText(event) || (!files.length && event.target.closest("textarea"))) return;
    event.preventDefault();
    if (document.querySelector("dialog[open]")) return;
    const text = event.dataTransfer.getData("text/plain");
    if (files.length) this.#takeFiles([...files]);
    else if (text) this.set("Dropped text", () => text);
  }

  #showDrop(inside) {
    this.#inside = Math.max(0, inside);
    $("drop-here").hidden = this.#inside === 0;
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
