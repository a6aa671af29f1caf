/** The server's API, as far as the page needs it. Addresses are relative, so that a prefix of a proxy stays. */

/** A failure in words that a person can act on. `status` is HTTP's, 0 if there was no response. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export class Server {
  /** Sent with each request if it is not empty; lives in memory only. */
  key = "";

  /** The served model: `{id, max_model_len}`, the second undefined if the server does not say. */
  async model() {
    const { data } = await (await this.#call("v1/models")).json();
    if (!data?.length) throw new ServerError("The server serves no model.");
    return data[0];
  }

  /** Whether the server takes requests now. */
  async isReady() {
    return fetch("health", { cache: "no-store" }).then((response) => response.ok, () => false);
  }

  /** The number of tokens of `text`, and the context length of the model if the server says it. */
  async countTokens(model, text, signal) {
    const body = { model, prompt: text, add_special_tokens: false };
    const { count, max_model_len } = await (await this.#call("tokenize", body, signal)).json();
    return { count, limit: max_model_len };
  }

  /** The text of token ids, and that of each of them. */
  async texts(tokens, signal) {
    const body = { tokens, return_token_strs: true };
    const { prompt, token_strs } = await (await this.#call("detokenize", body, signal)).json();
    return { text: prompt, tokens: token_strs };
  }

  /** For each prompt of token ids, the field `selection` of the token after it, without the dimension of tokens. */
  async selections(model, prompts, signal) {
    const body = { model, prompt: prompts, max_tokens: 1, temperature: 0, selection: 1 };
    const { choices } = await (await this.#call("v1/completions", body, signal)).json();
    const flat = ({ positions, weights }) => ({ positions: positions.flat(), weights: weights.flat() });
    return choices.map(({ selection }) => flat(selection));
  }

  /** The chunks of a streamed chat completion as they come; the last ones carry `usage`. */
  async *chat(body, signal) {
    const stream = { stream: true, stream_options: { include_usage: true } };
    const response = await this.#call("v1/chat/completions", { ...body, ...stream }, signal);
    try {
      for await (const data of events(response.body)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ServerError(chunk.error.message ?? "The server failed.", response.status);
        yield chunk;
      }
    } catch (error) {
      if (error instanceof ServerError || error.name === "AbortError") throw error;
      throw new ServerError(`The connection was lost before the answer was complete (${error.message}).`);
    }
    throw new ServerError("The connection ended before the answer was complete.");
  }

  async #call(path, body, signal) {
    const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
    const sent = body && { method: "POST", body: JSON.stringify(body) };
    if (body) headers["Content-Type"] = "application/json";
    const response = await fetch(path, { ...sent, headers, signal, cache: "no-store" }).catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server cannot be reached. Is it running, and is the network up?");
    });
    if (!response.ok) throw await failure(response, this.key !== "");
    return response;
  }
}

/** The error of a response that is not a success. */
async function failure(response, hadKey) {
  const { status } = response;
  const { error, detail } = await response.json().catch(() => ({})); // no JSON: a proxy's page
  const said = String(error?.message ?? detail ?? "");
  const seconds = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  const later = seconds > 0 ? `Try again in ${seconds} ${seconds === 1 ? "second" : "seconds"}.` : "Try again in a moment.";
  const words = {
    401: hadKey ? "The server does not accept this API key." : "This server asks for an API key: enter it in Settings.",
    413: `The request is larger than the server allows. ${said}`,
    429: `The server has no room for another request now. ${later}`,
    502: `The server cannot be reached through its proxy. ${later}`,
    503: `The server takes no requests now: it is starting or shutting down. ${later}`,
    504: `The server took too long to answer. ${later}`,
  };
  return new ServerError((words[status] ?? (said || `The server answered with status ${status}.`)).trim(), status);
}

/** The data of each server-sent event of a body of bytes. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
