// All terminals of one loaded plugin: whose they are, how many there may be, and when they end.
//
// The story of a terminal is `spawn`: a slot, the directory, the command, the approval, the connection, in this order and no
// other. What would surprise: between any two of these the OpenCode session may be deleted, the call aborted or the plugin
// unloaded. Each of these fires one signal, the reservation's, and whatever has been begun by then is taken back here.

import { randomBytes } from 'node:crypto';
import { readlink } from 'node:fs/promises';
import { resolve } from 'node:path';
import { setImmediate as breathe } from 'node:timers/promises';

import { connect, openDirectory } from '../client/index.js';
import { describe, resolveCommand } from './command.js';
import { PluginError } from './error.js';
import { TEXT_BYTES_MAX, continuationBytes, decode, jsonBytes, lines, takeText } from './text.js';

export const LIMITS = Object.freeze({
  /** As many as the supervisor allows one server. */
  terminals: 16,
  /** Of one OpenCode session. Chosen: one session must not take all. */
  terminalsOfSession: 8,
  /** Terminals that have ended and can still be read. Chosen. */
  ended: 16,
  /** Bytes of output that are kept of each. */
  outputBytes: 1_048_576,
  /** Writes of one terminal that may wait for one another, 64 KiB each. Chosen. */
  writes: 8,
  /** How long a write may wait for a program that doesn't read. Chosen. */
  writeTime: 30_000,
  /** How long a kill may take before it is made certain by hanging up. Chosen: the supervisor takes 10 s at most. */
  killTime: 20_000,
  /** Deleted OpenCode sessions that are remembered, so that a late call of theirs starts nothing. Chosen. */
  deleted: 1_024,
  /** Work that looking for a pattern may take in one call, in characters times steps. Chosen: about half a second. */
  matching: 16_000_000,
});

/** Bytes that are looked at in one piece. Chosen. */
const PIECE_BYTES = 65_536;

/** The same kind of work between two breaths of the event loop. Chosen: some ten milliseconds. */
const BREATH = 500_000;

/** How much of a command is shown in a list. Chosen. */
const COMMAND_SHOWN_MAX = 200;

export class Terminals {
  #settings;
  #limits;
  #onExit;
  #terminals = new Map();
  #reservations = new Set();
  #deleted = new Set();
  #unloaded = false;

  /**
   * `connection` are options of the client's `connect`; `onExit(terminal)` is called when a terminal that asked for it has
   * ended by itself.
   */
  constructor({ connection = {}, limits = {}, onExit = () => {} } = {}) {
    this.#limits = { ...LIMITS, ...limits };
    this.#settings = { ...connection, outputBytesMax: this.#limits.outputBytes };
    this.#onExit = onExit;
  }

  /** Terminals that run or are being started. */
  get live() {
    return this.#reservations.size + [...this.#terminals.values()].filter((terminal) => terminal.exit === null).length;
  }

  /**
   * Starts a terminal. `call` says for whom: `session`, `base` (the directory that a relative one is relative to, or null),
   * `signal`, and `approve(question)`, which rejects unless it is allowed.
   */
  async spawn(call, { command, directory, runtime, notify }) {
    const reservation = this.#reserve(call);
    const { signal } = reservation;
    let handle = null;
    let session = null;
    try {
      handle = await open(directory, call.base);
      const place = await identify(handle);
      const { argv, file } = await resolveCommand(command, place.link, place.path);
      signal.throwIfAborted();
      // Asked about the open descriptor, and about the file that was found: neither can be swapped behind the answer.
      const question = { argv, file, directory: place.path, device: place.device, inode: place.inode, runtime };
      await unlessAborted(signal, call.approve(question));
      signal.throwIfAborted();
      // From here on the supervisor's five seconds run.
      const connection = await connect({ ...this.#settings, signal });
      const passed = handle;
      handle = null; // `start` closes it, whatever happens.
      session = await connection.start({ argv, directory: passed, runtime, signal });
      signal.throwIfAborted();
      const terminal = new Terminal(call.session, session, { argv, directory: place.path, notify }, this.#limits);
      this.#add(terminal);
      session = null;
      return terminal;
    } catch (error) {
      throw signal.aborted ? signal.reason : error;
    } finally {
      this.#reservations.delete(reservation);
      reservation.release();
      await handle?.close();
      await session?.close();
    }
  }

  /** A terminal of this OpenCode session. One of another session is as unknown as one that never was. */
  get(session, id) {
    const terminal = this.#terminals.get(id);
    if (terminal === undefined || terminal.owner !== session) {
      throw new PluginError('unknown-terminal', 'this session has no such terminal');
    }
    return terminal;
  }

  /** The terminals of this OpenCode session, oldest first. */
  list(session) {
    return [...this.#terminals.values()].filter((terminal) => terminal.owner === session);
  }

  /** An OpenCode session is gone: so is everything it started or is about to start. */
  async sessionDeleted(session) {
    this.#deleted.add(session);
    if (this.#deleted.size > this.#limits.deleted) this.#deleted.delete(this.#deleted.values().next().value);
    await this.#end(
      (owner) => owner === session,
      () => new PluginError('session-deleted', 'the session was deleted'),
    );
  }

  /** The plugin is unloaded: nothing is left, nothing can be started. */
  async unload() {
    this.#unloaded = true;
    await this.#end(
      () => true,
      () => new PluginError('unloaded', 'the plugin was unloaded'),
    );
  }

  async #end(isMeant, reason) {
    for (const reservation of this.#reservations) if (isMeant(reservation.owner)) reservation.abort(reason());
    const meant = [...this.#terminals.values()].filter((terminal) => isMeant(terminal.owner));
    for (const { id } of meant) this.#terminals.delete(id);
    // Hanging up is enough: the supervisor ends everything in the session, and nobody is left to be told how.
    await Promise.all(meant.map((terminal) => terminal.hangUp(reason())));
  }

  /** A slot, before anything is started; and the one signal that takes back whatever is. */
  #reserve(call) {
    call.signal?.throwIfAborted();
    if (this.#unloaded) throw new PluginError('unloaded', 'the plugin was unloaded');
    if (this.#deleted.has(call.session)) throw new PluginError('session-deleted', 'the session was deleted');
    const isOwn = (entry) => entry.owner === call.session;
    const running = [...this.#terminals.values()].filter((terminal) => terminal.exit === null);
    const taken = [...this.#reservations, ...running];
    if (taken.length >= this.#limits.terminals || taken.filter(isOwn).length >= this.#limits.terminalsOfSession) {
      throw new PluginError('busy', 'too many terminals run; end one first');
    }
    const reservation = new Reservation(call.session, call.signal);
    this.#reservations.add(reservation);
    return reservation;
  }

  #add(terminal) {
    this.#terminals.set(terminal.id, terminal);
    const ended = [...this.#terminals.values()].filter((other) => other.exit !== null);
    for (const { id } of ended.slice(0, Math.max(0, ended.length - this.#limits.ended))) this.#terminals.delete(id);
    terminal.ended.then(() => {
      const wanted = terminal.notify && !terminal.killed && this.#terminals.has(terminal.id);
      if (wanted) this.#onExit(terminal);
    });
  }
}

/** The claim of a start that isn't a terminal yet. */
class Reservation {
  owner;
  #controller = new AbortController();
  #callSignal;
  #follow = () => this.abort(new PluginError('aborted', 'the call was aborted'));

  constructor(owner, callSignal) {
    this.owner = owner;
    this.#callSignal = callSignal;
    callSignal?.addEventListener('abort', this.#follow);
  }

  get signal() {
    return this.#controller.signal;
  }

  abort(reason) {
    this.#controller.abort(reason);
  }

  release() {
    this.#callSignal?.removeEventListener('abort', this.#follow);
  }
}

/** What looking for a pattern may still cost; lets others run now and then. */
class Work {
  #left;
  #signal;
  #breath = BREATH;

  constructor(left, signal) {
    this.#left = left;
    this.#signal = signal;
  }

  /** Pays for one line; false if there isn't enough left. */
  async take(line, matcher) {
    const cost = (line.length + 1) * matcher.cost;
    if (cost > this.#left) return false;
    this.#left -= cost;
    this.#breath -= cost;
    if (this.#breath < 0) {
      this.#breath = BREATH;
      await breathe();
      if (this.#signal?.aborted) throw new PluginError('aborted', 'the call was aborted');
    }
    return true;
  }
}

/** A command in a terminal, running or ended. */
export class Terminal {
  /** 128 random bits: it says nothing, and nobody comes upon it by counting. */
  id = `pty_${randomBytes(16).toString('hex')}`;
  owner;
  unit;
  command;
  directory;
  notify;
  /** How it ended, or null. */
  exit = null;
  killed = false;
  started = Date.now();
  #session;
  #output;
  #limits;
  #writes = 0;
  #over = new AbortController();

  constructor(owner, session, { argv, directory, notify }, limits) {
    this.owner = owner;
    this.unit = session.unit;
    const line = describe(argv);
    this.command = line.length > COMMAND_SHOWN_MAX ? `${line.slice(0, COMMAND_SHOWN_MAX)}…` : line;
    this.directory = directory;
    this.notify = notify;
    this.#session = session;
    this.#output = session.output;
    this.#limits = limits;
    this.ended = session.exit.then((exit) => {
      this.exit = exit;
      this.#session = null;
    });
  }

  /** The cursor behind the newest byte. */
  get end() {
    return this.#output.end;
  }

  /** Types bytes. */
  async write(bytes, signal) {
    if (this.#session === null) throw new PluginError('ended', 'the command has ended');
    if (this.#writes >= this.#limits.writes) throw new PluginError('busy', 'earlier writes are not through yet');
    this.#writes += 1;
    const done = this.#session.write(bytes).finally(() => (this.#writes -= 1));
    const stuck = `the program has not read it within ${this.#limits.writeTime / 1_000} s; it stays queued`;
    await withDeadline(this.#limits.writeTime, [signal, this.#over.signal], new PluginError('timeout', stuck), () => done);
  }

  /** Text from a cursor, or the last lines. */
  async read({ cursor, tail, max = TEXT_BYTES_MAX, matcher = null }, signal) {
    if (matcher !== null) return this.#filter({ cursor, tail, max, matcher }, signal);
    if (tail !== undefined) return this.#tail(tail, max);
    const chunk = this.#output.read(cursor ?? this.#output.start, max + 3);
    return this.#page(cursor ?? chunk.cursor, chunk, max);
  }

  /** A chunk as a result: without the rest of a character that began before it, up to as much as fits. */
  #page(asked, { cursor, data, next }, max) {
    const skipped = continuationBytes(data);
    const whole = this.#output.ended && next === this.#output.end;
    const { length, text } = takeText(data.subarray(skipped), max, whole);
    const from = cursor + skipped;
    // What is left of a character that isn't there yet is nothing to come back for at once.
    const more = text !== '' && from + length < this.#output.end;
    return this.#result({ asked, from, next: from + length, more, text, matches: null });
  }

  #result({ asked, from, next, more, text, matches }) {
    return {
      id: this.id,
      text,
      from,
      next,
      end: this.#output.end,
      dropped: Math.max(0, this.#output.start - asked),
      more,
      matches,
      ...this.state(),
    };
  }

  #tail(count, max) {
    const from = Math.max(this.#output.start, this.#output.end - max);
    const { cursor, data } = this.#output.read(from, max);
    let at = data.length;
    // A newline at the very end ends the last line, it doesn't begin another.
    for (let left = data.at(-1) === 10 ? count + 1 : count; left > 0 && at >= 0; left -= 1) {
      at = at === 0 ? -1 : data.lastIndexOf(10, at - 1);
    }
    let start = at + 1;
    // What JSON makes longer is cut at the front: it's the end that was asked for.
    while (jsonBytes(decode(data.subarray(start))) > max) start += Math.max(1, (data.length - start) >> 3);
    const chunk = { cursor: cursor + start, data: data.subarray(start), next: cursor + data.length };
    return this.#page(chunk.cursor, chunk, max);
  }

  /** The lines that match. A last line that isn't complete is looked at, and again the next time. */
  async #filter({ cursor, tail, max, matcher }, signal) {
    const asked = cursor ?? this.#output.start;
    const found = [];
    let bytes = 0;
    let next = Math.max(asked, this.#output.start);
    const from = next;
    const stop = this.#output.end;
    const work = new Work(this.#limits.matching, signal);
    let more = false;
    scan: while (next < stop) {
      const { cursor: start, data } = this.#output.read(next, Math.min(PIECE_BYTES, stop - next));
      next = start;
      for (const line of lines(data)) {
        const last = start + line.next >= stop;
        // A line that the piece cuts comes again, whole, with the next piece.
        if (!line.complete && !last) break;
        const text = decode(data.subarray(line.at, line.end));
        if (!(await work.take(text, matcher))) {
          more = true;
          break scan;
        }
        if (matcher.test(text)) {
          const shown = takeText(Buffer.from(text), max - 2, true).text;
          const size = jsonBytes(shown) + 2;
          if (tail === undefined && bytes + size > max) {
            more = true;
            break scan;
          }
          found.push({ text: shown, size });
          bytes += size;
          while (tail !== undefined && (found.length > tail || bytes > max)) bytes -= found.shift().size;
        }
        if (!line.complete && !this.#output.ended) break scan;
        next = start + line.next;
      }
    }
    const text = found.map((line) => line.text).join('\n');
    return this.#result({ asked, from, next, more, text, matches: found.length });
  }

  /** Waits until it has ended, or has printed something behind the cursor (that matches), or the time is up. */
  async wait({ until, cursor, matcher = null, time }, signal) {
    const deadline = new PluginError('timeout', 'the time is up');
    const ended = async (stop) => {
      await unlessAborted(stop, this.ended);
      return 'exit';
    };
    const printed = (stop) => this.#waitForOutput(cursor ?? this.#output.end, matcher, stop);
    let reason;
    try {
      reason = await withDeadline(time, [signal, this.#over.signal], deadline, until === 'exit' ? ended : printed);
    } catch (error) {
      if (error !== deadline) throw error;
      reason = 'timeout';
    }
    return { id: this.id, reason, end: this.#output.end, ...this.state() };
  }

  async #waitForOutput(cursor, matcher, stop) {
    const work = new Work(this.#limits.matching, stop);
    let at = Math.max(cursor, this.#output.start);
    // How far it has been looked through; `at` stays at the beginning of a line that isn't complete.
    let seen = at;
    for (;;) {
      await this.#output.wait(seen, stop);
      if (matcher === null && this.#output.end > at) return 'output';
      while (matcher !== null && seen < this.#output.end) {
        const { cursor: start, data } = this.#output.read(at, PIECE_BYTES);
        at = start;
        seen = start + data.length;
        for (const line of lines(data)) {
          if (!line.complete && seen < this.#output.end) break;
          const text = decode(data.subarray(line.at, line.end));
          if (!(await work.take(text, matcher))) {
            throw new PluginError('bad-input', 'looking for this pattern takes too long here');
          }
          if (matcher.test(text)) return 'output';
          if (line.complete) at = start + line.next;
        }
      }
      if (this.#output.ended && seen >= this.#output.end) {
        await unlessAborted(stop, this.ended);
        return 'exit';
      }
    }
  }

  /** Ends everything in the terminal; the output stays readable. */
  async kill() {
    if (this.#session !== null) {
      this.killed = true;
      await this.#session.stop({ closeAfter: this.#limits.killTime });
      await this.ended;
    }
  }

  /** Ends it for good, and whoever waits for it. */
  async hangUp(reason) {
    this.killed = true;
    this.#over.abort(reason);
    await this.#session?.close();
    await this.ended;
  }

  /** What every result says of it. */
  state() {
    return { running: this.exit === null, exit: this.exit === null ? null : { ...this.exit } };
  }
}

async function open(directory, base) {
  if (base === null && !directory.startsWith('/')) {
    throw new PluginError('bad-directory', 'the directory must be absolute: this host does not say where the session works');
  }
  // `resolve` also takes away what would follow a link in spite of O_NOFOLLOW: `link/` and `link/.`
  const path = resolve(base ?? '/', directory);
  try {
    return await openDirectory(path);
  } catch (error) {
    const why = error.code === 'ENOTDIR' || error.code === 'ELOOP' ? 'is not a directory, or is a link to one' : `cannot be opened (${error.code})`;
    throw new PluginError('bad-directory', `${JSON.stringify(path)} ${why}`, error);
  }
}

/** What an open directory is: never asked of its name. */
async function identify(handle) {
  const link = `/proc/self/fd/${handle.fd}`;
  const [path, { dev, ino, nlink }] = await Promise.all([readlink(link), handle.stat({ bigint: true })]);
  if (nlink === 0n) throw new PluginError('bad-directory', 'the directory is deleted');
  return { link, path, device: String(dev), inode: String(ino) };
}

/** The promise's outcome, or the signal's reason if that comes first. */
async function unlessAborted(signal, promise) {
  signal.throwIfAborted();
  let abort;
  const aborted = new Promise((_, reject) => {
    abort = () => reject(signal.reason);
    signal.addEventListener('abort', abort);
  });
  try {
    return await Promise.race([promise, aborted]);
  } finally {
    signal.removeEventListener('abort', abort);
    // Whatever it becomes when nobody listens any more.
    Promise.resolve(promise).catch(() => {});
  }
}

/** Runs `work(signal)` until it is done, the time is up (`late` is thrown), or one of the signals fires. */
async function withDeadline(time, signals, late, work) {
  const controller = new AbortController();
  const watched = signals.filter((signal) => signal !== undefined);
  const follow = watched.map((signal) => () => {
    const { reason } = signal;
    controller.abort(reason instanceof PluginError ? reason : new PluginError('aborted', 'the call was aborted'));
  });
  watched.forEach((signal, index) => {
    if (signal.aborted) follow[index]();
    signal.addEventListener('abort', follow[index]);
  });
  const timer = setTimeout(() => controller.abort(late), time);
  try {
    return await unlessAborted(controller.signal, work(controller.signal));
  } finally {
    clearTimeout(timer);
    watched.forEach((signal, index) => signal.removeEventListener('abort', follow[index]));
    // Whatever still waits for it.
    controller.abort(late);
  }
}
