// What is to be run, found before anybody is asked about it: the approval shows the very file, and that file is started.
//
// The command is a list of words from the beginning. A single string would have to be split by somebody's rules, and a name
// would be looked up again later; both are guesses, so neither is done.

import { constants } from 'node:fs';
import { access, stat } from 'node:fs/promises';

import { PluginError } from './error.js';

/** Where a session looks for a command without a slash: the launcher's fixed PATH (docs/protocol.md). */
export const PATH = Object.freeze(['/usr/local/bin', '/usr/bin', '/bin']);

/** The limits of a start frame. */
export const COMMAND_BYTES_MAX = 4_096;
export const ARGS_MAX = 128;
export const ARG_BYTES_MAX = 16_384;
export const ARGS_BYTES_MAX = 65_536;

/**
 * The words to start and the file that will run. A name is looked up in the fixed PATH; one with a slash is taken from the
 * open directory (`base` is a path that leads to that descriptor, whatever its name is by now) or from the root.
 */
export async function resolveCommand(words, base, directory) {
  checkWords(words);
  const [name, ...args] = words;
  if (!name.includes('/')) {
    for (const place of PATH) {
      const file = `${place}/${name}`;
      if (await canExecute(file)) return { argv: [file, ...args], file };
    }
    throw new PluginError('bad-command', `${JSON.stringify(name)} is not in ${PATH.join(':')}`);
  }
  const absolute = name.startsWith('/');
  if (!(await canExecute(absolute ? name : `${base}/${name}`))) {
    throw new PluginError('bad-command', `${JSON.stringify(name)} is not a file that can be executed`);
  }
  // A relative name is left as it is: the session begins in that directory, wherever it has moved.
  return { argv: [name, ...args], file: absolute ? name : `${directory}/${name}` };
}

function checkWords(words) {
  const isText = (word) => typeof word === 'string' && word.isWellFormed() && !word.includes('\0');
  if (!words.every(isText)) throw new PluginError('bad-command', 'a word is not text, or has a NUL in it');
  const [command, ...args] = words.map((word) => Buffer.byteLength(word));
  const fits =
    command >= 1 &&
    command <= COMMAND_BYTES_MAX &&
    args.length <= ARGS_MAX &&
    args.every((bytes) => bytes <= ARG_BYTES_MAX) &&
    args.reduce((sum, bytes) => sum + bytes, 0) <= ARGS_BYTES_MAX;
  if (!fits) throw new PluginError('bad-command', 'the words are too many, too long, or none');
}

async function canExecute(file) {
  try {
    if (!(await stat(file)).isFile()) return false;
    await access(file, constants.X_OK);
    return true;
  } catch {
    return false;
  }
}

/**
 * The words as one line that means exactly one command, for a person and for a rule. OpenCode's rules know two signs, `*`
 * and `?`, and no way to quote them: in a saved rule a `*` of the command would allow what nobody has seen.
 */
export function describe(words) {
  return words
    .map((word) => (/^[A-Za-z0-9_@%+=:,./-]+$/.test(word) ? word : JSON.stringify(word)))
    .join(' ')
    .replace(/[*?]|[^ -~]/gu, (character) => `\\u{${character.codePointAt(0).toString(16)}}`);
}
