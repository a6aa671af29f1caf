/** A recorded answer in the place of a server, in the file of `dsa-engine lens`. It has no ids, only their number. */

import { offsetsOf, tokensIn } from "./lens.js";

export class Recorded {
  #data;

  /** `data`: `text` of all `tokens`, of which the first `prompt` are the prompt; `start` and `end` of the document in
   * it; its `name`, the `question`, and the `selection` of the answer's first tokens. */
  constructor(data) {
    this.#data = data;
    [this.name, this.question, this.document] = [data.name, data.question, data.text.slice(data.start, data.end)];
  }

  async countTokens() {
    const { text, tokens, start, end } = this.#data;
    return { count: tokensIn(offsetsOf(text, tokens), start, end - start, 0).length };
  }

  async texts() {
    return this.#data;
  }

  /** See Server; `prompts` differ in length. */
  async selections(model, prompts) {
    const { prompt, selection } = this.#data;
    const recorded = selection.weights[0].length;
    if (prompts.at(-1).length >= prompt + recorded) throw new Error(`Recorded are the first ${recorded} tokens of the answer.`);
    const of = (name, tokens) => selection[name].map((layer) => layer[tokens.length - prompt]);
    return prompts.map((tokens) => ({ positions: of("positions", tokens), weights: of("weights", tokens) }));
  }

  async *chat() {
    const { text, tokens, prompt } = this.#data;
    const content = text.slice(offsetsOf(text, tokens)[prompt]);
    const ids = (count) => Array(count).fill(0);
    yield { prompt_token_ids: ids(prompt), choices: [{ delta: { content }, token_ids: ids(tokens.length - prompt) }] };
  }
}
