// Everything that needs neither a supervisor nor a host: escapes, patterns, text, commands, schemas.

import assert from 'node:assert/strict';
import { chmod, mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';

import { describe, resolveCommand } from '../command.js';
import { PluginError } from '../error.js';
import { WRITE_BYTES_MAX, decodeInput } from '../escapes.js';
import { PATTERN_MAX, RegexMatcher, compileMatcher } from '../matcher.js';
import { check, checkArguments } from '../schema.js';
import { LINE_BYTES_MAX, decode, incompleteBytes, jsonBytes, lines, takeText } from '../text.js';
import { TOOLS, notice, permissionOf } from '../tools.js';

/** A small generator with a seed, so that a failure can be had again. */
function random(seed) {
  let state = seed >>> 0;
  return (below) => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}

const badInput = (error) => error instanceof PluginError && error.code === 'bad-input';

test('escapes become the bytes they stand for', () => {
  const cases = [
    ['ls\\r', 'ls\r'],
    ['\\x03', '\x03'],
    ['\\e[A', '\x1b[A'],
    ['\\u00e9\\u{1f600}', 'é😀'],
    ['\\ud83d\\ude00', '😀'],
    ['a\\\\n', 'a\\n'],
    ['\\0\\a\\b\\f\\v\\t\\n\\\'\\"', '\0\x07\b\f\v\t\n\'"'],
    ['kein Escape', 'kein Escape'],
  ];
  for (const [text, wanted] of cases) assert.deepEqual(decodeInput(text), Buffer.from(wanted), text);
  assert.deepEqual(decodeInput('\\x03', true), Buffer.from('\\x03'));
});

test('an escape that nobody defined is refused, and so is half a character', () => {
  for (const text of ['\\q', '\\x80', '\\x1', '\\u12', '\\u{110000}', '\\u{}', 'end\\', '\\ud83d', '\ud83d', '', '\\c']) {
    assert.throws(() => decodeInput(text), badInput, JSON.stringify(text));
  }
});

test('a write is measured after decoding, in UTF-8', () => {
  assert.equal(decodeInput('\\x41'.repeat(WRITE_BYTES_MAX)).length, WRITE_BYTES_MAX);
  assert.equal(decodeInput('é'.repeat(WRITE_BYTES_MAX / 2)).length, WRITE_BYTES_MAX);
  assert.throws(() => decodeInput('\\x41'.repeat(WRITE_BYTES_MAX + 1)), badInput);
  assert.throws(() => decodeInput(`${'é'.repeat(WRITE_BYTES_MAX / 2)}a`), badInput);
});

test('a pattern means what it means in JavaScript', () => {
  const next = random(7);
  const atoms = ['a', 'b', 'c', '.', '[ab]', '[^a]', '\\d', '\\w', '(?:ab)', '(a|b)', 'é', '\\b', '^', '$', '[b-c-]', '\\.'];
  const quantifiers = ['', '', '', '*', '+', '?', '{2}', '{1,3}', '{0,}', '*?'];
  // No character beyond U+FFFF: Node 26.4 itself says that /[^a]$/u is not in '😀'. They have a test of their own.
  const letters = ['a', 'b', 'c', '1', ' ', 'é', '.', '-'];
  const part = () => {
    const atom = atoms[next(atoms.length)];
    return /^(\\b|\^|\$)$/.test(atom) ? atom : atom + quantifiers[next(quantifiers.length)];
  };
  let matched = 0;
  for (let round = 0; round < 4_000; round += 1) {
    let pattern = Array.from({ length: 1 + next(4) }, part).join('');
    if (next(4) === 0) pattern = `(?:${pattern})${['', '*', '+', '{2}'][next(4)]}|${part()}`;
    const ignoreCase = next(2) === 0;
    const ours = new RegexMatcher(pattern, ignoreCase);
    const theirs = new RegExp(pattern, ignoreCase ? 'iu' : 'u');
    for (let count = 0; count < 6; count += 1) {
      let line = Array.from({ length: next(8) }, () => letters[next(letters.length)]).join('');
      if (ignoreCase && next(2) === 0) line = line.toUpperCase();
      const wanted = theirs.test(line);
      matched += wanted ? 1 : 0;
      assert.equal(ours.test(line), wanted, `${pattern} on ${JSON.stringify(line)}`);
    }
  }
  assert.ok(matched > 2_000, `only ${matched} lines matched: the loop shows nothing`);
});

test('a character beyond U+FFFF is one character', () => {
  for (const pattern of ['[^a]$', '^.$', '^[😀]$', '^[\u{1f600}-\u{1f64f}]$', '^😀{1}$', '^\u{1f600}$']) {
    assert.equal(new RegexMatcher(pattern).test('😀'), true, pattern);
  }
  assert.equal(new RegexMatcher('^..$').test('😀'), false);
});

test('patterns that make a backtracking engine hang are answered', () => {
  // Each would take JavaScript longer than the universe has.
  for (const pattern of ['(a*)*b', '(a|a)*b', '(a+)+$', '(.*.*.*.*)*x', '(?:a?){100}a{100}b']) {
    const matcher = new RegexMatcher(pattern);
    assert.equal(matcher.test('a'.repeat(LINE_BYTES_MAX - 1) + '!'), false, pattern);
  }
});

test('a pattern that cannot be followed in linear time, or is too long, is refused', () => {
  const refused = ['(?=a)', '(?!a)', '(?<=a)', '(?<n>a)', '\\1', '\\k<n>', '\\p{L}', 'a{201}', '(a{200}){200}', '*', 'a**', '(', ')',
    '[', '[b-a]', 'a{2,1}', '{', '\\', '\\u{zz}', '\\x4', '\\z', '^*', 'a'.repeat(PATTERN_MAX + 1), '((((a{50}){50}){50}){50})', `[${'ab'.repeat(20)}]{30}`];
  for (const regex of refused) assert.throws(() => compileMatcher({ regex }), badInput, regex.slice(0, 40));
  assert.throws(() => compileMatcher({ literal: 'a', regex: 'a' }), badInput);
  assert.throws(() => compileMatcher({ literal: 'a'.repeat(PATTERN_MAX + 1) }), badInput);
  assert.equal(compileMatcher({}), null);
  assert.equal(compileMatcher({ literal: 'A(', ignore_case: true }).test('xa(y'), true);
  assert.equal(compileMatcher({ literal: 'A(' }).test('xa(y'), false);
});

test('text is cut at characters, and bounded as JSON writes it', () => {
  const next = random(11);
  const alphabet = ['a', '\n', '\x1b', 'é', '€', '😀', '"', '\0'];
  for (let round = 0; round < 300; round += 1) {
    const whole = Array.from({ length: 1 + next(400) }, () => alphabet[next(alphabet.length)]).join('');
    const bytes = Buffer.from(whole);
    let at = 0;
    let read = '';
    while (at < bytes.length) {
      const max = 256 + next(200);
      const { length, text } = takeText(bytes.subarray(at), max, true);
      assert.ok(length > 0 && jsonBytes(text) <= max);
      read += text;
      at += length;
    }
    assert.equal(read, whole);
  }
});

test('a character that is cut by the end waits for its rest', () => {
  const euro = Buffer.from('a€');
  assert.deepEqual(takeText(euro.subarray(0, 3), 256, false), { length: 1, text: 'a' });
  assert.deepEqual(takeText(euro.subarray(0, 3), 256, true), { length: 3, text: 'a\ufffd' });
  assert.equal(incompleteBytes(Buffer.from([0xf0, 0x9f, 0x98])), 3);
  assert.equal(incompleteBytes(Buffer.from([0x80, 0x80])), 0);
});

test('lines are found with their places, and a long one in pieces', () => {
  const bytes = Buffer.from(`one\r\n\ntwo${'x'.repeat(LINE_BYTES_MAX)}\nrest`);
  const found = [...lines(bytes)].map(({ at, end, next, complete }) => [decode(bytes.subarray(at, end)), next, complete]);
  assert.deepEqual(found[0], ['one', 5, true]);
  assert.deepEqual(found[1], ['', 6, true]);
  assert.equal(found[2][0].length, LINE_BYTES_MAX);
  assert.deepEqual(found[3], ['xxx', 6 + 3 + LINE_BYTES_MAX + 1, true]);
  assert.deepEqual(found[4], ['rest', bytes.length, false]);
});

test('a command is found before anybody is asked, and not guessed', async () => {
  const directory = await mkdtemp(join(tmpdir(), 'plugin-command-'));
  try {
    await writeFile(join(directory, 'tool'), '#!/bin/sh\n');
    await chmod(join(directory, 'tool'), 0o755);
    await writeFile(join(directory, 'plain'), '');
    await mkdir(join(directory, 'folder'));
    const resolved = (...words) => resolveCommand(words, directory, '/shown');
    const { argv, file } = await resolved('sh', '-c', 'x y');
    assert.match(file, /^\/(usr\/local\/bin|usr\/bin|bin)\/sh$/);
    assert.deepEqual(argv, [file, '-c', 'x y']);
    assert.deepEqual(await resolved('./tool'), { argv: ['./tool'], file: '/shown/./tool' });
    // A file of the workspace never stands in for a name.
    for (const words of [['tool'], ['plain'], ['./plain'], ['./folder'], ['sh -c x'], ['/nowhere/x'], [''], ['a\0b'], ['\ud800']]) {
      await assert.rejects(resolved(...words), (error) => error.code === 'bad-command', JSON.stringify(words));
    }
    await assert.rejects(resolved('sh', ...Array(129).fill('a')), (error) => error.code === 'bad-command');
  } finally {
    await rm(directory, { recursive: true });
  }
});

test('what is approved has no sign that a rule would take for anything else', () => {
  const line = describe(['sh', '-c', 'rm * ?', 'é\n']);
  assert.doesNotMatch(line, /[*?]|[^ -~]/u);
  assert.notEqual(describe(['a b']), describe(['a', 'b']));
  const { resource } = permissionOf({ argv: ['ls'], file: '/bin/ls', directory: '/a *', device: '1', inode: '2', runtime: 3 });
  assert.doesNotMatch(resource, /[*?]/);
});

test('two different commands never look the same in an approval', () => {
  const next = random(3);
  const letters = ['a', '*', '?', '"', '\\', ' ', '{', 'u', '2', 'é'];
  const seen = new Map();
  for (let round = 0; round < 20_000; round += 1) {
    const words = Array.from({ length: 1 + next(3) }, () => Array.from({ length: next(4) }, () => letters[next(letters.length)]).join(''));
    const line = describe(words);
    const known = seen.get(line);
    if (known !== undefined) assert.deepEqual(words, known, line);
    seen.set(line, words);
  }
});

test('arguments are checked, and null is "not given"', () => {
  const schema = TOOLS.find(({ name }) => name === 'pty_read').input;
  const id = `pty_${'0'.repeat(32)}`;
  assert.deepEqual(checkArguments(schema, { id, cursor: null, tail: 3 }), { id, tail: 3 });
  for (const wrong of [{}, { id: 'x' }, { id, cursor: -1 }, { id, cursor: 1.5 }, { id, tail: '3' }, { id, more: 1 }, null, [], 'x']) {
    assert.throws(() => checkArguments(schema, wrong), TypeError, JSON.stringify(wrong));
  }
});

test('a result with undefined in it, or a stranger, is caught', () => {
  const schema = TOOLS.find(({ name }) => name === 'pty_write').output;
  const id = `pty_${'0'.repeat(32)}`;
  check(schema, { id, bytes: 3 });
  for (const wrong of [{ id, bytes: undefined }, { id }, { id, bytes: 3, more: undefined }, { id, bytes: 0 }]) {
    assert.throws(() => check(schema, wrong), TypeError);
  }
});

test('every text and list in every schema is bounded', () => {
  const walk = (schema, where) => {
    if (schema.anyOf) return schema.anyOf.forEach((option) => walk(option, where));
    if (schema.type === 'string') assert.ok(schema.maxLength > 0, where);
    if (schema.type === 'integer') assert.ok(Number.isSafeInteger(schema.maximum), where);
    if (schema.type === 'array') {
      assert.ok(schema.maxItems > 0, where);
      walk(schema.items, `${where}[]`);
    }
    if (schema.type === 'object') {
      assert.equal(schema.additionalProperties, false, where);
      for (const [name, entry] of Object.entries(schema.properties)) walk(entry, `${where}.${name}`);
    }
    return undefined;
  };
  for (const { name, input, output } of TOOLS) {
    walk(input, `${name} in`);
    walk(output, `${name} out`);
  }
});

test('messages are one bounded line', () => {
  const error = new PluginError('x', `a\nb\x1b${'c'.repeat(10_000)}`);
  assert.doesNotMatch(error.message, /[\n\x1b]/);
  assert.ok(error.message.length <= 1_001);
});

test('a notice says how it ended and nothing that was printed', () => {
  const exit = { code: null, signal: 9, result: 'signal', stopped: false };
  assert.match(notice({ id: 'pty_x', exit, end: 5 }), /pty_x has ended: signal 9 \(signal\), 5 bytes/);
});
