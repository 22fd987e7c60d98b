// Drives a real OpenCode: a person's part (prompts, approvals, abort, deletion) over its API, the model's part by a stand-in.
//
// It runs on a test host as root, outside of any unit, and starts OpenCode as the main process of opencode-v2.service, so that
// the supervisor accepts it. What the model sees is what OpenCode's own tool machinery made of the plugin's results. What
// happened goes to a file, a line of JSON each, as the smoke's does.

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { appendFileSync, chownSync, mkdirSync, readFileSync, readdirSync, statSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { pathToFileURL } from 'node:url';

import { check } from '../plugin/schema.js';
import { TOOLS } from '../plugin/tools.js';
import { Model } from './model.js';

/** How long anything may take: OpenCode's first answer takes seconds, on a busy machine many. Chosen. */
const SOON = 120_000;
const LOOK_AGAIN = 100;
const ACCOUNT = 1000;
const SERVER = 'opencode-v2.service';
const SLICE = '/sys/fs/cgroup/opencode.slice/opencode-pty.slice';
const BASE = 'http://127.0.0.1:4096';

const plan = JSON.parse(readFileSync(process.argv[2], 'utf8'));
const model = new Model();
const scenarios = [];
const scenario = (name, body) => scenarios.push({ name: `OpenCode: ${name}`, body });

/** A session of OpenCode with a script of the model in it. */
class Conversation {
  static #serial = 0;

  static async open() {
    const conversation = new Conversation();
    ({ id: conversation.id } = await api('POST', '/session', { title: 'a test' }));
    return conversation;
  }

  /** Has the model go through these steps; doesn't wait. */
  async prompt(...steps) {
    Conversation.#serial += 1;
    const name = `s${Conversation.#serial}`;
    model.script(name, steps);
    await api('POST', `/session/${this.id}/prompt_async`, { parts: [{ type: 'text', text: `script:${name}` }] });
    return name;
  }

  /** The same, and waits until the model has said its last word; gives this prompt's tool calls. */
  async run(...steps) {
    const name = await this.prompt(...steps);
    // A session that has taken a prompt is not busy with it at once.
    await until('the last word', () => model.finished.has(name));
    await this.idle();
    return this.calls(name);
  }

  async idle() {
    await until('the session to be idle', async () => {
      const status = await api('GET', '/session/status');
      return status[this.id] === undefined || status[this.id].type === 'idle';
    });
  }

  /** The tool calls since the prompt with this script: the tool's name and OpenCode's record of what became of it. */
  async calls(name) {
    const messages = await api('GET', `/session/${this.id}/message`);
    const start = messages.findIndex(({ parts }) => parts.some((part) => part.text === `script:${name}`));
    assert.notEqual(start, -1, `the prompt ${name} is not in the session`);
    const parts = messages.slice(start).flatMap((message) => message.parts);
    return parts.filter(({ type }) => type === 'tool').map(({ tool, state }) => ({ tool, ...state }));
  }

  /** The question that waits for an answer in this session. */
  question() {
    return until('a question', async () => (await api('GET', '/permission')).find(({ sessionID }) => sessionID === this.id));
  }

  delete() {
    return api('DELETE', `/session/${this.id}`);
  }

  abort() {
    return api('POST', `/session/${this.id}/abort`);
  }
}

const answer = (question, reply) => api('POST', `/permission/${question.id}/reply`, { reply });

/** The result of a call that went well, as the schema says it must be. */
function result(call) {
  assert.equal(call.status, 'completed', JSON.stringify(call).slice(0, 2_000));
  const value = JSON.parse(call.output);
  check(TOOLS.find(({ name }) => name === call.tool).output, value);
  return value;
}

const step = (name, args) => () => [{ name, args }];
const onFirst = (name, args) => (results) => [{ name, args: { id: results[0].id, ...args } }];

scenario('spawn, write, read, wait and kill go through its own tool machinery, allowed once', async () => {
  const talk = await Conversation.open();
  const name = await talk.prompt(
    step('pty_spawn', { command: ['sh', '-c', 'echo ready; while read line; do echo "got $line"; done'], runtime: 60 }),
    onFirst('pty_write', { data: 'h\\u00e4llo\\r' }),
    onFirst('pty_wait', { until: 'output', cursor: 0, literal: 'got hällo' }),
    onFirst('pty_read', { regex: '^got (.*)$' }),
    step('pty_list', {}),
    onFirst('pty_kill', {}),
  );
  const question = await talk.question();
  const { dev, ino } = statSync(plan.workspace);
  assert.equal(question.permission, 'pty_spawn');
  assert.ok(question.patterns[0].startsWith(`${plan.workspace} (${dev}:${ino}): `), question.patterns[0]);
  assert.match(question.metadata.file, /^\/(usr\/)?bin\/sh$/);
  assert.equal(units().length, 0, 'nothing runs before the answer');
  await answer(question, 'once');
  await talk.idle();
  const calls = await talk.calls(name);
  assert.deepEqual(calls.map(({ tool }) => tool), ['pty_spawn', 'pty_write', 'pty_wait', 'pty_read', 'pty_list', 'pty_kill']);
  const [spawned, written, waited, read, listed, killed] = calls.map(result);
  assert.equal(written.bytes, 7);
  assert.equal(waited.reason, 'output');
  assert.equal(read.text, 'got hällo');
  assert.deepEqual(listed.terminals.map(({ id }) => id), [spawned.id]);
  assert.equal(killed.exit.result, 'stopped');
  await nothingRuns();
});

scenario('what the model is told of the tools is the schema: required arguments, and which may be left out', async () => {
  const offered = model.requests.find(({ tools }) => tools?.length > 0).tools.map((tool) => tool.function);
  for (const { name, input } of TOOLS) {
    const tool = offered.find((known) => known.name === name);
    assert.ok(tool, `${name} is not offered`);
    assert.deepEqual(tool.parameters.required ?? [], input.required, name);
    assert.deepEqual(Object.keys(tool.parameters.properties ?? {}), Object.keys(input.properties), name);
  }
});

scenario('allowed always is for exactly that command in that directory', async () => {
  const talk = await Conversation.open();
  const spawn = (...command) => step('pty_spawn', { command });
  const first = await talk.prompt(spawn('sh', '-c', 'echo "*"'));
  await answer(await talk.question(), 'always');
  await talk.idle();
  result((await talk.calls(first))[0]);
  // Not asked again, or this would never be idle.
  result((await talk.run(spawn('sh', '-c', 'echo "*"')))[0]);
  const other = await talk.prompt(spawn('sh', '-c', 'echo "anything"'));
  await answer(await talk.question(), 'reject');
  await talk.idle();
  assert.equal((await talk.calls(other))[0].status, 'error');
  await nothingRuns();
});

scenario('rejected means that nothing starts and the model is stopped', async () => {
  const talk = await Conversation.open();
  const before = starts();
  const name = await talk.prompt(step('pty_spawn', { command: ['touch', 'rejected'] }), step('pty_list', {}));
  await answer(await talk.question(), 'reject');
  await talk.idle();
  const calls = await talk.calls(name);
  assert.deepEqual(calls.map(({ tool, status }) => [tool, status]), [['pty_spawn', 'error']]);
  assert.match(calls[0].error, /reject/i);
  assert.equal(starts(), before, 'no unit was ever started');
  assert.ok(!readdirSync(plan.workspace).includes('rejected'));
});

scenario('aborted while it is asked means that nothing starts', async () => {
  const talk = await Conversation.open();
  const before = starts();
  const name = await talk.prompt(step('pty_spawn', { command: ['sh', '-c', 'echo aborted'] }));
  await talk.question();
  await talk.abort();
  await talk.idle();
  assert.notEqual((await talk.calls(name))[0].status, 'completed');
  assert.equal(starts(), before, 'no unit was ever started');
});

scenario('aborted while it waits ends the wait, not the terminal', async () => {
  const talk = await Conversation.open();
  const name = await talk.prompt(
    step('pty_spawn', { command: ['sleep', '300'] }),
    onFirst('pty_wait', { until: 'exit', timeout: 300 }),
  );
  await answer(await talk.question(), 'once');
  await until('the wait', async () => (await talk.calls(name))[1]?.status === 'running');
  await talk.abort();
  await talk.idle();
  assert.notEqual((await talk.calls(name))[1].status, 'completed');
  assert.equal(units().length, 1);
  const [listed] = (await talk.run(step('pty_list', {}))).map(result);
  assert.equal(listed.terminals[0].running, true);
  const [, killed] = (await talk.run(step('pty_list', {}), (results) => [{ name: 'pty_kill', args: { id: results[0].terminals[0].id } }])).map(result);
  assert.equal(killed.exit.stopped, true);
  await nothingRuns();
});

scenario('a deleted session ends its terminals, in mid-call and with what left its group', async () => {
  const talk = await Conversation.open();
  const name = await talk.prompt(
    step('pty_spawn', { command: ['sh', '-c', 'trap "" HUP TERM; (setsid sleep 300 &); echo deep; sleep 300'] }),
    onFirst('pty_wait', { until: 'exit', timeout: 300 }),
  );
  await answer(await talk.question(), 'once');
  await until('the wait', async () => (await talk.calls(name))[1]?.status === 'running');
  assert.equal(units().length, 1);
  await talk.delete();
  await nothingRuns();
});

scenario('deleted while it is asked means that nothing starts', async () => {
  const talk = await Conversation.open();
  const before = starts();
  await talk.prompt(step('pty_spawn', { command: ['sh', '-c', 'echo deleted'] }));
  const question = await talk.question();
  await talk.delete();
  await answer(question, 'once').catch(() => {}); // It may be gone with its session.
  // Whatever was begun by then would show in a later session's time.
  const other = await Conversation.open();
  const again = await other.prompt(step('pty_spawn', { command: ['true'] }), onFirst('pty_wait', { until: 'exit' }));
  await answer(await other.question(), 'once');
  await other.idle();
  assert.equal(result((await other.calls(again))[1]).exit.code, 0);
  assert.equal(starts(), before + 1, 'only the later one was started');
  await nothingRuns();
});

scenario('a terminal is its own session\'s', async () => {
  const mine = await Conversation.open();
  const name = await mine.prompt(step('pty_spawn', { command: ['sleep', '300'] }));
  await answer(await mine.question(), 'once');
  await mine.idle();
  const { id } = result((await mine.calls(name))[0]);
  const other = await Conversation.open();
  const [read, listed] = await other.run(step('pty_read', { id }), step('pty_list', {}));
  assert.equal(read.status, 'error');
  assert.match(read.error, /unknown-terminal/);
  assert.deepEqual(result(listed).terminals, []);
  await mine.delete();
  await nothingRuns();
});

scenario('the session is told when a terminal ends by itself', async () => {
  const talk = await Conversation.open();
  await talk.prompt(step('pty_spawn', { command: ['sh', '-c', 'sleep 1; exit 5'], notify: true }));
  await answer(await talk.question(), 'once');
  await until('the notice', async () => {
    const messages = await api('GET', `/session/${talk.id}/message`);
    return messages.some(({ parts }) => parts.some(({ text }) => /has ended: exit code 5/.test(text ?? '')));
  });
  await talk.idle();
});

scenario('a terminal has nothing of the server\'s environment, and wrong arguments are an error', async () => {
  const talk = await Conversation.open();
  const name = await talk.prompt(
    step('pty_spawn', { command: ['env'] }),
    onFirst('pty_wait', { until: 'exit' }),
    onFirst('pty_read', {}),
    onFirst('pty_read', { cursor: -1 }),
    step('pty_spawn', { command: 'env' }),
  );
  await answer(await talk.question(), 'once');
  await talk.idle();
  const calls = await talk.calls(name);
  const names = result(calls[2]).text.trim().split('\r\n').map((line) => line.split('=')[0]).sort();
  assert.deepEqual(names, ['HOME', 'LANG', 'LOGNAME', 'PATH', 'SHELL', 'TERM', 'USER']);
  for (const call of calls.slice(3)) {
    assert.equal(call.status, 'error');
    assert.match(call.error, /bad-input/);
  }
});

scenario('a server that is stopped leaves no terminal, though it skips dispose', async () => {
  const talk = await Conversation.open();
  await talk.prompt(step('pty_spawn', { command: ['sleep', '300'] }));
  await answer(await talk.question(), 'once');
  await talk.idle();
  assert.equal(units().length, 1);
  execFileSync('systemctl', ['stop', SERVER]);
  await nothingRuns();
});

/** The cgroups of terminals. */
function units() {
  try {
    return readdirSync(SLICE).filter((name) => /^opencode-pty-[0-9a-f]{32}\.service$/.test(name));
  } catch (error) {
    if (error.code === 'ENOENT') return [];
    throw error;
  }
}

const nothingRuns = () => until('no terminal to run', async () => units().length === 0);

/** How many units of terminals the manager has ever started. */
function starts() {
  // The journal writes down what it is told when it gets to it.
  execFileSync('journalctl', ['--sync']);
  const text = execFileSync('journalctl', ['--boot', '--no-pager', '--output=cat', '_PID=1', '--grep=^Start(ing|ed) opencode-pty-[0-9a-f]{32}\\.service'], {
    encoding: 'utf8',
    stdio: ['ignore', 'pipe', 'ignore'],
  });
  return new Set(text.match(/opencode-pty-[0-9a-f]{32}/g)).size;
}

/** What `look` gives once that is something. */
async function until(what, look) {
  const deadline = performance.now() + SOON;
  for (;;) {
    const found = await look();
    if (found) return found;
    if (performance.now() > deadline) throw new Error(`waited ${SOON} ms for ${what}`);
    await new Promise((resolve) => setTimeout(resolve, LOOK_AGAIN));
  }
}

async function api(method, path, body, time = SOON) {
  const url = new URL(path, BASE);
  url.searchParams.set('directory', plan.workspace);
  const response = await fetch(url, {
    method,
    headers: { 'content-type': 'application/json' },
    body: body === undefined ? undefined : JSON.stringify(body),
    signal: AbortSignal.timeout(time),
  });
  const text = await response.text();
  if (!response.ok) throw new Error(`${method} ${path}: ${response.status} ${text.slice(0, 500)}`);
  if (text === '') return null;
  // An unknown route answers 200 with a page.
  if (!response.headers.get('content-type')?.includes('json')) throw new Error(`${method} ${path}: no such route`);
  return JSON.parse(text);
}

/** Configures OpenCode: the plugin from outside the folders that plugins load from by themselves, and the stand-in. */
function configure(baseURL) {
  const limit = { context: 100_000, output: 10_000 };
  const config = {
    plugin: [pathToFileURL(join(plan.directory, 'plugin', 'index.js')).href],
    model: 'stand-in/script',
    small_model: 'stand-in/script',
    share: 'disabled',
    autoupdate: false,
    permission: { pty_spawn: 'ask' },
    provider: {
      'stand-in': {
        npm: '@ai-sdk/openai-compatible',
        name: 'Stand-in',
        options: { baseURL, apiKey: 'none' },
        models: { script: { name: 'script', tool_call: true, limit } },
      },
    },
  };
  write(join(plan.config, 'opencode.json'), config);
  // In each of its folders OpenCode installs `@opencode-ai/plugin` unless it was, and without a network tries for a minute and a
  // half before the first prompt. The plugin doesn't import it.
  const dependencies = { '@opencode-ai/plugin': plan.version };
  for (const folder of [plan.config, '/home/byk/.opencode']) {
    mkdirSync(join(folder, 'node_modules'), { recursive: true });
    write(join(folder, 'package.json'), { dependencies });
    write(join(folder, 'package-lock.json'), { lockfileVersion: 3, packages: { '': { dependencies } } });
  }
}

function write(file, value) {
  mkdirSync(dirname(file), { recursive: true });
  writeFileSync(file, JSON.stringify(value));
  chownSync(file, ACCOUNT, ACCOUNT);
}

async function main() {
  const report = (line) => appendFileSync(plan.results, `${JSON.stringify(line)}\n`);
  configure(await model.listen());
  execFileSync('systemctl', ['restart', SERVER]);
  // The very first request may be lost while it starts.
  const { version } = await until('OpenCode to answer', () => api('GET', '/global/health', undefined, 2_000).catch(() => null));
  assert.equal(version, plan.version);
  let failed = 0;
  for (const { name, body } of scenarios) {
    if (plan.only && !name.includes(plan.only)) continue;
    const started = performance.now();
    let error = null;
    try {
      await body();
    } catch (caught) {
      error = `${caught.stack}`;
      failed += 1;
    }
    report({ scenario: name, ok: error === null, ms: Math.round(performance.now() - started), error, notes: [] });
  }
  await model.close();
  report({ done: true, failed });
  process.exit(failed === 0 ? 0 : 1);
}

await main();
