// What a terminal printed: a bounded ring of bytes that any number of readers can look at, each at its own pace.
//
// A cursor counts bytes from the beginning of the session and is never reused, so a reader always knows whether it missed
// something. Reading takes nothing away. Bytes stay bytes: a chunk may end in the middle of a UTF-8 character, and
// `decodeText` at the bottom, the edge, is the only place that makes text of them.

/** Least room for a ring that grows. Chosen: most commands print less. */
const ROOM_BYTES_MIN = 4_096;

/** Most bytes of one chunk of an iteration. Chosen: two frames. */
const CHUNK_BYTES_MAX = 65_536;

export class Output {
  #max;
  #ring = Buffer.alloc(0);
  #start = 0;
  #end = 0;
  #ended = false;
  #waiting = new Set();

  constructor(bytesMax) {
    this.#max = bytesMax;
  }

  /** The cursor of the oldest byte still here. */
  get start() {
    return this.#start;
  }

  /** The cursor behind the newest byte: all bytes there ever were. */
  get end() {
    return this.#end;
  }

  /** How many bytes are not here any more. */
  get dropped() {
    return this.#start;
  }

  /** Whether nothing can be added any more. */
  get ended() {
    return this.#ended;
  }

  /** For the session: adds bytes, drops the oldest beyond the limit. */
  push(data) {
    const kept = data.subarray(Math.max(0, data.length - this.#max));
    this.#makeRoom(Math.min(this.#max, this.#end - this.#start + kept.length));
    const end = this.#end + data.length;
    const room = this.#ring.length;
    const at = (end - kept.length) % room;
    const first = kept.subarray(0, room - at);
    this.#ring.set(first, at);
    this.#ring.set(kept.subarray(first.length), 0);
    this.#end = end;
    this.#start = Math.max(this.#start, end - this.#max);
    this.#wake();
  }

  /** For the session: nothing follows. */
  finish() {
    this.#ended = true;
    this.#wake();
  }

  /**
   * Up to `bytesMax` bytes from `cursor` on, or from the oldest byte if that one is gone. Never waits, takes nothing away.
   * `next` is the cursor to go on with, `dropped` how many bytes between `cursor` and the chunk are gone.
   */
  read(cursor = 0, bytesMax = CHUNK_BYTES_MAX) {
    const from = Math.min(Math.max(cursor, this.#start), this.#end);
    const length = Math.min(bytesMax, this.#end - from);
    const data = Buffer.alloc(length);
    const room = this.#ring.length;
    if (length > 0) {
      const at = from % room;
      const first = this.#ring.copy(data, 0, at, Math.min(room, at + length));
      this.#ring.copy(data, first, 0, length - first);
    }
    return { cursor: from, data, next: from + length, dropped: Math.max(0, from - cursor) };
  }

  /** Resolves once there is something behind `cursor`, or can't be any more. Rejects with the signal's reason. */
  async wait(cursor, signal) {
    while (this.#end <= cursor && !this.#ended) {
      signal?.throwIfAborted();
      await new Promise((resolve) => {
        const wake = () => {
          this.#waiting.delete(wake);
          signal?.removeEventListener('abort', wake);
          resolve();
        };
        this.#waiting.add(wake);
        signal?.addEventListener('abort', wake);
      });
    }
    signal?.throwIfAborted();
  }

  /** Chunks from `cursor` on until the session has ended. A reader that is too slow finds out from `dropped`. */
  async *from(cursor = 0, signal) {
    for (;;) {
      await this.wait(cursor, signal);
      const chunk = this.read(cursor);
      if (chunk.data.length === 0) return;
      cursor = chunk.next;
      yield chunk;
    }
  }

  [Symbol.asyncIterator]() {
    return this.from(0);
  }

  #wake() {
    for (const wake of [...this.#waiting]) wake();
  }

  /** Grows in powers of two, so that a quiet terminal costs little; a byte's place changes with the size. */
  #makeRoom(wanted) {
    if (wanted <= this.#ring.length) return;
    let room = Math.max(this.#ring.length, Math.min(ROOM_BYTES_MIN, this.#max));
    while (room < wanted) room = Math.min(room * 2, this.#max);
    const { data } = this.read(this.#start, this.#max);
    this.#ring = Buffer.alloc(room);
    const at = this.#start % room;
    const first = data.copy(this.#ring, at);
    data.copy(this.#ring, 0, first);
  }
}

/**
 * Text of the chunks of one reader. A character cut by a chunk's end is put together again; where bytes were dropped, the
 * rest of a character that began before the gap is left out; what is no UTF-8 becomes U+FFFD.
 */
export async function* decodeText(chunks) {
  let decoder = new TextDecoder('utf-8', { ignoreBOM: true });
  for await (const { data, dropped } of chunks) {
    let bytes = data;
    if (dropped > 0) {
      const before = decoder.decode();
      if (before !== '') yield before;
      decoder = new TextDecoder('utf-8', { ignoreBOM: true });
      bytes = data.subarray(continuationBytes(data));
    }
    const text = decoder.decode(bytes, { stream: true });
    if (text !== '') yield text;
  }
  const rest = decoder.decode();
  if (rest !== '') yield rest;
}

/** How many bytes at the beginning can only be the rest of a character: three at most. */
function continuationBytes(data) {
  let count = 0;
  while (count < 3 && count < data.length && (data[count] & 0xc0) === 0x80) count += 1;
  return count;
}
