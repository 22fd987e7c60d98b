// What goes wrong, and that it is said: helpers that don't do their work, supervisors that don't do theirs.

import assert from 'node:assert/strict';
import { createServer } from 'node:net';
import { join } from 'node:path';

import { connect, openDirectory } from '../../client/index.js';
import { HANDSHAKE_TIME, SOON, children, scenario, sleep, waitFor } from '../harness.js';

/** A start that must fail: gives the error, once helper, directory and connection are gone. */
async function refused(t, options = {}, request = {}) {
  const connection = await t.connect(options);
  const directory = await openDirectory(t.workspace);
  let error;
  try {
    await connection.start({ argv: ['sleep', '60'], directory, ...request });
  } catch (caught) {
    error = caught;
  }
  assert.equal(error?.name, 'PtyError', `it started, or ${error?.stack}`);
  assert.equal(directory.fd, -1, 'the directory is closed');
  assert.deepEqual(children(), [], 'the helper is gone');
  return error;
}

scenario('a helper that is missing fails the start', async (t) => {
  assert.equal((await refused(t, { helper: join(t.scratch, 'none') })).code, 'helper');
});

scenario('a helper that fails fails the start', async (t) => {
  const failing = await refused(t, { helper: t.helper('echo "no luck" >&2; exit 3') });
  assert.equal(failing.code, 'helper');
  assert.match(failing.message, /ended with 3: no luck$/);
  // Also after it has sent everything: then there may be a session, which ends with the connection.
  const late = await refused(t, { helper: t.helper('$REAL "$@"; exit 4') });
  assert.equal(late.code, 'helper');
  // The real one, with words it refuses.
  const words = await refused(t, {}, { argv: Array.from({ length: 200 }, () => 'x') });
  assert.equal(words.code, 'helper');
  assert.match(words.message, /ended with 64: /);
}, { core: true });

scenario('a helper that hangs is killed', async (t) => {
  assert.equal((await refused(t, { helper: t.helper('exec sleep 60'), helperTime: 300 })).code, 'helper');
  // With the frame sent and `started` on its way, it is no better.
  const after = t.helper('$REAL "$@"; exec sleep 60');
  assert.equal((await refused(t, { helper: after, helperTime: 700 })).code, 'helper');
});

scenario('a helper that is killed fails the start', async (t) => {
  const before = await refused(t, { helper: t.helper('kill -KILL $$') });
  assert.equal(before.code, 'helper');
  assert.match(before.message, /SIGKILL/);
  const after = await refused(t, { helper: t.helper('$REAL "$@"; kill -KILL $$') });
  assert.equal(after.code, 'helper');
});

scenario('a request that is none is refused before anything starts', async (t) => {
  const requests = [
    { argv: [] },
    { argv: [''] },
    { argv: 'true' },
    { argv: ['true', 7] },
    { argv: ['true', 'a\0b'] },
    { argv: ['true', '\ud800'] },
    { argv: ['true'], runtime: -1 },
    { argv: ['true'], runtime: 3_601 },
    { argv: ['true'], runtime: 1.5 },
    { argv: ['true'], runtime: '60' },
  ];
  for (const request of requests) assert.equal((await refused(t, {}, request)).code, 'usage', JSON.stringify(request));
  const connection = await t.connect();
  await assert.rejects(connection.start({ argv: ['true'], directory: undefined }), { code: 'usage' });
});

scenario('the seventeenth session is busy', async (t) => {
  const patient = async () => {
    for (;;) {
      const begun = performance.now();
      try {
        return await t.start(['sleep', '60']);
      } catch (error) {
        // A place of the scenario before may be given back only now; and sixteen helpers take a busy machine long.
        const late = error.code === 'timeout' && performance.now() - begun >= HANDSHAKE_TIME;
        if (error.code !== 'busy' && !late) throw error;
      }
    }
  };
  const all = await Promise.all(Array.from({ length: 16 }, patient));
  assert.equal((await refused(t)).code, 'busy');
  await Promise.all(all.map((session) => session.stop()));
});

scenario('a start without an answer is given up', async (t) => {
  const error = await refused(t, { helper: t.helper('exit 0'), startedTime: 300 });
  assert.equal(error.code, 'no-answer');
});

scenario('the supervisor gives up a start that does not come', async (t) => {
  // Its five seconds are fewer than ours.
  assert.equal((await refused(t, { helper: t.helper('exit 0'), startedTime: SOON })).code, 'timeout');
});

scenario('a supervisor that is not there is said so', async (t) => {
  await assert.rejects(connect({ path: join(t.scratch, 'none') }), { name: 'PtyError', code: 'connect' });
});

const UNIT = `opencode-pty-${'0123456789abcdef'.repeat(2)}.service`;

function frame(type, payload = Buffer.alloc(0)) {
  const header = Buffer.from('OPTY\x01\0\0\0\0\0\0\0', 'latin1');
  header[5] = type;
  header.writeUInt32BE(payload.length, 8);
  return Buffer.concat([header, Buffer.from(payload)]);
}

function exit(code, status, result) {
  const payload = Buffer.alloc(9 + result.length);
  payload[0] = code;
  payload.writeUInt32BE(status, 1);
  payload.writeUInt32BE(result.length, 5);
  payload.write(result, 9, 'latin1');
  return frame(4, payload);
}

const started = frame(6, Buffer.from(UNIT));

/** A supervisor of our own that answers every start with these bytes, in pieces of `size`. */
async function answering(t, bytes, { size = bytes.length, hold = false } = {}) {
  const path = join(t.scratch, `supervisor-${Math.random().toString(36).slice(2)}`);
  const server = createServer(async (socket) => {
    socket.on('error', () => {});
    // The helper says when.
    await new Promise((resolve) => socket.on('data', resolve).on('close', resolve));
    for (let at = 0; at < bytes.length; at += size) {
      socket.write(bytes.subarray(at, at + size));
      await sleep(0);
    }
    if (!hold) socket.end();
  });
  await new Promise((resolve) => server.listen(path, resolve));
  t.atEnd(() => new Promise((resolve) => server.close(resolve)));
  return { path, helper: t.helper('printf x >&3') };
}

async function startedBy(t, options) {
  const connection = await t.connect(options);
  const session = await connection.start({ argv: ['true'], directory: await openDirectory(t.workspace) });
  t.atEnd(() => session.close());
  return session;
}

scenario('what is no answer to a start fails it', async (t) => {
  const answers = [
    ['lost', Buffer.alloc(0)],
    ['lost', started.subarray(0, 20)],
    ['busy', frame(5, Buffer.from('busy: every session slot is taken'))],
    ['protocol', frame(5, Buffer.from('no colon'))],
    ['protocol', frame(5, Buffer.from([0x62, 0x3a, 0x20, 0xff]))],
    ['protocol', Buffer.from('HTTP/1.1 400 Bad Request\r\n')],
    ['protocol', frame(3, Buffer.from('output first'))],
    ['protocol', exit(1, 0, 'success')],
    ['protocol', frame(8)],
    ['protocol', frame(1, Buffer.alloc(40))],
    ['protocol', frame(6, Buffer.from('x'.repeat(53)))],
    ['protocol', frame(6, Buffer.from(UNIT.toUpperCase()))],
    ['protocol', frame(6, Buffer.from(`${UNIT}x`))],
    ['protocol', Buffer.from('OPTY\x02\x06\0\0\0\0\0\x35', 'latin1')],
    ['protocol', Buffer.from('OPTY\x01\x06\0\x01\0\0\0\x35', 'latin1')],
    ['protocol', Buffer.from('OPTY\x01\x03\0\0\xff\xff\xff\xff', 'latin1')],
    ['protocol', Buffer.from('OPTY\x01\x03\0\0\0\0\0\0', 'latin1')],
  ];
  for (const [code, bytes] of answers) {
    const error = await refused(t, await answering(t, bytes));
    // A connection that ends may say so by a reset, and may do so while the helper still runs.
    assert.equal(error.code, code, `${bytes.toString('latin1')}: ${error.stack}`);
  }
});

scenario('a connection that breaks is lost and never exit 0', async (t) => {
  const endings = [
    ['lost', Buffer.alloc(0)],
    ['lost', exit(1, 0, 'success').subarray(0, -1)],
    ['stop-failed', frame(5, Buffer.from('stop-failed: the end could not be confirmed'))],
    ['protocol', exit(0, 0, 'success')],
    ['protocol', exit(4, 0, 'success')],
    ['protocol', exit(1, 0, '')],
    ['protocol', exit(1, 0, 'no\0word')],
    ['protocol', started],
    ['protocol', frame(8)],
    [null, exit(0, 0, 'lost')],
  ];
  for (const [code, bytes] of endings) {
    let session;
    try {
      session = await startedBy(t, await answering(t, Buffer.concat([started, frame(3, 'some'), bytes])));
    } catch (error) {
      // bun reads while the helper lives; then it may have been no start at all.
      assert.equal(t.isNode ? 'a session' : error.code, code, error.stack);
      continue;
    }
    assert.deepEqual(await session.exit, { code: null, signal: null, result: 'lost', stopped: false });
    assert.equal(session.error?.code ?? null, code, bytes.toString('latin1'));
    assert.equal(Buffer.from(session.output.read().data).toString(), 'some');
    assert.ok(session.output.ended);
  }
});

scenario('an answer may come in any pieces', async (t) => {
  const whole = Buffer.concat([started, frame(3, 'hello '), frame(3, 'world'), exit(3, 11, 'core-dump')]);
  for (let size = 1; size <= whole.length; size += 7) {
    const session = await startedBy(t, await answering(t, whole, { size }));
    assert.deepEqual(await session.exit, { code: null, signal: 11, result: 'core-dump', stopped: false });
    assert.equal(Buffer.from(session.output.read().data).toString(), 'hello world');
  }
});

scenario('a stop without an answer is made certain by closing', async (t) => {
  const session = await startedBy(t, await answering(t, started, { hold: true }));
  assert.deepEqual(await session.stop({ closeAfter: 200 }), { code: null, signal: null, result: 'lost', stopped: false });
  assert.equal(session.error.code, 'ended');
  await waitFor('no child', () => (children().length === 0 ? null : 'a child'));
});
