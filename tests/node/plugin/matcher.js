// Finds text in lines, by a literal or a regular expression, in time that is linear in the line.
//
// JavaScript's own expressions backtrack: `(a|a)*b` on forty letters takes minutes, and nothing can stop it. So a pattern is
// compiled to a small program whose every state is followed at the same time, once per character (Thompson's construction).
// What cannot be done that way, back references and looking around, is refused, and so is a pattern whose program is too long.
// The rest means what it means in JavaScript with the flag `u`, less Unicode's own classes. No I/O.

import { PluginError } from './error.js';

/** Longest pattern or literal, in characters. Chosen: longer ones are not written by hand. */
export const PATTERN_MAX = 512;

/**
 * Most work one character of a line may be: the program's steps, a set counted by its members. Chosen: `.{1,200}` in a few
 * places fits, and the longest line takes a tenth of a second at worst.
 */
export const COST_MAX = 1_000;

/** Most repetitions that `{…}` may ask for. Chosen. */
const REPEAT_MAX = 200;

/** Something with `test(line)`, from what a tool was given; null if it was given nothing to look for. */
export function compileMatcher({ literal, regex, ignore_case: ignoreCase = false }) {
  if (literal !== undefined && regex !== undefined) {
    throw new PluginError('bad-input', 'literal and regex exclude each other');
  }
  if (literal !== undefined) return new LiteralMatcher(bounded(literal), ignoreCase);
  if (regex !== undefined) return new RegexMatcher(bounded(regex), ignoreCase);
  return null;
}

function bounded(text) {
  if (text.length === 0) throw new PluginError('bad-input', 'an empty pattern matches everything');
  if (text.length > PATTERN_MAX) throw new PluginError('bad-input', `a pattern has at most ${PATTERN_MAX} characters`);
  return text;
}

/** Plain text. */
export class LiteralMatcher {
  #text;
  #ignoreCase;

  constructor(text, ignoreCase = false) {
    this.#text = ignoreCase ? text.toLowerCase() : text;
    this.#ignoreCase = ignoreCase;
  }

  /** How much work one character of a line is. */
  get cost() {
    return 1;
  }

  test(line) {
    return (this.#ignoreCase ? line.toLowerCase() : line).includes(this.#text);
  }
}

// One step of a program: a character to be taken, or a fork, a jump or a condition that takes none.
const CHARACTER = 0;
const SPLIT = 1;
const JUMP = 2;
const CONDITION = 3;
const MATCH = 4;

/** A regular expression. */
export class RegexMatcher {
  #program;
  #cost;
  #stack = [];
  #seen;
  #generation = 0;

  constructor(pattern, ignoreCase = false) {
    const tree = new Parser(pattern, ignoreCase).parse();
    this.#program = [];
    emit(tree, this.#program);
    append(this.#program, { op: MATCH });
    this.#seen = new Uint32Array(this.#program.length);
    this.#cost = this.#program.reduce((sum, step) => sum + (step.weight ?? 1), 0);
    if (this.#cost > COST_MAX) throw tooComplex();
  }

  /** How much work one character of a line is, at worst. */
  get cost() {
    return this.#cost;
  }

  /** Whether it occurs anywhere in the line. */
  test(line) {
    const points = Array.from(line, (character) => character.codePointAt(0));
    let current = [];
    for (let at = 0; ; at += 1) {
      const before = at > 0 ? points[at - 1] : -1;
      const after = at < points.length ? points[at] : -1;
      // Each place of the line may be where it begins.
      const next = [];
      this.#generation = (this.#generation + 1) >>> 0;
      if (this.#generation === 0) this.#seen.fill((this.#generation = 1) - 1);
      for (const step of current) if (this.#follow(step, before, after, next)) return true;
      if (this.#follow(0, before, after, next)) return true;
      if (at === points.length) return false;
      current = [];
      for (const step of next) if (this.#program[step].takes(after)) current.push(step + 1);
    }
  }

  /** Adds to `list` the steps that take a character and can be reached from `from` without one; true if that is the end. */
  #follow(from, before, after, list) {
    const stack = this.#stack;
    stack.length = 0;
    stack.push(from);
    while (stack.length > 0) {
      const at = stack.pop();
      if (this.#seen[at] === this.#generation) continue;
      this.#seen[at] = this.#generation;
      const step = this.#program[at];
      switch (step.op) {
        case CHARACTER:
          list.push(at);
          break;
        case SPLIT:
          stack.push(step.other, at + 1);
          break;
        case JUMP:
          stack.push(step.to);
          break;
        case CONDITION:
          if (step.holds(before, after)) stack.push(at + 1);
          break;
        case MATCH:
          return true;
      }
    }
    return false;
  }
}

function append(program, step) {
  if (program.length >= COST_MAX) throw tooComplex();
  program.push(step);
  return step;
}

/** Appends a tree's steps; each ends by falling through to what comes behind it. */
function emit(node, program) {
  switch (node.kind) {
    case 'character':
      append(program, { op: CHARACTER, takes: node.takes, weight: node.weight });
      break;
    case 'condition':
      append(program, { op: CONDITION, holds: node.holds });
      break;
    case 'sequence':
      for (const part of node.parts) emit(part, program);
      break;
    case 'choice': {
      const jumps = [];
      node.parts.forEach((part, index) => {
        if (index === node.parts.length - 1) {
          emit(part, program);
          return;
        }
        const split = append(program, { op: SPLIT, other: 0 });
        emit(part, program);
        jumps.push(append(program, { op: JUMP, to: 0 }));
        split.other = program.length;
      });
      for (const jump of jumps) jump.to = program.length;
      break;
    }
    case 'repeat': {
      for (let count = 0; count < node.least; count += 1) emit(node.part, program);
      if (node.most === Infinity) {
        const start = program.length;
        const split = append(program, { op: SPLIT, other: 0 });
        emit(node.part, program);
        append(program, { op: JUMP, to: start });
        split.other = program.length;
      } else {
        const splits = [];
        for (let count = node.least; count < node.most; count += 1) {
          splits.push(append(program, { op: SPLIT, other: 0 }));
          emit(node.part, program);
        }
        for (const split of splits) split.other = program.length;
      }
      break;
    }
  }
}

const isDigit = (point) => point >= 0x30 && point <= 0x39;
const isWord = (point) =>
  isDigit(point) || (point >= 0x41 && point <= 0x5a) || (point >= 0x61 && point <= 0x7a) || point === 0x5f;
const SPACES = new Set([9, 10, 11, 12, 13, 0x20, 0xa0, 0x1680, 0x2028, 0x2029, 0x202f, 0x205f, 0x3000, 0xfeff]);
const isSpace = (point) => SPACES.has(point) || (point >= 0x2000 && point <= 0x200a);
const isLineEnd = (point) => point === 10 || point === 13 || point === 0x2028 || point === 0x2029;

const CLASSES = new Map([
  ['d', isDigit],
  ['D', (point) => !isDigit(point)],
  ['w', isWord],
  ['W', (point) => !isWord(point)],
  ['s', isSpace],
  ['S', (point) => !isSpace(point)],
]);

const CONTROLS = new Map([
  ['t', 9],
  ['n', 10],
  ['v', 11],
  ['f', 12],
  ['r', 13],
]);

const BOUNDARY = (before, after) => isWord(before) !== isWord(after);

/** Pattern to tree. */
class Parser {
  #points;
  #at = 0;
  #ignoreCase;

  constructor(pattern, ignoreCase) {
    this.#points = Array.from(pattern);
    this.#ignoreCase = ignoreCase;
  }

  parse() {
    const tree = this.#choice();
    if (this.#at < this.#points.length) throw refused('a parenthesis closes nothing');
    return tree;
  }

  #peek() {
    return this.#points[this.#at];
  }

  #take() {
    const character = this.#points[this.#at];
    if (character === undefined) throw refused('it ends in the middle');
    this.#at += 1;
    return character;
  }

  #takeIf(character) {
    if (this.#peek() !== character) return false;
    this.#at += 1;
    return true;
  }

  #choice() {
    const parts = [this.#sequence()];
    while (this.#takeIf('|')) parts.push(this.#sequence());
    return parts.length === 1 ? parts[0] : { kind: 'choice', parts };
  }

  #sequence() {
    const parts = [];
    while (this.#peek() !== undefined && this.#peek() !== '|' && this.#peek() !== ')') parts.push(this.#repeated());
    return { kind: 'sequence', parts };
  }

  #repeated() {
    const part = this.#atom();
    const bounds = this.#quantifier();
    if (bounds === null) return part;
    if (part.kind === 'condition') throw refused('an assertion cannot be repeated');
    // Lazy or greedy: no difference for whether it occurs.
    this.#takeIf('?');
    if ('*+?{'.includes(this.#peek() ?? ' ')) throw refused('a quantifier follows a quantifier');
    return { kind: 'repeat', part, ...bounds };
  }

  #quantifier() {
    if (this.#takeIf('*')) return { least: 0, most: Infinity };
    if (this.#takeIf('+')) return { least: 1, most: Infinity };
    if (this.#takeIf('?')) return { least: 0, most: 1 };
    if (!this.#takeIf('{')) return null;
    const least = this.#number();
    let most = least;
    if (this.#takeIf(',')) most = this.#peek() === '}' ? Infinity : this.#number();
    if (this.#take() !== '}') throw refused('a brace is not a quantifier; write \\{');
    if (most < least) throw refused('a quantifier has its numbers in the wrong order');
    return { least, most };
  }

  #number() {
    let digits = '';
    while (/^[0-9]$/.test(this.#peek() ?? '')) digits += this.#take();
    if (digits === '' || digits.length > 4) throw refused('a brace is not a quantifier; write \\{');
    const number = Number(digits);
    if (number > REPEAT_MAX) throw refused(`it repeats more than ${REPEAT_MAX} times`);
    return number;
  }

  #atom() {
    const character = this.#take();
    switch (character) {
      case '(':
        return this.#group();
      case '[':
        return this.#set();
      case '.':
        return { kind: 'character', takes: (point) => !isLineEnd(point) };
      case '^':
        return { kind: 'condition', holds: (before) => before === -1 };
      case '$':
        return { kind: 'condition', holds: (_before, after) => after === -1 };
      case '\\':
        return this.#escape();
      case '*':
      case '+':
      case '?':
        throw refused('a quantifier has nothing to repeat');
      case '{':
      case '}':
      case ']':
        throw refused(`${character} stands alone; write \\${character}`);
      default:
        return this.#character(character.codePointAt(0));
    }
  }

  #group() {
    if (this.#takeIf('?') && !this.#takeIf(':')) throw refused('of the groups with (? only (?: is known');
    const tree = this.#choice();
    if (!this.#takeIf(')')) throw refused('a parenthesis is not closed');
    return tree;
  }

  #escape() {
    const character = this.#take();
    if (character === 'b') return { kind: 'condition', holds: BOUNDARY };
    if (character === 'B') return { kind: 'condition', holds: (before, after) => !BOUNDARY(before, after) };
    const known = CLASSES.get(character);
    if (known !== undefined) return { kind: 'character', takes: known };
    return this.#character(this.#escapedPoint(character));
  }

  #escapedPoint(character) {
    const control = CONTROLS.get(character);
    if (control !== undefined) return control;
    if (character === 'x') return this.#hex(2);
    if (character === 'u') {
      if (!this.#takeIf('{')) return this.#hex(4);
      let digits = '';
      while (this.#peek() !== '}') digits += this.#take();
      this.#take();
      if (!/^[0-9A-Fa-f]{1,6}$/.test(digits)) throw refused('\\u{…} is no character');
      return Number.parseInt(digits, 16);
    }
    if (/^[0-9]$/.test(character) && character !== '0') throw refused('back references are not known');
    if (character === '0' && !/^[0-9]$/.test(this.#peek() ?? '')) return 0;
    if (/^[A-Za-z0-9]$/.test(character)) throw refused(`\\${character} is not known`);
    return character.codePointAt(0);
  }

  #hex(count) {
    let digits = '';
    for (let index = 0; index < count; index += 1) digits += this.#take();
    if (!/^[0-9A-Fa-f]+$/.test(digits)) throw refused('an escape has a digit that is none');
    return Number.parseInt(digits, 16);
  }

  #set() {
    const negated = this.#takeIf('^');
    const tests = [];
    while (!this.#takeIf(']')) {
      const first = this.#setMember();
      if (this.#peek() === '-' && this.#points[this.#at + 1] !== ']') {
        this.#take();
        const last = this.#setMember();
        if (typeof first !== 'number' || typeof last !== 'number' || last < first) {
          throw refused('a range of a set is not one');
        }
        tests.push((point) => point >= first && point <= last);
      } else {
        tests.push(typeof first === 'number' ? (point) => point === first : first);
      }
    }
    const within = (point) => tests.some((test) => test(point));
    const folded = this.#ignoreCase ? (point) => cases(point).some(within) : within;
    return { kind: 'character', takes: negated ? (point) => !folded(point) : folded, weight: Math.max(1, tests.length) };
  }

  /** A character of a set, or the test of a class. */
  #setMember() {
    const character = this.#take();
    if (character !== '\\') return character.codePointAt(0);
    const escaped = this.#take();
    if (escaped === 'b') return 8;
    if (escaped === '-') return 0x2d;
    return CLASSES.get(escaped) ?? this.#escapedPoint(escaped);
  }

  #character(wanted) {
    const both = this.#ignoreCase ? cases(wanted) : [wanted];
    return { kind: 'character', takes: (point) => both.includes(point) };
  }
}

/** A character as it is, in lower and in upper case, as far as that is one character. */
function cases(point) {
  const text = String.fromCodePoint(point);
  return [text, text.toLowerCase(), text.toUpperCase()]
    .map((variant) => Array.from(variant))
    .filter((variant) => variant.length === 1)
    .map(([variant]) => variant.codePointAt(0));
}

function tooComplex() {
  return refused(`it is too complex: more than ${COST_MAX} steps`);
}

function refused(why) {
  return new PluginError('bad-input', `the regular expression is refused: ${why}`);
}
