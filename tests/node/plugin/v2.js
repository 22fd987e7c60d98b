// OpenCode V2, promise API: a plugin is `{ id, setup(ctx) }`; tools are added in a transform, and `setup` gives back what undoes it.
//
// V2 does not check permissions for a plugin's tools, and only some builds let a plugin ask. Without that, or without the
// events that tell of deleted sessions, this plugin refuses to be there at all. Code mode would call the tools from a
// program that nobody is asked about, so it is off.

import { setTimeout as sleep } from 'node:timers/promises';

import { PluginError } from './error.js';
import { Terminals } from './terminals.js';
import { TOOLS, askHost, notice, permissionOf, runTool } from './tools.js';
import { PERMISSION } from './v1.js';

/** Before a broken stream of events is asked for again, in milliseconds. Chosen. */
const EVENTS_AGAIN = 1_000;

export async function setup(ctx) {
  if (typeof ctx.permission?.assert !== 'function') {
    throw new PluginError('no-permission', 'this build of OpenCode has no ctx.permission.assert: no terminal without being asked');
  }
  if (typeof ctx.event?.subscribe !== 'function') {
    throw new PluginError('no-permission', 'this build of OpenCode has no ctx.event.subscribe: deleted sessions would go unseen');
  }
  const terminals = new Terminals({
    connection: ctx.options?.connection,
    onExit: (terminal) => tell(ctx, terminal),
  });
  const unloading = new AbortController();
  const events = follow(ctx, terminals, unloading.signal);
  let registration;
  const cleanUp = async () => {
    unloading.abort();
    await Promise.allSettled([registration?.dispose?.(), terminals.unload()]);
    await Promise.race([events, sleep(EVENTS_AGAIN)]);
  };
  try {
    registration = await ctx.tool.transform((editor) => {
      for (const definition of TOOLS) editor.add(adapt(definition, ctx, terminals));
    });
  } catch (error) {
    await cleanUp();
    throw error;
  }
  return cleanUp;
}

function adapt(definition, ctx, terminals) {
  return {
    name: definition.name,
    description: definition.description,
    input: definition.input,
    output: definition.output,
    options: { codemode: false, permission: definition.name === 'pty_spawn' ? PERMISSION : definition.name },
    async execute(input, context) {
      const call = {
        session: context.sessionID,
        base: definition.name === 'pty_spawn' ? await directoryOf(ctx, context.sessionID) : null,
        signal: context.signal,
        approve: (question) => askHost(() => ask(ctx, context, question)),
      };
      const output = await runTool(definition, terminals, call, input);
      return { output, content: JSON.stringify(output) };
    },
  };
}

async function ask(ctx, context, question) {
  const { resource, metadata } = permissionOf(question);
  await ctx.permission.assert({
    sessionID: context.sessionID,
    agent: context.agent,
    action: PERMISSION,
    resources: [resource],
    save: [resource],
    metadata,
    source: { type: 'tool', messageID: context.messageID, id: context.id },
  });
}

/** Where the session works, if this build can say. */
async function directoryOf(ctx, sessionID) {
  const session = await ctx.session?.get?.({ sessionID });
  const directory = session?.location?.directory;
  return typeof directory === 'string' && directory.startsWith('/') ? directory : null;
}

/** Hears of deleted sessions until the plugin is unloaded. */
async function follow(ctx, terminals, signal) {
  while (!signal.aborted) {
    try {
      for await (const event of ctx.event.subscribe({ signal })) {
        if (signal.aborted) return;
        const id = event?.type === 'session.deleted' ? event.data?.sessionID : undefined;
        if (typeof id === 'string') await terminals.sessionDeleted(id);
      }
    } catch {
      // Asked for again below: a stream that broke is not the end of the plugin.
    }
    await sleep(EVENTS_AGAIN, undefined, { signal }).catch(() => {});
  }
}

async function tell(ctx, terminal) {
  try {
    await ctx.session?.synthetic?.({ sessionID: terminal.owner, text: notice(terminal) });
  } catch {
    // A courtesy: the session may be gone, and pty_list tells the same.
  }
}
