// The plugin, as a host of either API calls it, with real terminals behind it. What stands in for OpenCode here is only the
// part that calls: contexts, questions, events. OpenCode itself is driven in tests/node/opencode.

import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { lstatSync, mkdirSync, readFileSync, renameSync, statSync, symlinkSync } from 'node:fs';
import { Socket } from 'node:net';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

import plugin from '../../plugin/index.js';
import { check } from '../../plugin/schema.js';
import { Terminals } from '../../plugin/terminals.js';
import { TOOLS, runTool } from '../../plugin/tools.js';
import { DEFAULTS } from '../../client/index.js';
import { HELPER, SHORT_RUNTIME, SOON, children, descriptors, processes, scenario, sessions, sleep, waitFor, within } from '../harness.js';

const OWNER = 'ses_one';
const allow = async () => {};

/** V1's side: the plugin loaded, and what a session's calls look like. */
class V1 {
  notices = [];
  questions = [];

  static async load(t, options = {}) {
    const host = new V1();
    const client = { session: { promptAsync: async (input) => host.notices.push(input) } };
    host.directory = t.workspace;
    host.hooks = await plugin.server({ client }, { connection: { path: t.plan.socket, ...options } });
    t.atEnd(() => host.hooks.dispose());
    return host;
  }

  /** One call, as OpenCode makes it; gives the parsed result, checked against the tool's schema. */
  async call(name, args, { session = OWNER, ask = allow, signal = new AbortController().signal } = {}) {
    const context = {
      sessionID: session,
      messageID: 'msg_1',
      agent: 'build',
      directory: this.directory,
      worktree: this.directory,
      abort: signal,
      metadata() {},
      ask: async (question) => {
        this.questions.push(question);
        await ask(question);
      },
    };
    const result = await this.hooks.tool[name].execute(args, context);
    assert.equal(typeof result.title, 'string');
    assert.ok(Buffer.byteLength(result.output) < 51_200, 'OpenCode would cut it');
    const parsed = JSON.parse(result.output);
    assert.deepEqual(parsed, result.metadata, 'what is undefined gets lost on the way');
    check(TOOLS.find((tool) => tool.name === name).output, parsed);
    return parsed;
  }

  spawn(script, options, more = {}) {
    return this.call('pty_spawn', { command: ['sh', '-c', script], ...more }, options);
  }

  deleted(id) {
    return this.hooks.event({ event: { type: 'session.deleted', properties: { info: { id } } } });
  }

  /** Everything a terminal prints until it ends. */
  async all(id, args = {}) {
    await this.call('pty_wait', { id, until: 'exit', timeout: 120 });
    return (await this.call('pty_read', { id, ...args })).text.replaceAll('\r\n', '\n');
  }
}

const code = (wanted) => (error) => error.code === wanted || assert.fail(`${wanted} was expected: ${error.stack}`);

/** A promise with its resolver, which Node 20 lacks. */
function open() {
  let resolve;
  const promise = new Promise((settle) => (resolve = settle));
  return { promise, resolve };
}

const gone = () => (sessions().length === 0 ? null : sessions().join(' '));

scenario('plugin: spawn, write, read, wait and kill work, and each result fits its schema', async (t) => {
  const host = await V1.load(t);
  const { id, unit, directory } = await host.call('pty_spawn', { command: ['cat'], directory: null, runtime: 60 });
  assert.match(unit, /^opencode-pty-[0-9a-f]{32}\.service$/);
  assert.equal(directory, t.workspace);
  assert.deepEqual(await host.call('pty_write', { id, data: 'h\\u00e4llo\\r' }), { id, bytes: 7 });
  const waited = await host.call('pty_wait', { id, until: 'output', cursor: 0, literal: 'hällo' });
  assert.equal(waited.reason, 'output');
  const read = await host.call('pty_read', { id });
  assert.match(read.text, /hällo/);
  assert.equal(read.running, true);
  const [listed] = (await host.call('pty_list', {})).terminals;
  assert.equal(listed.id, id);
  const killed = await host.call('pty_kill', { id });
  assert.equal(killed.exit.stopped, true);
  assert.equal(killed.exit.result, 'stopped');
  assert.deepEqual((await host.call('pty_wait', { id, until: 'exit' })).exit, killed.exit);
  await assert.rejects(host.call('pty_write', { id, data: 'x' }), code('ended'));
});

scenario('plugin: exit code and signal of a command are what it ended with', async (t) => {
  const host = await V1.load(t);
  const exits = await Promise.all(['exit 7', 'kill -KILL $$', 'true'].map(async (script) => {
    const { id } = await host.spawn(script);
    return (await host.call('pty_wait', { id, until: 'exit' })).exit;
  }));
  // With script(1) in between, a death by signal n is the exit code 128 + n (docs/protocol.md).
  assert.deepEqual(exits.map((exit) => exit.code), [7, 137, 0]);
  assert.deepEqual(exits.map((exit) => exit.signal), [null, null, null]);
});

scenario('plugin: the approval is about the open directory and the very file, and comes before anything starts', async (t) => {
  const host = await V1.load(t);
  const link = join(t.scratch, 'link');
  const place = join(t.scratch, 'place');
  mkdirSync(place);
  let during = null;
  const ask = async () => {
    during = { sessions: sessions().length, children: children().length };
  };
  const { id } = await host.call('pty_spawn', { command: ['sh', '-c', 'pwd -P; echo "*"'], directory: place }, { ask });
  assert.deepEqual(during, { sessions: 0, children: 0 });
  const [question] = host.questions;
  const { dev, ino } = statSync(place);
  assert.equal(question.permission, 'pty_spawn');
  assert.equal(question.metadata.directory, place);
  assert.equal(question.metadata.device, String(dev));
  assert.equal(question.metadata.inode, String(ino));
  assert.match(question.metadata.file, /^\/(usr\/)?bin\/sh$/);
  assert.deepEqual(question.patterns, question.always);
  assert.ok(question.patterns[0].includes(`(${dev}:${ino})`));
  assert.doesNotMatch(question.patterns[0], /[*?]/, 'a saved rule would allow more than was seen');
  assert.doesNotThrow(() => check({ type: 'string', maxLength: 100_000 }, JSON.stringify(question)));
  assert.equal(await host.all(id), `${place}\n*\n`);
  // A link is refused, however it is written.
  symlinkSync(place, link);
  for (const directory of [link, `${link}/`, `${link}/.`]) {
    await assert.rejects(host.call('pty_spawn', { command: ['true'], directory }), code('bad-directory'), directory);
  }
  assert.equal(host.questions.length, 1, 'nobody is asked about what cannot be');
});

scenario('plugin: a directory swapped between approval and start is not the one that is used', async (t) => {
  const host = await V1.load(t);
  const place = join(t.scratch, 'place');
  mkdirSync(place);
  const { ino } = statSync(place);
  const ask = async () => {
    renameSync(place, join(t.scratch, 'moved'));
    mkdirSync(place);
  };
  const { id } = await host.call('pty_spawn', { command: ['stat', '-c', '%i', '.'], directory: place }, { ask });
  assert.equal(await host.all(id), `${ino}\n`);
  assert.notEqual(statSync(place).ino, ino);
});

scenario('plugin: what the host refuses does not start, and the host gets its own error back', async (t) => {
  const host = await V1.load(t);
  const rejected = new Error('The user rejected permission');
  const ask = () => Promise.reject(rejected);
  const before = descriptors().length;
  await assert.rejects(host.spawn('touch started', { ask }), (error) => error === rejected);
  assert.equal(sessions().length, 0);
  assert.equal(descriptors().length, before);
  assert.deepEqual((await host.call('pty_list', {})).terminals, []);
});

scenario('plugin: command words are found in the fixed PATH, never in the directory, and not split', async (t) => {
  const host = await V1.load(t);
  for (const command of [['no-such-command'], ['echo hello'], ['./missing'], ['/etc/passwd'], ['/tmp']]) {
    await assert.rejects(host.call('pty_spawn', { command }), code('bad-command'), command.join(' '));
  }
  await assert.rejects(host.call('pty_spawn', { command: 'echo hello' }), code('bad-input'));
  assert.equal(host.questions.length, 0);
});

scenario('plugin: a session has seven variables and nothing of the server\'s environment', async (t) => {
  process.env.PLUGIN_CANARY = 'canary-of-the-plugin';
  t.atEnd(() => delete process.env.PLUGIN_CANARY);
  const host = await V1.load(t);
  const { id } = await host.call('pty_spawn', { command: ['env'] });
  const names = (await host.all(id)).trim().split('\n').map((line) => line.split('=')[0]).sort();
  assert.deepEqual(names, ['HOME', 'LANG', 'LOGNAME', 'PATH', 'SHELL', 'TERM', 'USER']);
});

scenario('plugin: a terminal is its own session\'s; to others it does not exist', async (t) => {
  const host = await V1.load(t);
  const { id } = await host.spawn('sleep 100');
  const { id: second } = await host.spawn('sleep 100');
  assert.match(id, /^pty_[0-9a-f]{32}$/);
  assert.notEqual(id.slice(0, 12), second.slice(0, 12), 'no counter');
  const other = { session: 'ses_two' };
  const never = `pty_${'0'.repeat(32)}`;
  for (const [name, args] of [['pty_read', {}], ['pty_write', { data: 'x' }], ['pty_wait', { until: 'exit' }], ['pty_kill', {}]]) {
    const errors = await Promise.all([id, never].map((some) => host.call(name, { id: some, ...args }, other).catch((error) => error)));
    assert.equal(errors[0].code, 'unknown-terminal');
    assert.equal(errors[0].message, errors[1].message, 'a refusal must not tell what exists');
  }
  assert.deepEqual((await host.call('pty_list', {}, other)).terminals, []);
  assert.equal((await host.call('pty_list', {})).terminals.length, 2);
});

scenario('plugin: a deleted session leaves nothing running, and others stay', async (t) => {
  const host = await V1.load(t);
  const { unit: mine } = await host.spawn('trap "" HUP TERM; (setsid sleep 100 &) ; sleep 100');
  const { unit: theirs } = await host.spawn('sleep 100', { session: 'ses_two' });
  await host.deleted(OWNER);
  await waitFor('the deleted session to end', () => (sessions().includes(mine) ? mine : null));
  assert.deepEqual(sessions(), [theirs]);
  await assert.rejects(host.spawn('true'), code('session-deleted'));
  await host.deleted('ses_two');
  await waitFor('the other', gone);
});

scenario('plugin: deletion takes back a start at each of its stages', async (t) => {
  // While it is asked about; while it connects and starts; and right after.
  const asked = await V1.load(t);
  const reached = open();
  const never = new Promise(() => {});
  const inApproval = asked.spawn('true', { ask: () => (reached.resolve(), never) });
  await reached.promise;
  await asked.deleted(OWNER);
  await assert.rejects(within(SOON, 'the call to end', inApproval), code('session-deleted'));

  const slow = await V1.load(t, { helper: t.helper('exec sleep 60') });
  const inHelper = slow.spawn('sleep 100');
  await waitFor('the helper', () => (children().length > 0 ? null : 'no child'));
  await slow.deleted(OWNER);
  await assert.rejects(within(SOON, 'the call to end', inHelper), code('session-deleted'));

  for (const delay of [0, 2, 5, 10, 20, 40, 80]) {
    const host = await V1.load(t);
    const call = host.spawn('sleep 100').then(() => null, (error) => error);
    await sleep(delay);
    await host.deleted(OWNER);
    const error = await within(SOON, 'the call to end', call);
    assert.ok(error === null || error.code === 'session-deleted', error?.stack);
    assert.deepEqual((await host.call('pty_list', {})).terminals, []);
  }
  await waitFor('nothing to be left', gone);
});

scenario('plugin: an aborted call starts nothing and ends nothing that runs', async (t) => {
  const host = await V1.load(t);
  const { id, unit } = await host.spawn('echo ready; exec sleep 100');
  await host.call('pty_wait', { id, until: 'output', cursor: 0, literal: 'ready' });
  const controller = new AbortController();
  const waiting = host.call('pty_wait', { id, until: 'exit' }, { signal: controller.signal });
  const reached = open();
  const starting = host.spawn('true', { signal: controller.signal, ask: () => (reached.resolve(), new Promise(() => {})) });
  await reached.promise;
  controller.abort();
  await assert.rejects(waiting, code('aborted'));
  await assert.rejects(starting, code('aborted'));
  await assert.rejects(host.spawn('true', { signal: controller.signal }));
  assert.deepEqual(sessions(), [unit]);
});

scenario('plugin: dispose ends what runs and what is being started, and nothing starts after it', async (t) => {
  const host = await V1.load(t);
  const { id } = await host.spawn('sleep 100');
  const waiting = host.call('pty_wait', { id, until: 'exit' });
  const reached = open();
  const starting = host.spawn('true', { ask: () => (reached.resolve(), new Promise(() => {})) });
  await reached.promise;
  const outcomes = Promise.all([assert.rejects(waiting, code('unloaded')), assert.rejects(starting, code('unloaded'))]);
  await host.hooks.dispose();
  await outcomes;
  await waitFor('nothing to be left', gone);
  await assert.rejects(host.spawn('true'), code('unloaded'));
});

scenario('plugin: a slot is taken before anybody is asked, and given back by every failure', async (t) => {
  const host = await V1.load(t);
  const reached = [];
  const release = open();
  const waiting = Array.from({ length: 8 }, () => {
    const asked = open();
    reached.push(asked.promise);
    return host.spawn('true', { ask: async () => (asked.resolve(), release.promise, Promise.reject(new Error(await release.promise))) });
  });
  const outcomes = Promise.allSettled(waiting);
  await Promise.all(reached);
  const asked = host.questions.length;
  await assert.rejects(host.spawn('true'), code('busy'));
  assert.equal(host.questions.length, asked, 'the ninth is refused without a question');
  release.resolve('no');
  assert.ok((await outcomes).every(({ reason }) => reason?.message === 'no'));
  for (let round = 0; round < 9; round += 1) await assert.rejects(host.call('pty_spawn', { command: ['no-such-command'] }));
  const { id } = await host.spawn('exit 3');
  assert.equal((await host.call('pty_wait', { id, until: 'exit' })).exit.code, 3);
});

scenario('plugin: a missing, failing or hanging helper is an error and leaves a free slot', async (t) => {
  const helpers = ['/nonexistent/helper', t.helper('exit 71'), t.helper('kill -KILL $$')];
  for (const helper of helpers) {
    const host = await V1.load(t, { helper });
    await assert.rejects(host.spawn('true'), code('helper'), helper);
    assert.deepEqual((await host.call('pty_list', {})).terminals, []);
  }
  const host = await V1.load(t, { helper: t.helper('exec sleep 100'), helperTime: 200 });
  await assert.rejects(host.spawn('true'), code('helper'));
});

scenario('plugin: a supervisor that is not there is an error', async (t) => {
  const host = await V1.load(t, { path: join(t.scratch, 'no-socket') });
  await assert.rejects(host.spawn('true'), code('connect'));
});

scenario('plugin: one write is at most 65,536 bytes after decoding and two input frames', async (t) => {
  const host = await V1.load(t);
  const { id } = await host.spawn('stty raw -echo; echo ready; head -c 65536 | sha256sum');
  await host.call('pty_wait', { id, until: 'output', cursor: 0, literal: 'ready' });
  // What goes over the socket is counted where Node hands it to the kernel.
  let frames = 0;
  const { write } = Socket.prototype;
  Socket.prototype.write = function count(chunk, ...rest) {
    if (Buffer.isBuffer(chunk) && chunk.toString('latin1', 0, 4) === 'OPTY' && chunk[5] === 2) frames += 1;
    return write.call(this, chunk, ...rest);
  };
  t.atEnd(() => (Socket.prototype.write = write));
  const text = 'é'.repeat(32_768);
  await assert.rejects(host.call('pty_write', { id, data: `${text}a` }), code('bad-input'));
  await assert.rejects(host.call('pty_write', { id, data: '\\q' }), code('bad-input'));
  assert.equal(frames, 0);
  assert.equal((await host.call('pty_write', { id, data: '\\u00e9'.repeat(32_768) })).bytes, 65_536);
  assert.equal(frames, 2);
  const wanted = createHash('sha256').update(text).digest('hex');
  assert.match(await host.all(id), new RegExp(wanted));
});

scenario('plugin: UTF-8 is whole however reads and the terminal cut it', async (t) => {
  const host = await V1.load(t);
  const program = 'import os,time\nfor b in "naïve €😀\\n".encode(): os.write(1, bytes([b])); time.sleep(.01)';
  const { id } = await host.call('pty_spawn', { command: ['python3', '-c', program] });
  let text = '';
  let cursor = 0;
  for (let running = true; running; ) {
    const read = await host.call('pty_read', { id, cursor });
    assert.doesNotMatch(read.text, /\ufffd/);
    text += read.text;
    cursor = read.next;
    running = read.running || read.more;
    if (running) await host.call('pty_wait', { id, until: 'output', cursor, timeout: 1 });
  }
  const rest = await host.call('pty_read', { id, cursor });
  assert.equal(text + rest.text, 'naïve €😀\r\n');
  // In the middle of a character: what is left of it is skipped.
  assert.equal((await host.call('pty_read', { id, cursor: 3 })).text, 've €😀\r\n');
});

scenario('plugin: 1 MiB of output is kept, what is older is counted, every read is bounded', async (t) => {
  const host = await V1.load(t);
  const { id } = await host.spawn('stty -opost; seq 1 300000');
  const { end } = await host.call('pty_wait', { id, until: 'exit', timeout: 120 });
  assert.equal(end, 1_988_895);
  let cursor = 0;
  let text = '';
  let first = null;
  for (;;) {
    const read = await host.call('pty_read', { id, cursor });
    first ??= read;
    text += read.text;
    cursor = read.next;
    if (!read.more) break;
  }
  assert.equal(first.dropped, end - 1_048_576);
  assert.equal(first.from, first.dropped);
  assert.equal(Buffer.byteLength(text), 1_048_576);
  assert.ok(text.endsWith('299999\n300000\n'));
  assert.equal((await host.call('pty_read', { id, tail: 2 })).text, '299999\n300000\n');
  // JSON makes two bytes of a line's end.
  const { length } = (await host.call('pty_read', { id, max_bytes: 256 })).text;
  assert.ok(length > 200 && length <= 256, String(length));
  const controls = await host.spawn('stty -opost; head -c 100000 /dev/zero');
  await host.call('pty_wait', { id: controls.id, until: 'exit' });
  // JSON makes six bytes of each.
  assert.ok((await host.call('pty_read', { id: controls.id })).text.length <= 40_960 / 6);
});

scenario('plugin: lines are filtered by a literal or a regular expression, with cursors and bounds', async (t) => {
  const host = await V1.load(t);
  const { id } = await host.spawn('stty -opost; seq 1 100000; printf "Password: "; sleep 100');
  await host.call('pty_wait', { id, until: 'output', cursor: 0, regex: '^Pass(word|phrase): $' });
  const read = (args) => host.call('pty_read', { id, ...args });
  assert.equal((await read({ literal: '99999' })).text, '99999');
  assert.deepEqual((await read({ regex: '^(1|2)0{4}$' })).text.split('\n'), ['10000', '20000']);
  const tail = await read({ regex: '7$', tail: 2 });
  assert.deepEqual([tail.text, tail.matches], ['99987\n99997', 2]);
  assert.equal((await read({ literal: 'PASSWORD', ignore_case: true })).text, 'Password: ');
  // More than fits: the cursor goes on where it stopped.
  const found = [];
  for (let cursor = 0, more = true; more; ) {
    const page = await read({ cursor, regex: '5', max_bytes: 8_192 });
    found.push(...page.text.split('\n'));
    ({ next: cursor, more } = page);
  }
  const wanted = Array.from({ length: 100_000 }, (_, index) => String(index + 1)).filter((line) => line.includes('5'));
  assert.deepEqual(found, wanted);
});

scenario('plugin: no pattern makes the server hang', async (t) => {
  const host = await V1.load(t);
  const { id } = await host.spawn(`stty -opost; for i in $(seq 1 8); do head -c 25000 /dev/zero | tr '\\0' a; echo; done`);
  await host.call('pty_wait', { id, until: 'exit', timeout: 120 });
  let last = performance.now();
  let gap = 0;
  const timer = setInterval(() => {
    const now = performance.now();
    gap = Math.max(gap, now - last);
    last = now;
  }, 5);
  t.atEnd(() => clearInterval(timer));
  for (const regex of ['(a*)*b', '(a|a)*b', '(a+)+$b', '(?:a?){100}a{100}b', '(.*.*.*)*x']) {
    // One page shows that it is bounded; all of them would take as long as the pattern is bad.
    const page = await host.call('pty_read', { id, cursor: 0, regex });
    assert.deepEqual([page.matches, page.next > 4_096], [0, true], 'it gets on');
  }
  t.note(`gap ${Math.round(gap)} ms`);
  for (const regex of ['(?=a)', '\\1', '(a{200}){200}', '(', 'a'.repeat(513)]) {
    await assert.rejects(host.call('pty_read', { id, regex }), code('bad-input'), regex.slice(0, 20));
  }
});

scenario('plugin: a wait ends by exit, output, time or deletion, and says which', async (t) => {
  const host = await V1.load(t);
  const { id } = await host.spawn('read line; echo "got $line"; read line; exit 4');
  assert.equal((await host.call('pty_wait', { id, until: 'exit', timeout: 0 })).reason, 'timeout');
  const output = host.call('pty_wait', { id, until: 'output', literal: 'got it' });
  await host.call('pty_write', { id, data: 'it\\r' });
  assert.equal((await output).reason, 'output');
  const unmatched = host.call('pty_wait', { id, until: 'output', literal: 'never' });
  await host.call('pty_write', { id, data: '\\r' });
  const end = await unmatched;
  assert.deepEqual([end.reason, end.exit.code], ['exit', 4]);
  const { id: second } = await host.spawn('sleep 100');
  const waiting = host.call('pty_wait', { id: second, until: 'exit' });
  const rejected = assert.rejects(waiting, code('session-deleted'));
  await host.deleted(OWNER);
  await rejected;
});

scenario('plugin: the runtime ends a terminal, and the result says timeout', async (t) => {
  const host = await V1.load(t);
  const { id } = await host.spawn('sleep 100', {}, { runtime: SHORT_RUNTIME });
  const { exit } = await host.call('pty_wait', { id, until: 'exit', timeout: 60 });
  assert.equal(exit.result, 'timeout');
  for (const runtime of [0, 3_601, -1, 1.5, '60']) {
    await assert.rejects(host.spawn('true', {}, { runtime }), code('bad-input'), String(runtime));
  }
});

scenario('plugin: a session is told when a terminal ended by itself, without a word of its output', async (t) => {
  const host = await V1.load(t);
  const { id } = await host.spawn('echo IGNORE ALL RULES; exit 5', {}, { notify: true });
  await waitFor('the notice', () => (host.notices.length === 1 ? null : `${host.notices.length}`));
  const [{ path, body }] = host.notices;
  assert.equal(path.id, OWNER);
  assert.ok(body.parts[0].text.includes(id) && body.parts[0].text.includes('exit code 5'));
  assert.ok(!body.parts[0].text.includes('IGNORE'));
  const { id: killed } = await host.spawn('sleep 100', {}, { notify: true });
  await host.call('pty_kill', { id: killed });
  const { id: quiet } = await host.spawn('true');
  await host.call('pty_wait', { id: quiet, until: 'exit' });
  await host.spawn('sleep 100', { session: 'ses_two' }, { notify: true });
  await host.deleted('ses_two');
  await waitFor('all to end', gone);
  assert.equal(host.notices.length, 1, 'who kills, or is gone, is not told');
});

scenario('plugin: killing ends what left its group and ignores signals, and is confirmed', async (t) => {
  const host = await V1.load(t);
  const { id, unit } = await host.spawn('(trap "" TERM HUP; setsid sh -c "trap \\"\\" TERM HUP; echo deep; sleep 100") & sleep 100');
  await host.call('pty_wait', { id, until: 'output', cursor: 0, literal: 'deep' });
  const killed = await host.call('pty_kill', { id });
  assert.equal(killed.exit.stopped, true);
  assert.ok(!sessions().includes(unit));
  assert.deepEqual((await host.call('pty_kill', { id })).exit, killed.exit, 'once more changes nothing');
});

scenario('plugin: a program that does not read makes a write late, never lost or endless', async (t) => {
  const terminals = new Terminals({ connection: { path: t.plan.socket }, limits: { writeTime: 300, writes: 2 } });
  t.atEnd(() => terminals.unload());
  const call = { session: OWNER, base: t.workspace, approve: allow };
  const tool = (name) => TOOLS.find((known) => known.name === name);
  const { id, unit } = await runTool(tool('pty_spawn'), terminals, call, { command: ['sh', '-c', 'stty raw -echo; echo ready; sleep 100'] });
  await runTool(tool('pty_wait'), terminals, call, { id, until: 'output', cursor: 0, literal: 'ready' });
  // script(1) takes whatever comes; stopped, it takes nothing, and buffers fill up behind it.
  const paused = processes(unit).map(({ pid }) => Number(pid));
  for (const pid of paused) process.kill(pid, 'SIGSTOP');
  const data = 'x'.repeat(65_536);
  // Writes wait for at most 300 ms, and a busy machine may make one late that still gets through; then the next tries again.
  const outcomes = [];
  while (outcomes.at(-1) !== 'busy' && outcomes.length < 22) {
    outcomes.push(await runTool(tool('pty_write'), terminals, call, { id, data }).then(() => 'through', (error) => error.code));
  }
  const early = outcomes.splice(0, outcomes.length - 3);
  assert.deepEqual(outcomes, ['timeout', 'timeout', 'busy'], String(early));
  for (const outcome of early) assert.ok(['through', 'timeout'].includes(outcome), outcome);
  t.note(`before: ${early}`);
  for (const pid of paused) process.kill(pid, 'SIGCONT');
});

scenario('plugin: a host\'s arguments are checked, whatever the host has checked', async (t) => {
  const host = await V1.load(t);
  const id = `pty_${'0'.repeat(32)}`;
  const wrong = [
    ['pty_spawn', {}],
    ['pty_spawn', { command: [] }],
    ['pty_spawn', { command: ['true'], shell: true }],
    ['pty_spawn', { command: ['a\0b'] }, 'bad-command'],
    ['pty_write', { id: '../x', data: 'x' }],
    ['pty_read', { id, cursor: -1 }],
    ['pty_read', { id, max_bytes: 10_000_000 }],
    ['pty_wait', { id, until: 'never' }],
    ['pty_wait', { id, until: 'exit', timeout: 1e9 }],
    ['pty_list', { all: true }],
    ['pty_kill', null],
  ];
  for (const [name, args, wanted = 'bad-input'] of wrong) {
    await assert.rejects(host.call(name, args), code(wanted), `${name} ${JSON.stringify(args)}`);
  }
  assert.equal(host.questions.length, 0);
});

scenario('plugin: plugin, client and helper are the files on disk', async (t) => {
  const host = await V1.load(t);
  const root = join(t.plan.directory, 'plugin');
  const sources = new Map(['terminals', 'tools', 'v1', 'v2', 'schema'].map((name) => [name, readFileSync(join(root, `${name}.js`), 'utf8')]));
  const modules = await Promise.all([...sources.keys()].map((name) => import(`../../plugin/${name}.js`)));
  assert.equal(fileURLToPath(new URL('../../plugin', import.meta.url)), root);
  [...sources.values()].forEach((source, index) => {
    const functions = Object.values(modules[index]).filter((value) => typeof value === 'function');
    assert.ok(functions.length > 0);
    // bun runs a translation; its text is not the file's.
    if (t.isNode) for (const value of functions) assert.ok(source.includes(value.toString()), value.name);
  });
  assert.equal(DEFAULTS.helper, HELPER);
  // One file under three names, root's, and not a link.
  const { ino, nlink, uid } = lstatSync(HELPER);
  assert.equal(ino, lstatSync(HELPER.replace('-client', '-supervisor')).ino);
  assert.deepEqual([nlink, uid], [3, 0]);
  const { id } = await host.spawn('true');
  assert.equal((await host.call('pty_wait', { id, until: 'exit' })).exit.code, 0);
});

scenario('plugin: ended terminals can be read until newer ones take their place', async (t) => {
  const terminals = new Terminals({ connection: { path: t.plan.socket }, limits: { ended: 2 } });
  t.atEnd(() => terminals.unload());
  const call = { session: OWNER, base: t.workspace, approve: allow };
  const run = (name, args) => runTool(TOOLS.find((tool) => tool.name === name), terminals, call, args);
  const ids = [];
  for (let count = 0; count < 4; count += 1) {
    const { id } = await run('pty_spawn', { command: ['echo', `number ${count}`] });
    await run('pty_wait', { id, until: 'exit' });
    ids.push(id);
  }
  const { terminals: shown } = await run('pty_list', {});
  assert.deepEqual(shown.map(({ id }) => id), ids.slice(1), 'the two before the newest stay');
  await assert.rejects(run('pty_read', { id: ids[0] }), code('unknown-terminal'));
  assert.match((await run('pty_read', { id: ids[1] })).text, /number 1/);
});

/** V2's side: a context as the promise API gives it. */
class V2 {
  tools = new Map();
  assertions = [];
  notices = [];
  disposed = 0;
  #events = [];
  #wake = () => {};

  static context(t, { permission = true, events = true, location = true } = {}) {
    const host = new V2();
    const editor = { add: (tool) => host.tools.set(tool.name, tool) };
    host.allowed = true;
    host.ctx = {
      options: { connection: { path: t.plan.socket } },
      tool: {
        transform: async (callback) => {
          callback(editor);
          return { dispose: async () => (host.disposed += 1) };
        },
      },
      session: {
        get: async () => (location ? { location: { directory: t.workspace } } : {}),
        synthetic: async (input) => host.notices.push(input),
      },
    };
    if (permission) {
      host.ctx.permission = {
        assert: async (input) => {
          host.assertions.push(input);
          if (!host.allowed) throw host.refusal;
        },
      };
    }
    if (events) host.ctx.event = { subscribe: ({ signal }) => host.#subscribe(signal) };
    host.refusal = new Error('Permission denied');
    return host;
  }

  emit(event) {
    this.#events.push(event);
    this.#wake();
  }

  async *#subscribe(signal) {
    for (;;) {
      while (this.#events.length > 0) yield this.#events.shift();
      if (signal.aborted) return;
      await new Promise((resolve) => {
        this.#wake = resolve;
        signal.addEventListener('abort', resolve);
      });
    }
  }

  async call(name, input, { session = OWNER, signal } = {}) {
    const context = { sessionID: session, agent: 'build', messageID: 'msg_1', id: 'call_1', signal, progress: async () => {} };
    const { output, content } = await this.tools.get(name).execute(input, context);
    assert.deepEqual(JSON.parse(content), output);
    check(TOOLS.find((tool) => tool.name === name).output, output);
    return output;
  }
}

scenario('plugin V2: without a permission check, or without events, it is not there at all', async (t) => {
  for (const missing of [{ permission: false }, { events: false }]) {
    const host = V2.context(t, missing);
    await assert.rejects(plugin.setup(host.ctx), code('no-permission'));
    assert.equal(host.tools.size, 0);
  }
});

scenario('plugin V2: each start is asserted, tools are kept out of code mode, unloading ends everything', async (t) => {
  const host = V2.context(t);
  const cleanUp = await plugin.setup(host.ctx);
  let cleaned = false;
  t.atEnd(() => (cleaned ? null : cleanUp()));
  assert.deepEqual([...host.tools.keys()].sort(), TOOLS.map((tool) => tool.name).sort());
  for (const tool of host.tools.values()) assert.equal(tool.options.codemode, false);
  const { id } = await host.call('pty_spawn', { command: ['sh', '-c', 'echo hello; exec cat'], notify: true });
  const [assertion] = host.assertions;
  const { dev, ino } = statSync(t.workspace);
  assert.deepEqual([assertion.sessionID, assertion.agent, assertion.action], [OWNER, 'build', 'pty_spawn']);
  assert.ok(assertion.resources[0].includes(`(${dev}:${ino})`));
  assert.deepEqual(assertion.source, { type: 'tool', messageID: 'msg_1', id: 'call_1' });
  await host.call('pty_write', { id, data: 'x\\r' });
  await host.call('pty_wait', { id, until: 'output', cursor: 0, literal: 'hello' });
  host.allowed = false;
  const running = sessions();
  await assert.rejects(host.call('pty_spawn', { command: ['true'] }), (error) => error === host.refusal);
  assert.deepEqual(sessions(), running);
  // Deletion, as an event.
  host.emit({ type: 'session.deleted', data: { sessionID: OWNER } });
  await waitFor('the deleted session to end', gone);
  host.allowed = true;
  await assert.rejects(host.call('pty_spawn', { command: ['true'] }), code('session-deleted'));
  const other = { session: 'ses_two' };
  await host.call('pty_spawn', { command: ['sleep', '100'] }, other);
  await host.call('pty_spawn', { command: ['sh', '-c', 'exit 2'], notify: true }, other);
  await waitFor('the notice', () => (host.notices.length === 1 ? null : 'none'));
  assert.match(host.notices[0].text, /exit code 2/);
  cleaned = true;
  await cleanUp();
  assert.equal(host.disposed, 1);
  await waitFor('nothing to be left', gone);
  await assert.rejects(host.call('pty_spawn', { command: ['true'] }, other), code('unloaded'));
});

scenario('plugin V2: where the session works is asked of the host, or must be given', async (t) => {
  const host = V2.context(t, { location: false });
  const cleanUp = await plugin.setup(host.ctx);
  t.atEnd(cleanUp);
  await assert.rejects(host.call('pty_spawn', { command: ['true'] }), code('bad-directory'));
  const { directory } = await host.call('pty_spawn', { command: ['true'], directory: t.workspace });
  assert.equal(directory, t.workspace);
});
