// Frames, as docs/protocol.md lays them out: encodes what a client may send, decodes what it may be sent.
//
// No I/O here, and nothing is trusted: each length is compared with its type's limit before anything is allocated, and
// whatever is not exactly a frame is a `protocol` error. The start frame is not here: the helper sends it.

import { PtyError } from './error.js';

const MAGIC = 0x4f505459; // "OPTY"
const VERSION = 1;
const HEADER_BYTES = 12;

/** Most bytes of one input or output frame. */
export const DATA_BYTES_MAX = 32_768;

/** Least and most bytes of the payload of each type that a supervisor sends. */
const FROM_SUPERVISOR = new Map([
  [3, { type: 'output', min: 1, max: DATA_BYTES_MAX }],
  [4, { type: 'exit', min: 10, max: 73 }],
  [5, { type: 'error', min: 1, max: 32_768 }],
  [6, { type: 'started', min: 53, max: 53 }],
  [8, { type: 'stopped', min: 0, max: 0 }],
]);

const INPUT = 2;
const STOP = 7;

const UNIT = /^opencode-pty-[0-9a-f]{32}\.service$/;
const RESULT = /^[a-z][a-z0-9-]{0,63}$/;
const ERROR = /^([a-z][a-z-]{0,31}): (.*)$/s;

const CLD_EXITED = 1;
const CLD_KILLED = 2;
const CLD_DUMPED = 3;

/** One input frame. The bytes are copied. */
export function encodeInput(data) {
  if (data.length < 1 || data.length > DATA_BYTES_MAX) throw new RangeError(`${data.length} bytes in one frame`);
  const frame = Buffer.allocUnsafe(HEADER_BYTES + data.length);
  writeHeader(frame, INPUT, data.length);
  frame.set(data, HEADER_BYTES);
  return frame;
}

/** The stop frame. */
export function encodeStop() {
  const frame = Buffer.allocUnsafe(HEADER_BYTES);
  writeHeader(frame, STOP, 0);
  return frame;
}

function writeHeader(frame, type, length) {
  frame.writeUInt32BE(MAGIC, 0);
  frame[4] = VERSION;
  frame[5] = type;
  frame.writeUInt16BE(0, 6);
  frame.writeUInt32BE(length, 8);
}

/** Takes bytes in any pieces, gives frames. After an error it must not be used again. */
export class FrameDecoder {
  #header = Buffer.alloc(HEADER_BYTES);
  #headerBytes = 0;
  #kind;
  #payload;
  #payloadBytes = 0;

  /** Calls `deliver(type, value)` for each frame that `chunk` completes. */
  push(chunk, deliver) {
    let at = 0;
    while (at < chunk.length) {
      if (this.#kind === undefined) {
        const taken = Math.min(chunk.length - at, HEADER_BYTES - this.#headerBytes);
        this.#header.set(chunk.subarray(at, at + taken), this.#headerBytes);
        this.#headerBytes += taken;
        at += taken;
        if (this.#headerBytes < HEADER_BYTES) return;
        const { kind, length } = decodeHeader(this.#header);
        this.#kind = kind;
        this.#payload = Buffer.allocUnsafe(length);
        this.#payloadBytes = 0;
      }
      const taken = Math.min(chunk.length - at, this.#payload.length - this.#payloadBytes);
      this.#payload.set(chunk.subarray(at, at + taken), this.#payloadBytes);
      this.#payloadBytes += taken;
      at += taken;
      if (this.#payloadBytes < this.#payload.length) return;
      const { type } = this.#kind;
      const payload = this.#payload;
      this.#kind = this.#payload = undefined;
      this.#headerBytes = 0;
      deliver(type, decodePayload(type, payload));
    }
  }
}

function decodeHeader(header) {
  if (header.readUInt32BE(0) !== MAGIC) throw protocol('not a frame');
  if (header[4] !== VERSION) throw protocol(`version ${header[4]}`);
  if (header.readUInt16BE(6) !== 0) throw protocol('reserved bytes are set');
  const kind = FROM_SUPERVISOR.get(header[5]);
  if (kind === undefined) throw protocol(`a frame of type ${header[5]}`);
  const length = header.readUInt32BE(8);
  if (length < kind.min || length > kind.max) throw protocol(`${kind.type} with ${length} bytes of payload`);
  return { kind, length };
}

function decodePayload(type, payload) {
  switch (type) {
    case 'output':
      return payload;
    case 'exit':
      return decodeExit(payload);
    case 'error':
      return decodeError(payload);
    case 'started': {
      const unit = payload.toString('latin1');
      if (!UNIT.test(unit)) throw protocol('started with something that is no name of a unit');
      return unit;
    }
    case 'stopped':
      return null;
  }
}

/**
 * What SPEC 4 wants a client to make of it: code 1 is an exit code, 2 and 3 a numeric signal; the result word is kept.
 * Only `lost` has neither.
 */
function decodeExit(payload) {
  const code = payload[0];
  const status = payload.readUInt32BE(1);
  const length = payload.readUInt32BE(5);
  if (length !== payload.length - 9) throw protocol('exit whose parts do not add up');
  const result = payload.toString('latin1', 9);
  if (!RESULT.test(result)) throw protocol('exit with a result that is no word');
  if (code === CLD_EXITED) return { code: status, signal: null, result };
  if (code === CLD_KILLED || code === CLD_DUMPED) return { code: null, signal: status, result };
  if (code === 0 && status === 0 && result === 'lost') return { code: null, signal: null, result };
  throw protocol(`exit with code ${code}`);
}

function decodeError(payload) {
  let text;
  try {
    text = new TextDecoder('utf-8', { fatal: true }).decode(payload);
  } catch {
    throw protocol('error that is not UTF-8');
  }
  const parts = ERROR.exec(text);
  if (parts === null) throw protocol('error without a code');
  return new PtyError(parts[1], parts[2]);
}

function protocol(what) {
  return new PtyError('protocol', `the supervisor sent ${what}`);
}
