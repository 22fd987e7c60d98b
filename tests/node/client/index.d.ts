/// <reference types="node" />
import type { FileHandle } from 'node:fs/promises';

/** What `connect` takes. Times are in milliseconds. */
export interface ConnectOptions {
  /** The supervisor's socket. */
  path?: string;
  /** The helper that sends the start frame. */
  helper?: string;
  /** Bytes of output that are kept for readers, 1 MiB by default. */
  outputBytesMax?: number;
  /** How long `connect` may take. */
  connectTime?: number;
  /** How long the helper may take. */
  helperTime?: number;
  /** How long `started` may take once the helper has ended. */
  startedTime?: number;
  /** Gives up connecting; the connection that exists is not affected. */
  signal?: AbortSignal;
}

export declare const DEFAULTS: Readonly<Required<Omit<ConnectOptions, 'signal'>>>;

export interface StartRequest {
  /** The command, then its arguments. A command without a slash is looked up in /usr/local/bin:/usr/bin:/bin. */
  argv: readonly string[];
  /** The approved directory. `start` closes it, whatever happens. */
  directory: FileHandle;
  /** Whole seconds up to 3,600; 0 or nothing selects 3,600. One or two may be over before the start is: `start-failed`. */
  runtime?: number;
  /** Gives up starting. Once `start` has resolved it has no effect: use `stop` or `close`. */
  signal?: AbortSignal;
}

export interface Exit {
  /** The exit code; null if it was a signal, or nobody knows. */
  code: number | null;
  /** The number of the signal that ended it, or null. */
  signal: number | null;
  /** systemd's word (`success`, `exit-code`, `signal`, `timeout`, `oom-kill`, …), or `stopped`, or `lost`. */
  result: string;
  /** Whether the supervisor confirmed a stop that we asked for. */
  stopped: boolean;
}

export interface Chunk {
  /** The cursor of the first byte of `data`. */
  cursor: number;
  /** A copy; empty if there is nothing behind the cursor yet. */
  data: Uint8Array;
  /** The cursor to go on with. */
  next: number;
  /** Bytes between the cursor that was asked for and this chunk that are gone. */
  dropped: number;
}

/** A bounded ring of the newest bytes; a cursor counts bytes from the session's beginning. */
export declare class Output implements AsyncIterable<Chunk> {
  constructor(bytesMax: number);
  /** The cursor of the oldest byte still here. */
  readonly start: number;
  /** The cursor behind the newest byte. */
  readonly end: number;
  /** How many bytes are not here any more. */
  readonly dropped: number;
  /** Whether nothing can be added any more. */
  readonly ended: boolean;
  /** What is there behind `cursor` (0) now, at most `bytesMax` (65,536). Never waits, takes nothing away. */
  read(cursor?: number, bytesMax?: number): Chunk;
  /** Resolves once `end > cursor` or `ended`; rejects with the signal's reason. */
  wait(cursor: number, signal?: AbortSignal): Promise<void>;
  /** Chunks from `cursor` (0) on, until the session has ended. */
  from(cursor?: number, signal?: AbortSignal): AsyncGenerator<Chunk, void, undefined>;
  [Symbol.asyncIterator](): AsyncGenerator<Chunk, void, undefined>;
}

export interface Session {
  /** The unit's name. */
  readonly unit: string;
  readonly output: Output;
  /** How it ended. Never rejects. */
  readonly exit: Promise<Exit>;
  /** Why `exit` is `lost`, or null. */
  readonly error: PtyError | null;
  /** Types; resolves when the system has taken all of it. Rejects with `ended`. Don't change `data` before. */
  write(data: Uint8Array | string): Promise<void>;
  /** Ends everything in the session, behind what was written before. */
  stop(options?: { closeAfter?: number }): Promise<Exit>;
  /** Hangs up at once, which also ends everything in the session. `exit` is `lost` then. */
  close(): Promise<void>;
}

export interface Connection {
  /** Once per connection. Rejects with a `PtyError`; helper, socket and directory are gone then. */
  start(request: StartRequest): Promise<Session>;
  /** Gives up. */
  close(): Promise<void>;
}

export declare class PtyError extends Error {
  constructor(code: string, message: string, cause?: unknown);
  /**
   * One of the supervisor's words (docs/protocol.md), or `aborted`, `connect`, `helper`, `no-answer`, `protocol`, `lost`,
   * `ended`, `usage`.
   */
  readonly code: string;
}

export declare function connect(options?: ConnectOptions): Promise<Connection>;

/** Opens a directory for `start`; a symbolic link is refused. */
export declare function openDirectory(path: string): Promise<FileHandle>;

/** Text of one reader's chunks, decoded as one stream of UTF-8. */
export declare function decodeText(chunks: AsyncIterable<Chunk>): AsyncGenerator<string, void, undefined>;
