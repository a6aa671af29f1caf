/** The document: its text in pieces that a browser lays out only when they are in view, and its counts. */

export const MAX_CHARACTERS = 1_000_000;

/** A text file's content. Throws an Error in words for a person if it is too long or is no text. */
export async function readText(file) {
  if (file.size > 4 * MAX_CHARACTERS) throw new Error(tooLong(file.name));
  const bytes = new Uint8Array(await file.arrayBuffer());
  const utf16 = (bytes[0] === 0xff && bytes[1] === 0xfe && "utf-16le") || (bytes[0] === 0xfe && bytes[1] === 0xff && "utf-16be");
  let text;
  try {
    text = new TextDecoder(utf16 || "utf-8", { fatal: true }).decode(bytes);
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) throw new Error(`“${file.name}” is not a text file in UTF-8. Convert it to plain text first.`);
  return text;
}

export class Document {
  /** Throws an Error in words for a person if the text is empty or too long. */
  constructor(name, text) {
    this.name = name;
    this.text = text.replace(/\r\n?/g, "\n");
    // Code points, as a person counts characters: `length` counts the halves of some.
    this.characters = this.text.length - (this.text.match(/[\ud800-\udbff](?=[\udc00-\udfff])/g)?.length ?? 0);
    if (!this.text.trim()) throw new Error(`“${name}” has no text in it.`);
    if (this.characters > MAX_CHARACTERS) throw new Error(tooLong(name, this.characters));
  }

  /** The first message's content. The form is the one that DeepSeek's models have seen for files. */
  before(question) {
    return `[file name]: ${this.name}\n[file content begin]\n${this.text}\n[file content end]\n${question}`;
  }

  /** The text in pieces, cut at ends of lines; within a line only if it is longer than a piece. */
  pieces() {
    return this.text.match(/[^]{1,4096}(?<=\n)|[^]{1,4096}/gu);
  }
}

function tooLong(name, characters) {
  const has = characters ? ` has ${characters.toLocaleString("en")} characters; it` : "";
  return `“${name}”${has} is too long: at most ${MAX_CHARACTERS.toLocaleString("en")} characters are possible here.`;
}
