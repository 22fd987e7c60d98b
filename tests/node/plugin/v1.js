// OpenCode V1 (the 1.x line, `@opencode-ai/plugin`): a plugin is a function that gives back hooks.
//
// This line takes plain JSON Schema for a tool's arguments, without checking them (the tools do), and calls each of them
// required; `tool.definition` puts that right. It skips `dispose` on SIGTERM; the supervisor then sees the server go.

import { PluginError } from './error.js';
import { Terminals } from './terminals.js';
import { TOOLS, askHost, notice, permissionOf, runTool } from './tools.js';

/** The permission under which starting is asked for. What is then typed belongs to what was allowed. */
export const PERMISSION = 'pty_spawn';

export async function server(input, options = {}) {
  const terminals = new Terminals({
    connection: options?.connection,
    onExit: (terminal) => tell(input, terminal),
  });
  const tool = Object.fromEntries(TOOLS.map((definition) => [definition.name, adapt(definition, terminals)]));
  return {
    tool,
    'tool.definition': async ({ toolID }, output) => {
      const known = TOOLS.find(({ name }) => name === toolID);
      if (known !== undefined) output.jsonSchema = known.input;
    },
    event: async ({ event }) => {
      const id = event?.type === 'session.deleted' ? event.properties?.info?.id : undefined;
      if (typeof id === 'string') await terminals.sessionDeleted(id);
    },
    dispose: () => terminals.unload(),
  };
}

function adapt(definition, terminals) {
  return {
    description: definition.description,
    args: definition.input.properties,
    async execute(args, context) {
      if (typeof context.ask !== 'function') throw new PluginError('no-permission', 'this host cannot be asked');
      const call = {
        session: context.sessionID,
        base: context.directory ?? null,
        signal: context.abort,
        approve: (question) => askHost(() => ask(context, question)),
      };
      const result = await runTool(definition, terminals, call, args);
      return { title: title(result), output: JSON.stringify(result), metadata: result };
    },
  };
}

function ask(context, question) {
  const { resource, metadata } = permissionOf(question);
  return context.ask({ permission: PERMISSION, patterns: [resource], always: [resource], metadata });
}

function title(result) {
  return result.command ?? result.id ?? 'terminals';
}

async function tell({ client }, terminal) {
  try {
    const parts = [{ type: 'text', text: notice(terminal), synthetic: true }];
    await client.session.promptAsync({ path: { id: terminal.owner }, body: { parts } });
  } catch {
    // A courtesy: the session may be gone, and pty_list tells the same.
  }
}
