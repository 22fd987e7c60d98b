/// <reference types="node" />
import type { ConnectOptions } from '../client/index.js';

/** Options of the plugin, under either API: where the supervisor listens and which helper is started. */
export interface Options {
  connection?: Pick<ConnectOptions, 'path' | 'helper' | 'connectTime' | 'helperTime' | 'startedTime'>;
}

/** The tools, the same under either API: `pty_spawn`, `pty_write`, `pty_read`, `pty_wait`, `pty_list`, `pty_kill`. */
export type ToolName = 'pty_spawn' | 'pty_write' | 'pty_read' | 'pty_wait' | 'pty_list' | 'pty_kill';

declare const plugin: {
  readonly id: 'local-pty';
  /** V1: `Plugin` of `@opencode-ai/plugin`. */
  readonly server: (input: object, options?: Options) => Promise<{
    tool: Record<ToolName, object>;
    event(input: { event: unknown }): Promise<void>;
    dispose(): Promise<void>;
  }>;
  /** V2: `setup` of the promise API. Throws where the host cannot be asked for permission. */
  readonly setup: (context: object) => Promise<() => Promise<void>>;
};
export default plugin;
