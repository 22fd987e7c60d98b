// Bytes in both directions.

import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';

import { Output, decodeText } from '../../client/index.js';
import { FIND_SCRIPT, allText, processes, scenario, sleep, textUntil, waitFor } from '../harness.js';

const MIB = 1_048_576;

scenario('what is typed is echoed and answered', async (t) => {
  const session = await t.sh('read line; echo "<$line>"');
  await session.write('hello\r');
  assert.equal(await allText(session), 'hello\r\n<hello>\r\n');
  assert.equal((await session.exit).code, 0);
}, { core: true });

scenario('4 MiB are written without holding up the event loop', async (t) => {
  const data = Buffer.alloc(4 * MIB);
  for (let at = 0; at < data.length; at += 4) data.writeUInt32LE((at * 2_654_435_761) >>> 0, at);
  const hash = createHash('sha256').update(data).digest('hex');
  // A garbage collection waits for other threads, which may be kept waiting themselves: the best of a few tells about us.
  const gaps = [];
  for (let attempt = 0; attempt < 5 && !gaps.some((gap) => gap < 100); attempt += 1) {
    const session = await t.sh(`stty raw -echo; echo ready; head -c ${data.length} | sha256sum`);
    await textUntil(session, 'ready');
    const gap = watchGap();
    await session.write(data);
    gaps.push(gap.stop());
    assert.ok((await allText(session)).includes(hash), 'what arrived is what was written');
  }
  t.note(`longest gaps ${gaps.map(Math.round).join(', ')} ms`);
  if (t.isNode) assert.ok(Math.min(...gaps) < 100, `the event loop stood still for ${gaps.join(', ')} ms`);
});

scenario('a program that does not read makes write wait', async (t) => {
  // script(1) itself would queue without bound for a program that does not read, so it is stopped, too.
  const session = await t.sh(`${FIND_SCRIPT}; stty raw -echo; kill -STOP $pid; sleep 60`);
  await waitFor('script(1) to stand still', () => {
    const stopped = processes(session.unit).some(({ name, state }) => name === 'script' && state === 'T');
    return stopped ? null : JSON.stringify(processes(session.unit));
  });
  let [taken, done] = [0, false];
  const writing = (async () => {
    try {
      for (; taken < 64 * MIB; taken += 32_768) await session.write(Buffer.alloc(32_768, 'x'));
    } catch (error) {
      assert.equal(error.code, 'ended');
    }
    done = true;
  })();
  // It stops growing, and then stays as it is.
  let before = -1;
  while (before !== taken || taken === 0) {
    before = taken;
    await sleep(300);
  }
  assert.ok(!done && taken < 2 * MIB, `${taken} bytes were taken`);
  t.note(`${Math.round(taken / 1024)} KiB taken`);
  await session.close();
  await writing;
  assert.equal((await session.exit).result, 'lost');
});

scenario('writes arrive in their order', async (t) => {
  const session = await t.sh('stty raw -echo; echo ready; head -c 200000 | sha256sum');
  await textUntil(session, 'ready');
  const parts = Array.from({ length: 100 }, (_, index) => Buffer.alloc(2_000, index));
  await Promise.all(parts.map((part) => session.write(part)));
  const hash = createHash('sha256').update(Buffer.concat(parts)).digest('hex');
  assert.ok((await allText(session)).includes(hash));
});

scenario('a reader that is too slow is told what it missed', async (t) => {
  const session = await t.sh('seq 1 400000');
  const expected = Buffer.from(Array.from({ length: 400_000 }, (_, index) => `${index + 1}\r\n`).join(''));
  let [got, missed, cursor] = [0, 0, 0];
  for await (const chunk of session.output) {
    assert.equal(chunk.cursor, cursor + chunk.dropped);
    assert.ok(expected.subarray(chunk.cursor, chunk.next).equals(chunk.data), 'the bytes are those of the cursor');
    cursor = chunk.next;
    got += chunk.data.length;
    missed += chunk.dropped;
    await sleep(10);
  }
  const { output } = session;
  assert.equal(got + missed, expected.length);
  assert.equal(output.end, expected.length);
  assert.equal(output.dropped, expected.length - MIB);
  const tail = output.read(0, 2 * MIB);
  assert.equal(tail.dropped, expected.length - MIB);
  assert.ok(expected.subarray(-MIB).equals(tail.data), 'the newest MiB is kept');
  assert.equal((await session.exit).code, 0);
  t.note(`${missed} of ${expected.length} bytes missed`);
});

scenario('a process that does not read its socket loses nothing', async (t) => {
  const session = await t.sh('seq 1 400000', { outputBytesMax: 4 * MIB });
  const still = new Int32Array(new SharedArrayBuffer(4));
  while (!session.output.ended) {
    Atomics.wait(still, 0, 0, 20);
    await sleep(1);
  }
  const expected = Array.from({ length: 400_000 }, (_, index) => `${index + 1}\r\n`).join('');
  assert.equal(session.output.dropped, 0);
  assert.ok(await allText(session) === expected);
});

scenario('characters cut by a chunk are put together again', async (t) => {
  const text = 'äöü€\u{1f600}'.repeat(4_000);
  const session = await t.start(['/usr/bin/python3', '-c', 'import sys\nfor _ in range(4000): sys.stdout.write("äöü€\u{1f600}")']);
  assert.ok((await allText(session)) === text);
  // Byte by byte, the hardest way.
  const bytewise = async function* (bytes) {
    for (let at = 0; at < bytes.length; at += 1) yield { data: bytes.subarray(at, at + 1), dropped: 0 };
  };
  let again = '';
  for await (const piece of decodeText(bytewise(Buffer.from('ä€\u{1f600}x')))) again += piece;
  assert.equal(again, 'ä€\u{1f600}x');
});

scenario('after a gap the text goes on with a whole character', async () => {
  const ring = new Output(8);
  ring.push(Buffer.from('€€€€')); // 12 bytes, of which the last 8 stay: 2 of the second, and two whole ones
  ring.finish();
  let text = '';
  for await (const piece of decodeText(ring)) text += piece;
  assert.equal(text, '€€');
});

scenario('a ring keeps the newest bytes under their cursors', async () => {
  let seed = 1;
  const random = (below) => {
    seed = (Math.imul(seed, 1_103_515_245) + 12_345) >>> 0;
    return Math.floor((seed / 2 ** 32) * below);
  };
  for (const max of [1, 7, 4_096, 5_000, 10_000]) {
    const ring = new Output(max);
    let all = Buffer.alloc(0);
    for (let round = 0; round < 300; round += 1) {
      const piece = Buffer.from(Array.from({ length: 1 + random(900) }, (_, index) => (all.length + index) % 251));
      all = Buffer.concat([all, piece]);
      ring.push(piece);
      assert.equal(ring.end, all.length);
      assert.equal(ring.start, Math.max(0, all.length - max));
      const cursor = random(all.length);
      const { data, cursor: from, next, dropped } = ring.read(cursor, 300);
      assert.ok(all.subarray(from, next).equals(data));
      assert.equal(dropped, Math.max(0, ring.start - cursor));
    }
  }
});

/**
 * Measures how long the event loop does not come round, at most, in milliseconds. The time in which this thread could have
 * run and others had the processors is not counted: it tells of the machine, not of who holds up the loop.
 */
function watchGap() {
  const now = () => performance.now() - waitedForProcessor();
  let [longest, last] = [0, now()];
  const look = () => {
    const before = last;
    last = now();
    longest = Math.max(longest, last - before);
  };
  const timer = setInterval(look, 1);
  return {
    stop() {
      clearInterval(timer);
      look();
      return longest;
    },
  };
}

/** How long this thread has been ready to run without running, in milliseconds (the kernel's Documentation/scheduler/sched-stats). */
function waitedForProcessor() {
  return Number(readFileSync('/proc/thread-self/schedstat', 'utf8').split(' ')[1]) / 1e6;
}
