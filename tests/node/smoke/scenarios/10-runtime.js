// Which program this is.

import assert from 'node:assert/strict';

import { scenario } from '../harness.js';

scenario('the runtime is exactly the one named', async (t) => {
  const { runtime, expected } = t.plan;
  if (runtime === 'bun') {
    assert.equal(process.versions.bun, expected);
    return;
  }
  const { isSea } = await import('node:sea');
  assert.equal(process.version, `v${expected}`);
  assert.equal(isSea(), runtime === 'sea');
});

scenario('this process is what PID 1 takes for the server', async (t) => {
  const { exit } = await t.run('true');
  assert.deepEqual(exit, { code: 0, signal: null, result: 'success', stopped: false });
}, { core: true });
