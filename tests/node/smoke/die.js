// The server dies at a stage that the plan names (xtask/src/node_test.rs has the list). What is left of its session then is
// looked at from there.

import { existsSync } from 'node:fs';

import { openDirectory } from '../client/index.js';
import { children, textUntil, waitFor } from './harness.js';

/** Reports that the stage is reached, and is gone: SIGKILL, as the kernel's memory killer would. */
export async function die(t, stage, report) {
  const now = (session) => {
    report({ stage, unit: session?.unit ?? null });
    process.kill(process.pid, 'SIGKILL');
    return new Promise(() => {});
  };
  const begin = async (options = {}) => {
    const connection = await t.connect(options);
    const directory = await openDirectory(t.workspace);
    return connection.start({ argv: ['/bin/sh', '-c', SCRIPT], directory, runtime: 600 });
  };
  const stages = {
    async connected() {
      await t.connect();
      await now();
    },
    async 'helper running'() {
      begin({ helper: t.helper('exec sleep 600') });
      await waitFor('the helper', () => (children().length === 1 ? null : 'no child'));
      await now();
    },
    async 'helper running, frame sent'() {
      const mark = `${t.scratch}/sent`;
      begin({ helper: t.helper(`"$REAL" "$@"; mkdir ${mark}; exec sleep 600`) });
      await waitFor('the frame', () => (existsSync(mark) ? null : 'not sent'));
      await now();
    },
    async 'helper gone'() {
      // What `started` needs is done in the same turn as the helper's end is seen, so this is the first moment after it.
      const mark = `${t.scratch}/gone`;
      begin({ helper: t.helper(`"$REAL" "$@" && mkdir ${mark}`) });
      await waitFor('the helper', () => (existsSync(mark) ? null : 'not gone'));
      await waitFor('its end', () => (children().length === 0 ? null : 'a child'));
      await now();
    },
    async started() {
      await now(await begin());
    },
    async 'in the middle of output'() {
      const session = await begin();
      await session.output.wait(1_000_000);
      await now(session);
    },
    async 'in the middle of a write'() {
      const session = await begin();
      await textUntil(session, 'ready');
      for (let count = 0; count < 8; count += 1) session.write(Buffer.alloc(65_536, 'x')).catch(() => {});
      await now(session);
    },
    async stopping() {
      const session = await begin();
      await textUntil(session, 'ready');
      session.stop();
      await now(session);
    },
  };
  await stages[stage]();
}

/** Obeys no signal, has a child in a session of its own, and prints without end. */
const SCRIPT = 'trap "" TERM HUP; setsid sleep 600 & echo ready; yes & wait';
