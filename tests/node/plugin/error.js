/** Longest message that leaves the plugin, in characters. Chosen. */
const MESSAGE_MAX = 1_000;

/**
 * What goes wrong in the plugin and may be told to the model. `code` is a stable word: one of the client's or the
 * supervisor's, or `bad-input`, `bad-command`, `bad-directory`, `busy`, `ended`, `timeout`, `aborted`, `unknown-terminal`,
 * `session-deleted`, `unloaded`, `no-permission`.
 */
export class PluginError extends Error {
  constructor(code, message, cause) {
    super(bounded(`${code}: ${message}`), cause === undefined ? undefined : { cause });
    this.name = 'PluginError';
    this.code = code;
  }

  /** An error of the client or the system as one of ours. */
  static from(error) {
    if (error instanceof PluginError) return error;
    const code = typeof error?.code === 'string' ? error.code : 'failed';
    return new PluginError(code, error instanceof Error ? error.message : String(error), error);
  }
}

/** One line without control characters: a message may quote what a stranger chose. */
function bounded(text) {
  const line = text.replace(/[\p{Cc}\p{Cs}\u2028\u2029]+/gu, ' ');
  return line.length > MESSAGE_MAX ? `${line.slice(0, MESSAGE_MAX).toWellFormed()}…` : line;
}
