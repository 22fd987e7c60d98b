// What an agent types, as text with escapes, and the bytes that come of it.
//
// A model writes JSON, where a real control character is awkward; so `\r`, `\x03` and the like are decoded here, once, and a
// sequence nobody defined is refused, not passed on as it looks. No I/O.

import { PluginError } from './error.js';

/** Most bytes of one write, after decoding. Two input frames hold exactly that much. */
export const WRITE_BYTES_MAX = 65_536;

/** Most characters before decoding: `\u{10ffff}` is the longest way to write four bytes. */
export const WRITE_TEXT_MAX = 10 * WRITE_BYTES_MAX;

const SIMPLE = new Map([
  ['n', '\n'],
  ['r', '\r'],
  ['t', '\t'],
  ['b', '\b'],
  ['f', '\f'],
  ['v', '\v'],
  ['a', '\x07'],
  ['e', '\x1b'],
  ['0', '\0'],
  ['\\', '\\'],
  ['"', '"'],
  ["'", "'"],
]);

const ESCAPE = /\\(?:x([0-7][0-9A-Fa-f])|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}|(.|$))/gsu;

/** The bytes to type. `raw` leaves backslashes alone. */
export function decodeInput(text, raw = false) {
  if (text.length > WRITE_TEXT_MAX) throw tooLong();
  const decoded = raw ? text : text.replace(ESCAPE, decodeEscape);
  // Two escaped halves of one character have met by now; a half that is alone has no UTF-8.
  if (!decoded.isWellFormed()) throw new PluginError('bad-input', 'half a surrogate pair has no UTF-8');
  const bytes = Buffer.from(decoded, 'utf8');
  if (bytes.length > WRITE_BYTES_MAX) throw tooLong();
  if (bytes.length === 0) throw new PluginError('bad-input', 'there is nothing to write');
  return bytes;
}

function decodeEscape(sequence, ascii, unit, point, simple) {
  if (ascii !== undefined) return String.fromCharCode(Number.parseInt(ascii, 16));
  if (unit !== undefined) return String.fromCharCode(Number.parseInt(unit, 16));
  if (point !== undefined) {
    const code = Number.parseInt(point, 16);
    if (code > 0x10ffff) throw unknown(sequence);
    return String.fromCodePoint(code);
  }
  const character = SIMPLE.get(simple);
  if (character === undefined) throw unknown(sequence);
  return character;
}

function unknown(sequence) {
  const hint = /^\\x/.test(sequence) ? ' (\\x takes 00 to 7f; a character beyond is \\u0080 and up)' : '';
  return new PluginError('bad-input', `unknown escape ${JSON.stringify(sequence)}${hint}`);
}

function tooLong() {
  return new PluginError('bad-input', `one write takes at most ${WRITE_BYTES_MAX} bytes`);
}
