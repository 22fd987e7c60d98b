// Who gets which descriptors: the helper its five, the command its three, everybody else none of ours.

import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { Worker } from 'node:worker_threads';

import { openDirectory } from '../../client/index.js';
import { HELPER, allText, scenario, textUntil } from '../harness.js';

/** Descriptors as `ls -l` shows those of the process that `ls` is. */
function listed(text) {
  const links = [...text.replaceAll('\r', '').matchAll(/ (\d+) -> (.*)$/gm)].map(([, number, target]) => [Number(number), target]);
  // The directory it lists.
  return links.filter(([, target]) => !/^\/proc\/\d+\/fd$/.test(target)).sort(([a], [b]) => a - b);
}

scenario('the helper has descriptors 0 to 4 and no other', async (t) => {
  const file = join(t.scratch, 'descriptors');
  const session = await t.sh('true', { helper: t.pythonHelper('list-descriptors.py', file, HELPER) });
  await session.exit;
  const found = readFileSync(file, 'utf8').split('\n').map((line) => line.split(' '));
  assert.deepEqual(found.map(([number]) => number), ['0', '1', '2', '3', '4']);
  assert.equal(found[0][1], '/dev/null');
  assert.match(found[3][1], /^socket:/);
  assert.equal(found[4][1], t.workspace);
}, { core: true });

scenario('the command has descriptors 0 to 2 and no other', async (t) => {
  const session = await t.start(['/bin/ls', '-l', '/proc/self/fd']);
  const links = listed(await allText(session));
  assert.deepEqual(links.map(([number]) => number), [0, 1, 2]);
  for (const [, target] of links) assert.match(target, /^\/dev\/pts\/\d+$/);
});

/** What the threads below are told. */
const [WAIT, GO, END] = [0, 1, 2];

/**
 * A thread that says when it is there, and from `GO` to `END` starts children.
 *
 * V8 opens the program and `/proc/self/maps` without close-on-exec while it makes a thread's isolate (seen with strace in
 * Node 20 and 26), and a child that is started meanwhile inherits them. That is no doing of ours, so no child is started
 * before all threads are there. (The helper closes whatever it is given, see tests/handover.rs.)
 */
const CHILDREN = `
  const { execFile } = require('node:child_process');
  const { parentPort, workerData } = require('node:worker_threads');
  const next = () => {
    if (Atomics.load(workerData, 0) === ${END}) return;
    execFile('/bin/ls', ['-l', '/proc/self/fd'], (error, stdout) => {
      parentPort.postMessage(error ? { error: String(error) } : { stdout });
      next();
    });
  };
  parentPort.postMessage('there');
  Atomics.wait(workerData, 0, ${WAIT});
  next();
`;

scenario('unrelated children of main and worker threads inherit nothing', async (t) => {
  let count = 0;
  let fault = null;
  const judge = (text) => {
    count += 1;
    const foreign = listed(text).filter(([number]) => number > 2);
    if (foreign.length > 0) fault ??= `child ${count} has ${JSON.stringify(foreign)}`;
  };
  const child = async () => judge((await promisify(execFile)('/bin/ls', ['-l', '/proc/self/fd'])).stdout);

  // Two workers start children all the time, the main thread at each step of three sessions.
  const flag = new Int32Array(new SharedArrayBuffer(4));
  const tell = (what) => {
    Atomics.store(flag, 0, what);
    Atomics.notify(flag, 0);
  };
  const workers = [0, 1].map(() => new Worker(CHILDREN, { eval: true, workerData: flag }));
  const over = workers.map((worker) => new Promise((resolve) => worker.on('exit', resolve)));
  try {
    await Promise.all(workers.map((worker) => once(worker, 'message')));
    for (const worker of workers) {
      worker.on('message', ({ error, stdout }) => (error ? (fault ??= error) : judge(stdout)));
    }
    tell(GO);
    await child();
    for (let round = 0; round < 3; round += 1) {
      const connection = await t.connect();
      await child();
      const directory = await openDirectory(t.workspace);
      await child();
      const starting = connection.start({ argv: ['cat'], directory, runtime: 60 });
      const meanwhile = Promise.all([child(), child(), child()]);
      const session = await starting;
      await meanwhile;
      await Promise.all([child(), child()]);
      await session.write('hello\r');
      await textUntil(session, 'hello');
      await child();
      const stopping = session.stop();
      await child();
      await stopping;
      await child();
    }
  } finally {
    tell(END);
    await Promise.all(over);
  }
  assert.equal(fault, null);
  assert.ok(count > 30, `only ${count} children`);
  t.note(`${count} children`);
});
