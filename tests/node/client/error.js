/**
 * Whatever goes wrong on the way to a session or in it.
 *
 * `code` is a stable word: one of the supervisor's own (docs/protocol.md: `busy`, `bad-cwd`, `start-failed`, …), or one of
 * this client's: `aborted`, `connect`, `helper`, `no-answer`, `protocol`, `lost`, `ended`, `usage`.
 */
export class PtyError extends Error {
  constructor(code, message, cause) {
    super(message, cause === undefined ? undefined : { cause });
    this.name = 'PtyError';
    this.code = code;
  }
}
