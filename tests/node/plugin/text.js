// Bytes of a terminal as text for a model: decoded at the edge, cut at characters, and bounded as JSON will show it.

/**
 * Most bytes of text in one result, counted as JSON writes them. OpenCode itself cuts a result at 51,200 bytes and 2,000
 * lines; what stays below that by a margin for the rest of the result is never cut by somebody who doesn't know about cursors.
 */
export const TEXT_BYTES_MAX = 40_960;

/** Longest line that is looked at as one; a longer one is looked at in pieces. Chosen. */
export const LINE_BYTES_MAX = 4_096;

/** How many of the first bytes can only be the rest of a character: three at most. */
export function continuationBytes(bytes) {
  let count = 0;
  while (count < 3 && count < bytes.length && (bytes[count] & 0xc0) === 0x80) count += 1;
  return count;
}

/** How many of the last bytes are the beginning of a character that is not complete: three at most. */
export function incompleteBytes(bytes) {
  for (let back = 1; back <= 3 && back <= bytes.length; back += 1) {
    const byte = bytes[bytes.length - back];
    if ((byte & 0xc0) === 0x80) continue;
    const length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    return length > back ? back : 0;
  }
  return 0;
}

/** Text of bytes; what is no UTF-8 becomes U+FFFD. */
export function decode(bytes) {
  return new TextDecoder('utf-8', { ignoreBOM: true }).decode(bytes);
}

/** How many bytes JSON needs for a text, without the quotes. */
export function jsonBytes(text) {
  return Buffer.byteLength(JSON.stringify(text)) - 2;
}

/**
 * The longest beginning of `bytes` whose text JSON writes in at most `max` bytes: how many bytes it takes, and the text.
 * A character cut by the end is left for the next read unless `whole` says that nothing follows.
 */
export function takeText(bytes, max, whole) {
  let length = whole ? bytes.length : bytes.length - incompleteBytes(bytes);
  let text = decode(bytes.subarray(0, length));
  // Each byte takes one byte of JSON at least and six at most, so a few rounds do.
  while (jsonBytes(text) > max) {
    const fraction = max / jsonBytes(text);
    length = Math.min(length - 1, Math.floor(length * fraction));
    length -= incompleteBytes(bytes.subarray(0, length));
    text = decode(bytes.subarray(0, length));
  }
  return { length, text };
}

/** The lines in `bytes`: where each begins, its bytes without the line's end, and whether it has one. */
export function* lines(bytes) {
  let at = 0;
  while (at < bytes.length) {
    const newline = bytes.indexOf(10, at);
    const end = newline === -1 ? bytes.length : newline;
    if (end - at > LINE_BYTES_MAX) {
      let cut = at + LINE_BYTES_MAX;
      cut -= incompleteBytes(bytes.subarray(at, cut));
      yield { at, end: cut, next: cut, complete: true };
      at = cut;
      continue;
    }
    const trimmed = end > at && bytes[end - 1] === 13 ? end - 1 : end;
    yield { at, end: trimmed, next: newline === -1 ? end : end + 1, complete: newline !== -1 };
    at = newline === -1 ? end : end + 1;
  }
}
