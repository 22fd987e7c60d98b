// A stand-in for the model: an OpenAI-compatible endpoint on the loopback that streams what a script says.
//
// A script is a list of steps, and a conversation is as far as it has tool results since its last user message that names the
// script (`script:NAME`). A step is a function of those results and gives the calls to make, or the text that ends the turn.

import { createServer } from 'node:http';

/** Most bytes of a request. Chosen: OpenCode's own prompt and tools are some tens of KiB. */
const REQUEST_BYTES_MAX = 16 << 20;

export class Model {
  requests = [];
  /** The scripts whose last word has been said. */
  finished = new Set();
  #scripts = new Map();
  #server = createServer((request, response) => this.#answer(request, response));
  #serial = 0;

  /** Listens; gives the base URL. */
  async listen() {
    await new Promise((resolve) => this.#server.listen(0, '127.0.0.1', resolve));
    return `http://127.0.0.1:${this.#server.address().port}/v1`;
  }

  close() {
    this.#server.closeAllConnections();
    return new Promise((resolve) => this.#server.close(resolve));
  }

  /** Each step: `(results) => [{ name, args }] | 'text'`. */
  script(name, steps) {
    this.#scripts.set(name, steps);
  }

  async #answer(request, response) {
    try {
      const body = JSON.parse(await readAll(request));
      this.requests.push(body);
      const step = this.#step(body);
      response.writeHead(200, { 'content-type': 'text/event-stream' });
      for (const delta of this.#deltas(step)) response.write(`data: ${JSON.stringify(delta)}\n\n`);
      response.end('data: [DONE]\n\n');
    } catch (error) {
      response.writeHead(500, { 'content-type': 'application/json' });
      response.end(JSON.stringify({ error: { message: String(error) } }));
    }
  }

  #step({ messages, tools }) {
    // Asked for a title, or anything else that isn't a turn.
    if (!tools?.length) return 'A title';
    const last = messages.findLastIndex((message) => message.role === 'user' && /script:/.test(text(message)));
    if (last === -1) return 'Nothing to do.';
    const [, name] = /script:([a-z0-9-]+)/.exec(text(messages[last]));
    const after = messages.slice(last + 1);
    const results = after.filter(({ role }) => role === 'tool').map((message) => parsed(text(message)));
    const turns = after.filter(({ role, tool_calls: calls }) => role === 'assistant' && calls?.length > 0).length;
    const steps = this.#scripts.get(name) ?? [];
    if (turns < steps.length) return steps[turns](results);
    this.finished.add(name);
    return 'Done.';
  }

  *#deltas(step) {
    const chunk = (delta, reason = null) => ({
      id: `chatcmpl-${this.#serial}`,
      object: 'chat.completion.chunk',
      created: 1,
      model: 'script',
      choices: [{ index: 0, delta, finish_reason: reason }],
      ...(reason === null ? {} : { usage: { prompt_tokens: 1, completion_tokens: 1, total_tokens: 2 } }),
    });
    if (typeof step === 'string') {
      yield chunk({ role: 'assistant', content: step });
      yield chunk({}, 'stop');
      return;
    }
    for (const [index, { name, args }] of step.entries()) {
      this.#serial += 1;
      const head = { index, id: `call_${this.#serial}`, type: 'function', function: { name, arguments: '' } };
      yield chunk({ role: 'assistant', tool_calls: [head] });
      // In two pieces, as real ones come.
      const words = JSON.stringify(args);
      for (const piece of [words.slice(0, 5), words.slice(5)]) {
        yield chunk({ tool_calls: [{ index, function: { arguments: piece } }] });
      }
    }
    yield chunk({}, 'tool_calls');
  }
}

async function readAll(request) {
  const chunks = [];
  let bytes = 0;
  for await (const chunk of request) {
    bytes += chunk.length;
    if (bytes > REQUEST_BYTES_MAX) throw new Error('the request is too long');
    chunks.push(chunk);
  }
  return Buffer.concat(chunks).toString();
}

function text({ content }) {
  if (typeof content === 'string') return content;
  return (content ?? []).map((part) => part.text ?? '').join('');
}

function parsed(result) {
  try {
    return JSON.parse(result);
  } catch {
    return result;
  }
}
