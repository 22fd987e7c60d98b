// The server's side of opencode-pty: a reference client for Node, Node single-executable applications and bun.
//
//   const connection = await connect();
//   const session = await connection.start({ argv: ['bash', '-i'], directory: await openDirectory(path) });
//   await session.write('ls\r');
//   for await (const text of decodeText(session.output)) …
//   const { code, signal, result } = await session.exit;
//
// One connection is one session. Node cannot send descriptors, so a helper does: it gets this very socket as its descriptor
// 3 and the directory as 4, sends the start frame, and is gone. The order of things matters and is fixed here; the reasons are
// beside the lines. What would surprise: while the helper lives, the socket belongs to it, and Node has paused this side.

import { spawn } from 'node:child_process';
import { constants } from 'node:fs';
import { open } from 'node:fs/promises';
import { createConnection } from 'node:net';

import { PtyError } from './error.js';
import { DATA_BYTES_MAX, FrameDecoder, encodeInput, encodeStop } from './frame.js';
import { Output, decodeText } from './output.js';

export { Output, PtyError, decodeText };

/** What `connect` takes when it isn't told otherwise. Times are in milliseconds. */
export const DEFAULTS = Object.freeze({
  path: '/run/opencode-pty/supervisor.sock',
  helper: '/usr/local/libexec/opencode-pty-client',
  /** Bytes of output that are kept. */
  outputBytesMax: 1_048_576,
  connectTime: 5_000,
  /** The helper gives up by itself after 5 s. */
  helperTime: 7_000,
  /** From the helper's end to `started`. */
  startedTime: 10_000,
});

/** A helper that was killed and still isn't gone is not waited for longer. Chosen. */
const KILLED_TIME = 1_000;
/** A helper whose `send` failed met a closed connection: how long the reason may take to arrive. Chosen. */
const REASON_TIME = 1_000;
/** A stop that isn't confirmed by then is made certain by closing: 10 s for the unit, 30 s for the drain, and some more. */
const STOP_TIME = 45_000;
/** How much of what the helper says is kept. Chosen: it says one line. */
const HELPER_SAYS_MAX = 4_096;
/** The helper's exit code when the system refused something. */
const HELPER_SYSTEM_ERROR = 71;
const RUNTIME_MAX = 3_600;

/**
 * Opens the directory a session is to work in: ask for approval of *this* descriptor, then hand it to `start`.
 * A symbolic link is refused, since it could be another directory a moment later.
 */
export function openDirectory(path) {
  return open(path, constants.O_RDONLY | constants.O_DIRECTORY | constants.O_NOFOLLOW);
}

/**
 * Connects to the supervisor. From here to the end of the start it waits five seconds and no more, so connect when everything
 * else, approval above all, is settled.
 */
export async function connect(options = {}) {
  const { signal, ...given } = options;
  const settings = { ...DEFAULTS, ...withoutUndefined(given) };
  const wire = new Wire(settings);
  const notAccepted = () => new PtyError('connect', 'the supervisor does not accept');
  const release = wire.failOn(signal, settings.connectTime, notAccepted);
  await Promise.race([wire.connected, wire.failed]);
  release();
  wire.throwIfFailed();
  return new Connection(wire, settings);
}

/** A connection on which one session can be started. */
class Connection {
  #wire;
  #settings;
  #used = false;

  constructor(wire, settings) {
    this.#wire = wire;
    this.#settings = settings;
  }

  /**
   * Starts the session; resolves once its command is really about to run, with directory, groups and domain in force.
   * `directory` is closed in any case, by whatever name this ends.
   */
  async start({ argv, directory, runtime = 0, signal }) {
    if (this.#used) {
      await directory?.close?.();
      throw new PtyError('usage', 'one connection is one session');
    }
    this.#used = true;
    const wire = this.#wire;
    let release = () => {};
    try {
      // A descriptor that the collector finds first ends Node 26: whatever happens, it is closed here.
      try {
        const words = encodeArguments(argv, runtime);
        if (typeof directory?.fd !== 'number') throw new PtyError('usage', 'directory is not an open directory');
        release = wire.failOn(signal);
        wire.throwIfFailed();
        wire.expectStarted();
        await this.#sendStart(words, directory);
      } finally {
        release();
        await directory?.close?.();
      }
      const noAnswer = () => new PtyError('no-answer', 'the supervisor does not answer');
      release = wire.failOn(signal, this.#settings.startedTime, noAnswer);
      // Node paused it when the helper got it; bun didn't, and its own `pause` loses bytes (1.3.14).
      wire.resume();
      const unit = await Promise.race([wire.started, wire.failed]);
      // A session that started and broke in the same breath is still one, and tells by its `exit`.
      if (unit === undefined || signal?.aborted) wire.throwIfFailed();
      return new Session(wire, unit);
    } catch (error) {
      wire.fail(error);
      throw error;
    } finally {
      release();
    }
  }

  /** Gives up. */
  close() {
    return this.#wire.close();
  }

  /** Has the helper send the start frame with the directory attached; resolves when it has ended well. */
  async #sendStart(words, directory) {
    const wire = this.#wire;
    const { helper: path, helperTime } = this.#settings;
    const helper = new Helper(path, words, wire.socket, directory.fd, helperTime);
    await Promise.race([helper.closed, wire.failed]);
    if (wire.error !== null || helper.error !== null) await helper.kill();
    if (helper.exitCode === HELPER_SYSTEM_ERROR && !wire.over) {
      // Most likely the supervisor refused and closed; then its own word is better than the helper's.
      const release = wire.failOn(undefined, REASON_TIME, () => helper.error);
      wire.resume();
      await wire.exit;
      release();
    }
    wire.throwIfFailed();
    if (helper.error !== null) throw helper.error;
  }
}

/** A terminal with a command in it. */
class Session {
  #wire;
  #queue = Promise.resolve();
  #stopping = false;

  constructor(wire, unit) {
    this.#wire = wire;
    this.unit = unit;
  }

  /** The ring of bytes the terminal printed. */
  get output() {
    return this.#wire.output;
  }

  /** How it ended. Never rejects; what cannot be known is `lost`, and `error` says why. */
  get exit() {
    return this.#wire.exit;
  }

  /** Why `exit` is `lost`, or null. */
  get error() {
    return this.#wire.error;
  }

  /**
   * Types bytes, or a string as UTF-8. Resolves when the system has taken them all; a program that doesn't read makes it
   * wait. One frame at a time is on its way, so the event loop is never held up and nothing piles up in this process.
   */
  write(data) {
    if (this.#stopping) return Promise.reject(new PtyError('ended', 'the session is being stopped'));
    const bytes = typeof data === 'string' ? Buffer.from(data) : data;
    return this.#enqueue(async () => {
      for (let at = 0; at < bytes.length; at += DATA_BYTES_MAX) {
        await this.#wire.send(encodeInput(bytes.subarray(at, at + DATA_BYTES_MAX)));
      }
    });
  }

  /**
   * Ends everything in the session, behind what was written before; resolves to `exit`. What isn't confirmed within
   * `closeAfter` milliseconds is left to the supervisor by closing, and is `lost` for us.
   */
  stop({ closeAfter = STOP_TIME } = {}) {
    if (!this.#stopping) {
      this.#stopping = true;
      this.#wire.expectStopped();
      this.#enqueue(() => this.#wire.send(encodeStop())).catch(() => {}); // `exit` tells
    }
    const timer = setTimeout(() => this.#wire.close(), closeAfter);
    return this.exit.finally(() => clearTimeout(timer));
  }

  /** Hangs up at once: the supervisor then ends everything in the session. Resolves when the socket is closed. */
  close() {
    return this.#wire.close();
  }

  #enqueue(work) {
    const done = this.#queue.then(work);
    this.#queue = done.catch(() => {});
    return done;
  }
}

/** The socket, what came over it so far, and how it ends: once, for one reason. */
class Wire {
  error = null;
  #decoder = new FrameDecoder();
  #state = 'connecting';
  #exit = null;
  #stopExpected = false;
  #sending = new Set();
  #connected = withResolvers();
  #started = withResolvers();
  #failed = withResolvers();
  #ended = withResolvers();
  #closed = withResolvers();

  constructor(settings) {
    this.output = new Output(settings.outputBytesMax);
    this.socket = createConnection({ path: settings.path });
    // Before anything can arrive: bun drops what comes before there is a listener.
    let cause;
    this.socket.on('data', (chunk) => this.#receive(chunk));
    this.socket.on('error', (error) => (cause = error));
    this.socket.on('connect', () => {
      if (this.#state === 'connecting') this.#state = 'connected';
      this.#connected.resolve();
    });
    this.socket.on('end', () => this.#hangUp(cause));
    this.socket.on('close', () => {
      this.#hangUp(cause);
      this.#closed.resolve();
    });
  }

  /** Resolves when connected. */
  get connected() {
    return this.#connected.promise;
  }

  /** Whether it has ended, for whatever reason. */
  get over() {
    return this.#state === 'over';
  }

  /** Resolves to the unit's name. */
  get started() {
    return this.#started.promise;
  }

  /** Resolves when it ended for a reason that is not the session's own end. */
  get failed() {
    return this.#failed.promise;
  }

  /** Resolves to the record of how it ended. */
  get exit() {
    return this.#ended.promise;
  }

  throwIfFailed() {
    if (this.error !== null) throw this.error;
  }

  /** Fails on abort, or when the time is up; gives what takes that back. */
  failOn(signal, time, late) {
    const abort = () => this.fail(new PtyError('aborted', 'aborted', signal.reason));
    const timer = time === undefined ? undefined : setTimeout(() => this.fail(late()), time);
    if (signal?.aborted) abort();
    signal?.addEventListener('abort', abort);
    return () => {
      clearTimeout(timer);
      signal?.removeEventListener('abort', abort);
    };
  }

  resume() {
    this.socket.resume();
  }

  /** Resolves when the system has taken the frame. */
  send(frame) {
    return new Promise((resolve, reject) => {
      if (this.#state === 'over') {
        reject(ended());
        return;
      }
      this.#sending.add(reject);
      this.socket.write(frame, (error) => {
        this.#sending.delete(reject);
        if (error) reject(ended(error));
        else resolve();
      });
    });
  }

  /** From now on `started` may come. */
  expectStarted() {
    this.#state = 'starting';
  }

  /** From now on `exit` is not the last word. */
  expectStopped() {
    this.#stopExpected = true;
  }

  /** Hangs up. */
  close() {
    this.fail(new PtyError('ended', 'closed on this side'));
    return this.#closed.promise;
  }

  /** Ends it for this reason, unless it has ended. What is known of the end stays known. */
  fail(error) {
    if (this.#state === 'over') return;
    if (this.#exit === null) {
      this.error = error;
      this.#failed.resolve();
    }
    this.#finish({ ...(this.#exit ?? LOST), stopped: false });
  }

  #finish(exit) {
    this.#state = 'over';
    this.socket.destroy();
    this.output.finish();
    for (const reject of this.#sending) reject(ended());
    this.#sending.clear();
    this.#ended.resolve(exit);
  }

  #hangUp(cause) {
    const code = this.#state === 'connecting' ? 'connect' : 'lost';
    this.fail(new PtyError(code, 'the connection to the supervisor is lost', cause));
  }

  #receive(chunk) {
    try {
      this.#decoder.push(chunk, (type, value) => {
        if (this.#state !== 'over') this.#take(type, value);
      });
    } catch (error) {
      this.fail(error);
    }
  }

  /** `started`, `output`*, then `exit` or `error`, and after a stop `stopped`: anything else is a violation. */
  #take(type, value) {
    if (type === 'error') {
      this.fail(value);
    } else if (type === 'started' && this.#state === 'starting') {
      this.#state = 'started';
      this.#started.resolve(value);
    } else if (type === 'output' && this.#state === 'started' && this.#exit === null) {
      this.output.push(value);
    } else if (type === 'exit' && this.#state === 'started' && this.#exit === null) {
      this.#exit = value;
      if (!this.#stopExpected) this.#finish({ ...value, stopped: false });
    } else if (type === 'stopped' && this.#exit !== null && this.#stopExpected) {
      this.#finish({ ...this.#exit, stopped: true });
    } else {
      throw new PtyError('protocol', `the supervisor sent ${type} where it may not`);
    }
  }
}

/** The helper process. */
class Helper {
  /** Why it did not do its work, or null. */
  error = null;
  exitCode = null;
  #child;
  #exited = withResolvers();
  #closed = withResolvers();

  #timer;

  constructor(path, words, socket, directory, time) {
    this.#timer = setTimeout(() => this.#fail('the helper does not end'), time);
    try {
      // The socket object, not its number: this is what keeps Node from reading while the helper writes. No environment: the
      // server's holds secrets.
      const stdio = ['ignore', 'pipe', 'pipe', socket, directory];
      this.#child = spawn(path, words, { stdio, env: {}, cwd: '/' });
    } catch (error) {
      this.#fail('the helper cannot be started', error);
      return;
    }
    let said = '';
    this.#child.stdout?.on('error', () => {}).resume();
    this.#child.stderr?.on('error', () => {}).on('data', (data) => (said = (said + data).slice(0, HELPER_SAYS_MAX)));
    this.#child.on('error', (error) => this.#fail('the helper cannot be started', error));
    this.#child.on('exit', () => this.#exited.resolve());
    this.#child.on('close', (code, signal) => {
      this.exitCode = code;
      clearTimeout(this.#timer);
      if (code === 0) this.#closed.resolve();
      else this.#fail(`the helper ended with ${code ?? signal}: ${said.trim()}`);
    });
  }

  /** Resolves when it has ended and its output is read, or can't be started; look at `error` then. */
  get closed() {
    return this.#closed.promise;
  }

  /** Ends it, whatever it does. */
  async kill() {
    clearTimeout(this.#timer);
    if (this.#child?.pid === undefined) return;
    this.#child.kill('SIGKILL');
    let timer;
    const patience = new Promise((resolve) => (timer = setTimeout(resolve, KILLED_TIME)));
    await Promise.race([this.#exited.promise, patience]);
    clearTimeout(timer);
    this.#child.stdout?.destroy();
    this.#child.stderr?.destroy();
  }

  #fail(message, cause) {
    clearTimeout(this.#timer);
    this.error ??= new PtyError('helper', message, cause);
    this.#closed.resolve();
  }
}

const LOST = Object.freeze({ code: null, signal: null, result: 'lost' });

function ended(cause) {
  return new PtyError('ended', 'the session has ended', cause);
}

/** The helper's arguments: the runtime, then each word as `a` and unpadded base64url. It checks the limits itself. */
function encodeArguments(argv, runtime) {
  const isText = (word) => typeof word === 'string' && word.isWellFormed() && !word.includes('\0');
  if (!Array.isArray(argv) || argv.length === 0 || !argv.every(isText) || argv[0] === '') {
    throw new PtyError('usage', 'argv is not a command and its arguments');
  }
  if (!Number.isInteger(runtime) || runtime < 0 || runtime > RUNTIME_MAX) {
    throw new PtyError('usage', `runtime is not a number of seconds up to ${RUNTIME_MAX}`);
  }
  return [String(runtime), ...argv.map((word) => `a${Buffer.from(word).toString('base64url')}`)];
}

function withoutUndefined(options) {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined));
}

/** `Promise.withResolvers`, which Node 20 lacks. */
function withResolvers() {
  let resolve;
  const promise = new Promise((settle) => (resolve = settle));
  return { promise, resolve };
}
