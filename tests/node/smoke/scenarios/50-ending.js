// How sessions end, and what `exit` says of it.

import assert from 'node:assert/strict';
import { join } from 'node:path';

import { FIND_SCRIPT, HELPER, SHORT_RUNTIME, SLICE, allText, scenario, sessions, textUntil, waitFor } from '../harness.js';

const LOST = { code: null, signal: null, result: 'lost', stopped: false };
const STOPPED = { code: null, signal: 15, result: 'stopped', stopped: true };

scenario('an exit code is an exit code', async (t) => {
  for (const code of [0, 1, 7, 255]) {
    const { exit } = await t.run(`exit ${code}`);
    assert.deepEqual(exit, { code, signal: null, result: code === 0 ? 'success' : 'exit-code', stopped: false });
  }
  const missing = await (await t.start(['no-such-command'])).exit;
  assert.equal(missing.code, 127);
}, { core: true });

scenario('a command killed by a signal is 128 and its number', async (t) => {
  assert.deepEqual((await t.run('kill -KILL $$')).exit, { code: 137, signal: null, result: 'exit-code', stopped: false });
});

scenario('a session killed by a signal is that signal', async (t) => {
  const { exit } = await t.run(`${FIND_SCRIPT}; kill -KILL $pid; sleep 60`);
  assert.deepEqual(exit, { code: null, signal: 9, result: 'signal', stopped: false });
});

scenario('a stop is confirmed', async (t) => {
  const session = await t.sh('trap "" TERM HUP; echo ready; sleep 60 & wait; sleep 60');
  await textUntil(session, 'ready');
  assert.deepEqual(await session.stop(), STOPPED);
  assert.equal(session.error, null);
  assert.deepEqual(sessions(), []);
  await assert.rejects(session.write('x'), { code: 'ended' });
  assert.deepEqual(await session.stop(), STOPPED, 'again gives the same');
}, { core: true });

scenario('a stop takes what escaped with setsid', async (t) => {
  const session = await t.sh('setsid sh -c "trap \\"\\" TERM HUP; sleep 600" & echo ready; wait');
  await textUntil(session, 'ready');
  assert.deepEqual(await session.stop(), STOPPED);
  assert.deepEqual(sessions(), []);
});

scenario('output before a stop is kept', async (t) => {
  const session = await t.sh('seq 1 1000; echo ready; sleep 60');
  await textUntil(session, 'ready');
  await session.stop();
  const expected = Array.from({ length: 1000 }, (_, index) => `${index + 1}\r\n`).join('');
  assert.ok((await allText(session)).startsWith(`${expected}ready\r\n`));
});

scenario('a stop in the middle of a flood is confirmed', async (t) => {
  const session = await t.start(['yes']);
  await session.output.wait(MIB);
  assert.deepEqual(await session.stop(), STOPPED);
});
const MIB = 1_048_576;

scenario('a stop after the end keeps the real record', async (t) => {
  const ended = { code: 7, signal: null, result: 'exit-code' };
  // Asked for at once, which may be before the end, cross it, or be behind it: a process that is slow, or whose helper is, can
  // find the record beside `started`. Then there is nothing left to stop or to confirm.
  const mark = join(t.scratch, 'ran');
  const isOver = `[ -e ${mark} ] && [ ! -e ${SLICE}/opencode-pty-*.service ]`;
  for (const helper of [HELPER, t.helper(`rm -f ${mark}; "$REAL" "$@" && until ${isOver}; do sleep 0.02; done; sleep 0.2`)]) {
    const session = await t.sh(`touch ${mark}; exit 7`, { helper });
    const { stopped, ...exit } = await session.stop();
    t.note(`${exit.result}, ${stopped ? 'confirmed' : 'over before'}`);
    if (exit.result === 'stopped') assert.deepEqual({ ...exit, stopped }, STOPPED);
    else assert.deepEqual(exit, ended);
  }
  const over = await t.sh('exit 7');
  await over.exit;
  assert.deepEqual(await over.stop(), { ...ended, stopped: false });
});

scenario('a session that is closed is lost and leaves nothing', async (t) => {
  const session = await t.sh('trap "" TERM HUP; echo ready; sleep 60 & wait; sleep 60');
  await textUntil(session, 'ready');
  await session.close();
  assert.deepEqual(await session.exit, LOST);
  assert.equal(session.error.code, 'ended');
  await waitFor('the unit to be gone', () => (sessions().length === 0 ? null : sessions().join(' ')));
});

scenario('the runtime is a limit', async (t) => {
  const session = await t.start(['sleep', '60'], { runtime: SHORT_RUNTIME });
  const { signal, ...rest } = await session.exit;
  assert.deepEqual(rest, { code: null, result: 'timeout', stopped: false });
  // script(1) gets TERM and HUP at the same time, and either may be what it dies of.
  assert.ok(signal === 15 || signal === 1, `signal ${signal}`);
});

scenario('readers and waiters hear of the end', async (t) => {
  const session = await t.sh('echo one; read line; echo two');
  const { output } = session;
  await textUntil(session, 'one');
  const waiting = output.wait(output.end);
  const reading = allText(session);
  const impatient = new AbortController();
  const aborted = assert.rejects(output.wait(output.end + 1_000, impatient.signal), /enough/);
  impatient.abort(new Error('enough'));
  await aborted;
  await session.write('\r');
  await waiting;
  assert.equal(await reading, 'one\r\n\r\ntwo\r\n');
  await session.exit;
  assert.ok(output.ended);
  await output.wait(output.end + 1_000); // nothing will come, so it does not wait
});
