// local-pty: terminals for OpenCode through opencode-pty. One module for both of OpenCode's plugin APIs: V1 looks for `server`,
// V2 for `setup`, and neither minds the other's.
//
// It imports nothing but Node and the client beside it. What `@opencode-ai/plugin` exports for plugins are two functions that
// give back their argument, so it isn't needed.

import { setup } from './v2.js';
import { server } from './v1.js';

export default { id: 'local-pty', server, setup };
