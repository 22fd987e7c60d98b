// Scenarios, one after the other, in the main process of opencode-v2.service. See ../README.md for how to add one.
//
// After each of them this process must have the descriptors it had before, no child, and no session; so each can rely on
// it, and none has to check. What happened goes to a file, a line of JSON each, since whoever started us may not be there.

import { execFile } from 'node:child_process';
import { appendFileSync, chmodSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, readlinkSync } from 'node:fs';
import { rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { promisify } from 'node:util';
import { Worker } from 'node:worker_threads';

import { connect, decodeText, openDirectory } from '../client/index.js';

/** How long anything that normally takes milliseconds may take: a busy machine is no failure. Chosen. */
export const SOON = 30_000;
/** What the supervisor allows for a handshake (SPEC 7), in milliseconds: who takes longer is told `timeout`. */
export const HANDSHAKE_TIME = 5_000;
/** A runtime that is soon over, in seconds. Chosen: it begins when the unit is up, and what else a start takes is part of it. */
export const SHORT_RUNTIME = 3;
/** How long one scenario may take. Chosen. */
const SCENARIO_TIME = 120_000;
/** How long after a scenario something of it may still be there: the manager may take ten seconds for a stop. Chosen. */
const LEFT_TIME = 30_000;
/** Between two looks at something that sends no event. */
const LOOK_AGAIN = 20;
/** The helper that is installed. */
export const HELPER = '/usr/local/libexec/opencode-pty-client';

/** In a session's shell: puts the pid of script(1), the unit's main process, into `pid`. */
export const FIND_SCRIPT = `
  pid=$$
  until [ "$(cat /proc/$pid/comm)" = script ]; do set -- $(cat /proc/$pid/stat); pid=$4; done`;

const registry = [];

/**
 * Adds a scenario. The name is the fact it establishes and is a row in the table of docs/plugin.md. `options.skip(t)` may
 * give a reason why there is nothing to establish under this runtime; `options.core` is for the few that are also run against
 * a second supervisor when there is little time.
 */
export function scenario(name, body, options = {}) {
  if (registry.some((known) => known.name === name)) throw new Error(`two scenarios are called '${name}'`);
  registry.push({ name, body, ...options });
}

/** Runs what `plan` asks for and ends the process: 0 if nothing failed. */
export async function main(plan) {
  const report = (line) => appendFileSync(plan.results, `${JSON.stringify(line)}\n`);
  const unhandled = [];
  process.on('unhandledRejection', (error) => unhandled.push(`unhandled: ${describe(error)}`));
  process.on('uncaughtException', (error) => {
    report({ fault: `uncaught: ${describe(error)}` });
    process.exit(1);
  });

  if (plan.stage !== null) {
    const { die } = await import('./die.js');
    await die(new Context(plan), plan.stage, report);
    return;
  }

  const directory = new URL('./scenarios/', import.meta.url);
  for (const file of readdirSync(directory).sort()) {
    if (file.endsWith('.js')) await import(new URL(file, directory).href);
  }
  await warmUp(plan);
  const before = state();
  let failed = 0;
  for (const { name, body, skip, core } of registry) {
    if (plan.only !== null && !name.includes(plan.only)) continue;
    if (plan.core && !core) continue;
    const t = new Context(plan);
    const reason = skip?.(t);
    if (reason) {
      report({ scenario: name, skipped: reason });
      continue;
    }
    const started = performance.now();
    let error = null;
    try {
      await within(SCENARIO_TIME, 'the scenario', body(t));
    } catch (caught) {
      error = describe(caught);
    }
    try {
      await t.end();
      await waitFor('nothing to be left', () => same(state(), before), LEFT_TIME);
    } catch (caught) {
      error = `${error ?? ''}${describe(caught)}`;
    }
    if (unhandled.length > 0) error = [error, ...unhandled.splice(0)].join('\n');
    if (error !== null) failed += 1;
    report({ scenario: name, ok: error === null, ms: Math.round(performance.now() - started), error, notes: t.notes });
  }
  const last = state();
  report({ done: true, failed, version: process.version, bun: process.versions.bun ?? null, descriptors: last.descriptors.length });
  process.exit(failed === 0 ? 0 : 1);
}

/** What a scenario gets. */
export class Context {
  notes = [];
  #scratch = null;
  #clean = [];
  #serial = 0;
  #starting = new Set();

  constructor(plan) {
    this.plan = plan;
  }

  /** `sea`, `node26`, `node20` or `bun`. */
  get runtime() {
    return this.plan.runtime;
  }

  /** Whether it is Node, in whatever form. */
  get isNode() {
    return process.versions.bun === undefined;
  }

  /** The directory that sessions work in when it doesn't matter. */
  get workspace() {
    return this.plan.workspace;
  }

  /** A directory of this scenario's own, removed at its end. */
  get scratch() {
    this.#scratch ??= mkdtempSync(join(this.workspace, 'smoke-'));
    return this.#scratch;
  }

  /** Does something when the scenario has ended, the last first. */
  atEnd(work) {
    this.#clean.push(work);
  }

  /** For the harness. */
  async end() {
    await Promise.all(this.#starting);
    for (const work of this.#clean.reverse()) await work();
    if (this.#scratch !== null) rmSync(this.#scratch, { recursive: true, force: true });
  }

  /** Something measured, for the log. */
  note(text) {
    this.notes.push(text);
  }

  /** A connection to the supervisor under test. */
  connect(options = {}) {
    return connect({ path: this.plan.socket, ...options });
  }

  /**
   * A session that has started, hung up at the end of the scenario at the latest. `options` may have `directory` (a path),
   * `runtime`, `signal`, and everything that `connect` takes.
   */
  start(argv, options = {}) {
    const starting = this.#start(argv, options);
    const settled = starting.catch(() => {}).finally(() => this.#starting.delete(settled));
    this.#starting.add(settled);
    return starting;
  }

  async #start(argv, options) {
    const { directory = this.workspace, runtime = 120, signal, ...rest } = options;
    const connection = await this.connect(rest);
    const handle = await openDirectory(directory);
    const session = await connection.start({ argv, directory: handle, runtime, signal });
    this.atEnd(() => session.close());
    return session;
  }

  /** The same with a shell's script. */
  sh(script, options) {
    return this.start(['/bin/sh', '-c', script], options);
  }

  /** A whole session of a shell's script: what it printed, with `\n` as line end, and how it ended. */
  async run(script, options) {
    const session = await this.sh(script, options);
    const text = await allText(session);
    return { text: text.replaceAll('\r\n', '\n'), exit: await session.exit };
  }

  /** A helper that is a shell's script; `$REAL "$@"` in it is the real one. */
  helper(script) {
    this.#serial += 1;
    const path = join(this.scratch, `helper-${this.#serial}`);
    writeFileSync(path, `#!/bin/sh\nREAL=${HELPER}\n${script}\n`);
    chmodSync(path, 0o755);
    return path;
  }

  /** A helper that is one of `helpers/*.py`, with words of its own before the helper's. */
  pythonHelper(name, ...words) {
    const program = join(this.plan.directory, 'smoke', 'helpers', name);
    return this.helper(`exec /usr/bin/python3 -I -S ${[program, ...words].join(' ')} "$@"`);
  }
}

/** Everything a session prints, as text. */
export async function allText(session) {
  let text = '';
  for await (const piece of decodeText(session.output)) text += piece;
  return text;
}

/** Reads until `wanted` was printed; gives everything that was. */
export async function textUntil(session, wanted) {
  let text = '';
  const read = async () => {
    for await (const piece of decodeText(session.output)) {
      text += piece;
      if (text.includes(wanted)) return text;
    }
    throw new Error(`the session ended before '${wanted}': ${text}`);
  };
  return within(SOON, `'${wanted}'`, read());
}

/** Rejects when it takes longer. */
export async function within(time, what, promise) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`waited ${time} ms for ${what}`)), time);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}

export function sleep(time) {
  return new Promise((resolve) => setTimeout(resolve, time));
}

/** Looks until `look` gives nothing to complain about (null), or else fails with the complaint. */
export async function waitFor(what, look, time = SOON) {
  const deadline = performance.now() + time;
  for (;;) {
    const complaint = look();
    if (complaint === null) return;
    if (performance.now() > deadline) throw new Error(`waited ${time} ms for ${what}: ${complaint}`);
    await sleep(LOOK_AGAIN);
  }
}

/** What bun opens and closes for itself at any time: for its event loops, its random numbers, and copies of its stdout. */
const OWN = / (anon_inode:\[(eventpoll|eventfd|timerfd)\]|\/dev\/urandom|\/proc\/\d+\/statm)$/;

/** The descriptors this process has open, each as `number target`, without those that are bun's own. */
export function descriptors() {
  const found = [];
  for (const number of readdirSync('/proc/self/fd')) {
    try {
      found.push(`${number} ${readlinkSync(`/proc/self/fd/${number}`)}`);
    } catch {
      // The one that read the directory.
    }
  }
  if (process.versions.bun === undefined) return found;
  const stdout = readlinkSync('/proc/self/fd/1');
  return found.filter((line) => !OWN.test(line) && !line.endsWith(` ${stdout}`));
}

/** The children of all threads of this process. */
export function children() {
  for (;;) {
    try {
      return readdirSync('/proc/self/task').flatMap((task) =>
        readFileSync(`/proc/self/task/${task}/children`, 'utf8').split(' ').filter((pid) => pid !== ''),
      );
    } catch (error) {
      // A thread that has ended meanwhile has left its children to another one, so all are asked again.
      if (error.code !== 'ENOENT' && error.code !== 'ESRCH') throw error;
    }
  }
}

/** Where the manager has the sessions' cgroups: a dash in a slice's name nests. */
export const SLICE = '/sys/fs/cgroup/opencode.slice/opencode-pty.slice';

/** The processes of a session: pid, name and state (a letter). */
export function processes(unit) {
  const pids = readFileSync(join(SLICE, unit, 'cgroup.procs'), 'utf8').split('\n').filter((pid) => pid !== '');
  return pids.flatMap((pid) => {
    try {
      const [, name, state] = /\((.*)\) (.)/s.exec(readFileSync(`/proc/${pid}/stat`, 'utf8'));
      return [{ pid, name, state }];
    } catch {
      return []; // gone
    }
  });
}

/** The cgroups of sessions. */
export function sessions() {
  try {
    const slice = readdirSync(SLICE);
    return slice.filter((name) => /^opencode-pty-[0-9a-f]{32}\.service$/.test(name));
  } catch (error) {
    if (error.code === 'ENOENT') return [];
    throw error;
  }
}

const state = () => ({ descriptors: descriptors(), children: children(), sessions: sessions() });

function same(now, before) {
  // A runtime may close late what the first session made it open. That is no leak, and must not hide one either.
  if (now.descriptors.length < before.descriptors.length) before.descriptors = now.descriptors;
  // The number of a descriptor may differ, and what it leads to; not how many there are.
  if (now.descriptors.length !== before.descriptors.length) {
    return `descriptors were ${before.descriptors.join(', ')} and are ${now.descriptors.join(', ')}`;
  }
  if (now.children.length !== before.children.length) return `children: ${now.children.join(' ')}`;
  if (now.sessions.length !== 0) return `sessions: ${now.sessions.join(' ')}`;
  return null;
}

/** Has the runtime open what it opens once and keeps. */
async function warmUp(plan) {
  const t = new Context(plan);
  await t.run('echo warm');
  await promisify(execFile)('/bin/true');
  const worker = new Worker('require("node:child_process").execFileSync("/bin/true")', { eval: true });
  await new Promise((resolve, reject) => worker.on('exit', resolve).on('error', reject));
  await t.end();
  await waitFor('the first session to be gone', () => (sessions().length === 0 ? null : sessions().join(' ')));
}

function describe(error) {
  const cause = error?.cause ? ` (${describe(error.cause)})` : '';
  return error instanceof Error ? `${error.code ?? ''} ${error.stack}${cause}`.trim() : String(error);
}
