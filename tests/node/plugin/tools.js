// The six tools as every host gets them: what goes in, what comes out, and what happens in between.
//
// A tool's arguments are checked here even if the host has checked them, and so is each result, against a schema that bounds
// every text and every list: nothing is `undefined` (which breaks a host's JSON), nothing grows with a terminal's output.

import { setImmediate as breathe } from 'node:timers/promises';

import { decodeInput, WRITE_BYTES_MAX, WRITE_TEXT_MAX } from './escapes.js';
import { PluginError } from './error.js';
import { ARGS_MAX, ARG_BYTES_MAX, describe } from './command.js';
import { PATTERN_MAX, compileMatcher } from './matcher.js';
import { check, checkArguments } from './schema.js';
import { LIMITS } from './terminals.js';
import { TEXT_BYTES_MAX } from './text.js';

const RUNTIME_MAX = 3_600;
const PATH_MAX = 4_096;
const LINES_MAX = 2_000;

/** How long `pty_wait` waits by itself, and at most, in seconds. Chosen. */
const WAIT_DEFAULT = 30;
const WAIT_MAX = 600;

const object = (properties, required = Object.keys(properties)) => ({
  type: 'object',
  properties,
  required,
  additionalProperties: false,
});
const text = (maxLength, description, more = {}) => ({ type: 'string', maxLength, description, ...more });
const integer = (minimum, maximum, description) => ({ type: 'integer', minimum, maximum, description });
const flag = (description) => ({ type: 'boolean', description });
const nullable = (schema) => ({ anyOf: [schema, { type: 'null' }] });

const CURSOR_MAX = Number.MAX_SAFE_INTEGER;
const ID = { type: 'string', maxLength: 36, pattern: '^pty_[0-9a-f]{32}$', description: 'The terminal, as pty_spawn named it.' };
const CURSOR = integer(0, CURSOR_MAX, 'A place in the output, in bytes from its beginning, as `next` or `end` of a result.');
const PATTERNS = {
  literal: text(PATTERN_MAX, 'Text that a line must contain.', { minLength: 1 }),
  regex: text(PATTERN_MAX, 'Regular expression for a line; without look-around and back references.', { minLength: 1 }),
  ignore_case: flag('Whether upper and lower case are the same.'),
};
const EXIT = nullable(
  object({
    code: nullable(integer(0, 0xffff_ffff, 'Exit code.')),
    signal: nullable(integer(0, 0xffff_ffff, 'Number of the signal.')),
    result: text(64, 'success, exit-code, signal, timeout, oom-kill, stopped, lost, …'),
    stopped: flag('Whether it was ended by pty_kill.'),
  }),
);
const STATE = { running: flag('Whether it runs.'), exit: EXIT };

/** A path of a hundred directories can be longer than any limit; a result can't. */
const shortened = (path) => (path.length > PATH_MAX ? `${path.slice(0, PATH_MAX - 1)}…`.toWellFormed() : path.toWellFormed());

export const TOOLS = Object.freeze([
  {
    name: 'pty_spawn',
    description:
      'Start a program in a terminal of its own and get its id. It runs until it ends, pty_kill, its runtime is over, or this session is deleted. Give the command as words; there is no shell unless you start one, e.g. ["bash", "-lc", "npm test"] or ["bash", "-i"].',
    input: object(
      {
        command: {
          type: 'array',
          minItems: 1,
          maxItems: ARGS_MAX + 1,
          items: text(ARG_BYTES_MAX, 'A word.'),
          description: 'The program and its arguments, a word each.',
        },
        directory: text(PATH_MAX, "Where it starts; the session's directory if not given. Not a symbolic link.", { minLength: 1 }),
        runtime: integer(1, RUNTIME_MAX, `Seconds after which it is ended, ${RUNTIME_MAX} if not given.`),
        notify: flag('Whether this session gets a message when it ends by itself.'),
      },
      ['command'],
    ),
    output: object({ id: ID, unit: text(64), directory: text(PATH_MAX), command: text(256) }),
    async run(terminals, call, { command, directory = '.', runtime = RUNTIME_MAX, notify = false }) {
      const terminal = await terminals.spawn(call, { command, directory, runtime, notify });
      const { id, unit } = terminal;
      return { id, unit, directory: shortened(terminal.directory), command: terminal.command };
    },
  },
  {
    name: 'pty_write',
    description: `Type into a terminal. Escapes are decoded: \\r is Enter, \\x03 is Ctrl-C, \\x04 is Ctrl-D, \\e is Escape, \\u00e9; a backslash itself is \\\\. At most ${WRITE_BYTES_MAX} bytes.`,
    input: object(
      {
        id: ID,
        data: text(WRITE_TEXT_MAX, 'What to type.', { minLength: 1 }),
        raw: flag('Whether backslashes are typed as they are.'),
      },
      ['id', 'data'],
    ),
    output: object({ id: ID, bytes: integer(1, WRITE_BYTES_MAX) }),
    async run(terminals, call, { id, data, raw }) {
      const terminal = terminals.get(call.session, id);
      const bytes = decodeInput(data, raw);
      await terminal.write(bytes, call.signal);
      return { id, bytes: bytes.length };
    },
  },
  {
    name: 'pty_read',
    description: `Read what a terminal printed: from a cursor on, or its last lines, all of it or the lines that match. The newest ${LIMITS.outputBytes} bytes are kept. Pass \`next\` as the next cursor.`,
    input: object(
      {
        id: ID,
        cursor: CURSOR,
        tail: integer(1, LINES_MAX, 'How many of the last (matching) lines.'),
        max_bytes: integer(256, TEXT_BYTES_MAX, 'Most bytes of text in the result.'),
        ...PATTERNS,
      },
      ['id'],
    ),
    output: object({
      id: ID,
      text: text(TEXT_BYTES_MAX),
      from: CURSOR,
      next: CURSOR,
      end: CURSOR,
      dropped: integer(0, CURSOR_MAX),
      more: flag('Whether there is more to read right now.'),
      matches: nullable(integer(0, CURSOR_MAX)),
      ...STATE,
    }),
    async run(terminals, call, { id, cursor, tail, max_bytes: max, ...patterns }) {
      const terminal = terminals.get(call.session, id);
      if (cursor !== undefined && tail !== undefined && patterns.literal === undefined && patterns.regex === undefined) {
        throw new PluginError('bad-input', 'cursor and tail exclude each other');
      }
      return terminal.read({ cursor, tail, max, matcher: compileMatcher(patterns) }, call.signal);
    },
  },
  {
    name: 'pty_wait',
    description: `Wait until a program ends, or prints something behind a cursor (a line that matches literal or regex, if given). At most ${WAIT_MAX} s.`,
    input: object(
      {
        id: ID,
        until: { type: 'string', enum: ['exit', 'output'], maxLength: 6, description: 'What to wait for.' },
        cursor: CURSOR,
        timeout: integer(0, WAIT_MAX, `Seconds to wait, ${WAIT_DEFAULT} if not given.`),
        ...PATTERNS,
      },
      ['id', 'until'],
    ),
    output: object({
      id: ID,
      reason: { type: 'string', enum: ['exit', 'output', 'timeout'], maxLength: 7 },
      end: CURSOR,
      ...STATE,
    }),
    async run(terminals, call, { id, until, cursor, timeout = WAIT_DEFAULT, ...patterns }) {
      const terminal = terminals.get(call.session, id);
      const matcher = compileMatcher(patterns);
      if (until === 'exit' && (matcher !== null || cursor !== undefined)) {
        throw new PluginError('bad-input', 'a pattern or cursor goes with until: output');
      }
      return terminal.wait({ until, cursor, matcher, time: timeout * 1_000 }, call.signal);
    },
  },
  {
    name: 'pty_list',
    description: "List this session's terminals, the running ones and those that ended lately.",
    input: object({}, []),
    output: object({
      terminals: {
        type: 'array',
        maxItems: LIMITS.terminals + LIMITS.ended + 1,
        items: object({ id: ID, command: text(256), directory: text(256), end: CURSOR, age_seconds: integer(0, CURSOR_MAX), ...STATE }),
      },
    }),
    async run(terminals, call) {
      const shown = terminals.list(call.session).map((terminal) => ({
        id: terminal.id,
        command: terminal.command,
        directory: shortened(terminal.directory).slice(0, 255).toWellFormed(),
        end: terminal.end,
        age_seconds: Math.max(0, Math.floor((Date.now() - terminal.started) / 1_000)),
        ...terminal.state(),
      }));
      return { terminals: shown };
    },
  },
  {
    name: 'pty_kill',
    description: 'End everything that runs in a terminal. Its output stays readable for a while.',
    input: object({ id: ID }),
    output: object({ id: ID, end: CURSOR, ...STATE }),
    async run(terminals, call, { id }) {
      const terminal = terminals.get(call.session, id);
      await terminal.kill();
      return { id, end: terminal.end, ...terminal.state() };
    },
  },
]);

/** One call of one tool, from what a model sent to a result that may be shown to it. */
export async function runTool(tool, terminals, call, input) {
  try {
    const given = argumentsOf(tool, input);
    const result = await tool.run(terminals, call, given);
    // A host that calls again as soon as it has an answer would otherwise never let a terminal's bytes in.
    await breathe();
    check(tool.output, result, 'the result');
    return result;
  } catch (error) {
    // What the host threw when it was asked must reach the host as it is: it stops the model by that.
    if (typeof error === 'object' && error !== null && hostErrors.has(error)) throw error;
    throw PluginError.from(error);
  }
}

const hostErrors = new WeakSet();

/** Asks the host; remembers its refusal as its own. */
export async function askHost(ask) {
  try {
    await ask();
  } catch (error) {
    if (typeof error === 'object' && error !== null) hostErrors.add(error);
    throw error;
  }
}

function argumentsOf(tool, input) {
  try {
    return checkArguments(tool.input, input ?? {});
  } catch (error) {
    throw new PluginError('bad-input', error.message);
  }
}

/**
 * What an approval is about: exactly this command in exactly this directory, whatever that is called. `resource` is what rules
 * are matched with and what "always" saves; it has none of the two signs that rules know.
 */
export function permissionOf({ argv, file, directory, device, inode, runtime }) {
  return {
    resource: `${describe([directory])} (${device}:${inode}): ${describe(argv)}`,
    metadata: { directory, device, inode, file, command: [...argv], runtime },
  };
}

/** What a session is told when a terminal has ended. Nothing that the program printed: that would speak as the user. */
export function notice({ id, exit, end }) {
  const how = exit.code !== null ? `exit code ${exit.code}` : exit.signal !== null ? `signal ${exit.signal}` : 'nobody knows how';
  return `Terminal ${id} has ended: ${how} (${exit.result}), ${end} bytes of output. Use pty_read to see them.`;
}
