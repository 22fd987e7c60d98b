// The smoke's main program: what the server is on a test host. Runs the scenarios that its one argument, a file, asks for.
//
// The same file is the main module of plain Node and bun, and of the single executable. There `import(file)` is refused, so
// the harness comes in the way OpenCode loads plugins: through a script of the main context's default loader.

import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { pathToFileURL } from 'node:url';
import vm from 'node:vm';

const load = process.versions.bun
  ? (url) => import(url)
  : new vm.Script('(url) => import(url)', {
      importModuleDynamically: vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER,
    }).runInThisContext();

// The inspector stays shut: SIGUSR1 opens it unless somebody listens (docs/threats.md, T19).
process.on('SIGUSR1', () => {});

const file = process.argv.at(-1);
const plan = JSON.parse(readFileSync(file, 'utf8'));
const { main } = await load(pathToFileURL(join(plan.directory, 'smoke', 'harness.js')).href);
await main(plan);
