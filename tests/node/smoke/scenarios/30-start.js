// From connect to `started`.

import assert from 'node:assert/strict';
import { existsSync, mkdirSync, renameSync, rmdirSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';

import { openDirectory } from '../../client/index.js';
import { HANDSHAKE_TIME, HELPER, allText, children, scenario, waitFor } from '../harness.js';

/** Sessions at a time: each is an interpreter that has five seconds from connecting to the last byte of its frame. Chosen. */
const AT_A_TIME = 4;

scenario('a start frame may be split at every offset', async (t) => {
  let [next, last, late] = [1, Infinity, 0];
  const worker = async () => {
    while (next < last) {
      const offset = next++;
      const helper = t.pythonHelper('split.py', String(offset));
      for (let done = false; !done; ) {
        const begun = performance.now();
        try {
          const session = await t.start(['true'], { helper, helperTime: 30_000 });
          assert.deepEqual(await session.exit, { code: 0, signal: null, result: 'success', stopped: false });
          done = true;
        } catch (error) {
          // 90: the frame is no longer than that.
          done = error.code === 'helper' && error.message.includes('ended with 90:');
          if (done) last = Math.min(last, offset);
          // Once more where the handshake's time was over, on a machine that stood still; not time and again.
          else if (error.code !== 'timeout' || performance.now() - begun < HANDSHAKE_TIME || ++late > AT_A_TIME) throw error;
        }
      }
    }
  };
  await Promise.all(Array.from({ length: AT_A_TIME }, worker));
  if (late > 0) t.note(`${late} starts were late`);
  // Header, identity, runtime, two lengths, and four letters.
  assert.equal(last, 12 + 16 + 4 + 4 + 4);
});

scenario('a start frame of the greatest size arrives', async (t) => {
  const words = Array.from({ length: 4 }, (_, index) => String(index).repeat(16_000));
  const session = await t.start(['/bin/sh', '-c', 'for word do echo "${#word}"; done', 'sh', ...words]);
  const printed = await allText(session);
  assert.equal(printed, '16000\r\n'.repeat(4));
  assert.equal((await session.exit).code, 0);
});

scenario('bytes that come while the helper lives are not lost', async (t) => {
  const session = await t.sh('seq 1 300; sleep 1; seq 301 600', { helper: t.pythonHelper('linger.py', HELPER) });
  const expected = Array.from({ length: 600 }, (_, index) => `${index + 1}\r\n`).join('');
  assert.equal(await allText(session), expected);
});

scenario('arguments keep their boundaries', async (t) => {
  const words = ['', ' a  b ', '$HOME `id` \\ "', "'", 'é\u{1f600}', '-n', '*', 'line\nfeed'];
  const session = await t.start(['/usr/bin/python3', '-c', 'import sys, json; print(json.dumps(sys.argv[1:]))', ...words]);
  assert.deepEqual(JSON.parse(await allText(session)), words);
});

scenario('a directory swapped after the approval is not used', async (t) => {
  const approved = join(t.scratch, 'approved');
  mkdirSync(approved);
  writeFileSync(join(approved, 'this-is-it'), '');
  const directory = await openDirectory(approved);
  renameSync(approved, join(t.scratch, 'moved'));
  mkdirSync(approved);
  const connection = await t.connect();
  const session = await connection.start({ argv: ['/bin/sh', '-c', 'ls; pwd -P'], directory });
  assert.equal(await allText(session), `this-is-it\r\n${join(t.scratch, 'moved')}\r\n`);
});

scenario('a directory swapped for a link is not opened', async (t) => {
  symlinkSync('/', join(t.scratch, 'link'));
  await assert.rejects(openDirectory(join(t.scratch, 'link')), { code: /^(ENOTDIR|ELOOP)$/ });
  await assert.rejects(openDirectory(HELPER), { code: 'ENOTDIR' });
});

scenario('a directory deleted after the approval is bad-cwd', async (t) => {
  const path = join(t.scratch, 'doomed');
  mkdirSync(path);
  const directory = await openDirectory(path);
  rmdirSync(path);
  const connection = await t.connect();
  await assert.rejects(connection.start({ argv: ['true'], directory }), { code: 'bad-cwd' });
});

scenario('an abort at each stage leaves nothing', async (t) => {
  const start = async (connection, signal) => {
    const directory = await openDirectory(t.workspace);
    try {
      return await connection.start({ argv: ['sleep', '60'], directory, signal });
    } finally {
      assert.equal(directory.fd, -1, 'the directory is closed');
    }
  };
  const aborted = { name: 'PtyError', code: 'aborted' };

  // Before and while connecting.
  await assert.rejects(t.connect({ signal: AbortSignal.abort() }), aborted);
  const connecting = new AbortController();
  const refused = assert.rejects(t.connect({ signal: connecting.signal }), aborted);
  connecting.abort();
  await refused;

  // Before the helper.
  await assert.rejects(start(await t.connect(), AbortSignal.abort()), aborted);

  // While the helper lives.
  const hanging = new AbortController();
  const connection = await t.connect({ helper: t.helper('exec sleep 60') });
  const rejected = assert.rejects(start(connection, hanging.signal), aborted);
  await waitFor('the helper', () => (children().length === 1 ? null : 'no child'));
  hanging.abort('enough');
  await rejected;
  assert.deepEqual(children(), []);

  // Between the helper's end and `started`, which never comes as nothing was sent.
  const silent = new AbortController();
  const mark = join(t.scratch, 'silent');
  const unanswered = await t.connect({ helper: t.helper(`mkdir ${mark}`) });
  const given_up = assert.rejects(start(unanswered, silent.signal), aborted);
  await waitFor('the helper to come', () => (existsSync(mark) ? null : 'no mark'));
  await waitFor('the helper to go', () => (children().length === 0 ? null : 'a child'));
  silent.abort();
  await given_up;

  // In the middle of a real start, at various points of it.
  for (let steps = 0; steps < 12; steps += 1) {
    const soon = new AbortController();
    const racing = start(await t.connect(), soon.signal);
    setTimeout(() => soon.abort(), steps * 6);
    try {
      const session = await racing;
      await session.close();
    } catch (error) {
      assert.equal(error.code, 'aborted');
    }
  }

  // Afterwards it has no effect.
  const late = new AbortController();
  const session = await start(await t.connect(), late.signal);
  late.abort();
  assert.deepEqual(await session.stop(), { code: null, signal: 15, result: 'stopped', stopped: true });
});

scenario('one connection is one session', async (t) => {
  const connection = await t.connect();
  const session = await connection.start({ argv: ['cat'], directory: await openDirectory(t.workspace) });
  const directory = await openDirectory(t.workspace);
  await assert.rejects(connection.start({ argv: ['cat'], directory }), { code: 'usage' });
  assert.equal(directory.fd, -1);
  assert.equal((await session.stop()).result, 'stopped');
});
