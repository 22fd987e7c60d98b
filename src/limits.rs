//! Every bound and every fixed path, with where it comes from.
//!
//! A number a stranger can push against stands here and nowhere else. Where two depend on each other, the
//! compiler checks it at the end of the file. "Chosen" means chosen, not measured.

use std::time::Duration;

// ---- frames (docs/protocol.md) -----------------------------------------------------------------------------

/// Bytes of a frame's header. Chosen.
pub const FRAME_HEADER_BYTES: usize = 12;
/// Most bytes of a frame's payload: the largest start frame, rounded up to 70 KiB. Chosen.
pub const FRAME_PAYLOAD_BYTES_MAX: usize = 71_680;
/// Most bytes of terminal data in one `input` or `output` frame. Chosen: half a pipe's 64 KiB.
pub const DATA_BYTES_MAX: usize = 32_768;
/// Most bytes of an `error` payload, cut at a character boundary. Chosen.
pub const ERROR_BYTES_MAX: usize = 32_768;
/// Most bytes of the word systemd gives as `Result`. Chosen: the longest known one has 16.
pub const RESULT_BYTES_MAX: usize = 64;

// ---- what a start may ask for ------------------------------------------------------------------------------

/// Most bytes of the command's name. From `PATH_MAX` (Linux, 4,096 with its NUL).
pub const COMMAND_BYTES_MAX: usize = 4_096;
/// Most arguments after the command. Chosen.
pub const ARGS_MAX: usize = 128;
/// Most bytes of one argument. Chosen.
pub const ARG_BYTES_MAX: usize = 16_384;
/// Most bytes the arguments of one session may have together.
///
/// The launcher hands them on as one environment string, four letters for three bytes, and the kernel takes
/// no single string of [`ARG_STRLEN_MAX`] bytes or more.
pub const ARGS_BYTES_MAX: usize = 65_536;
/// The kernel's `MAX_ARG_STRLEN` (32 pages of 4 KiB): the longest single argument or environment string.
pub const ARG_STRLEN_MAX: usize = 131_072;
/// Longest a session may run. Chosen; a request of 0 selects it.
pub const RUNTIME_SECONDS_MAX: u32 = 3_600;

// ---- admission ---------------------------------------------------------------------------------------------

/// Sessions at a time, unless `--max-sessions` says otherwise. Chosen.
pub const SESSIONS_MAX_DEFAULT: usize = 16;
/// Most that `--max-sessions` may ask for. Chosen: about four descriptors each must fit a usual `LimitNOFILE`.
pub const SESSIONS_MAX_CEILING: usize = 4_096;
/// Connections that are not authenticated yet. Chosen.
pub const HANDSHAKES_MAX: usize = 32;
/// Admissions a minute of connections that are not, or not yet known to be, the server's main process. Chosen.
pub const STRANGERS_PER_MINUTE: u32 = 120;
/// Look-ups a second of the server's main process that strangers can cause. Chosen.
pub const REFRESHES_PER_SECOND: u32 = 4;
/// Listening socket's backlog. Chosen.
pub const BACKLOG: i32 = 128;
/// Connections accepted before the sessions get their turn. Chosen.
pub const ACCEPTED_IN_A_ROW_MAX: u32 = 16;
/// Pause of the accept loop after it ran out of descriptors or memory. Chosen: long enough not to spin.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// From a change of the number of sessions to telling PID 1 of it. Chosen: longer than a start or a short session takes.
pub const STATUS_PAUSE: Duration = Duration::from_millis(200);
/// Least time between two journal records about refused connections. Chosen.
pub const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(1);
/// Most characters of one value in a journal record. Chosen: a record is one datagram, and its values, fourteen of at
/// most six bytes a character, fit a Unix socket's default send buffer (`net.core.wmem_default`, 212,992).
pub const JOURNAL_VALUE_CHARS_MAX: usize = 2_048;

// ---- time --------------------------------------------------------------------------------------------------

/// Accept, authentication, complete start frame and second check, together. Chosen.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// One D-Bus call. Chosen.
pub const CALL_TIME: Duration = Duration::from_secs(5);
/// The start job, as the supervisor waits for it. Equals the unit's `TimeoutStartUSec`. Chosen.
pub const START_JOB_TIME: Duration = Duration::from_secs(10);
/// The launcher's answer after the job is done. Chosen.
pub const LAUNCHER_ANSWER_TIME: Duration = Duration::from_secs(5);
/// The launcher's wait for its start frame. Chosen.
pub const LAUNCHER_REQUEST_TIME: Duration = Duration::from_secs(5);
/// The client's time to send its frame, in all. Chosen.
pub const CLIENT_SEND_TIME: Duration = Duration::from_secs(5);
/// Write of `started`, `error`, `exit` and `stopped`. Chosen.
pub const ANSWER_TIME: Duration = Duration::from_secs(5);
/// Whole stop of a unit, until its cgroup is gone. Chosen: TERM to KILL takes 2 s of it.
pub const STOP_TIME: Duration = Duration::from_secs(10);
/// The same while the bus is away. Chosen: a restart of the bus daemon takes tens of milliseconds, a hang longer.
pub const STOP_TIME_WITHOUT_BUS: Duration = Duration::from_mins(1);
/// The final drain is given up after this long without a byte. Chosen.
pub const DRAIN_IDLE_TIME: Duration = Duration::from_secs(5);
/// The final drain is given up after this long in all. Chosen.
pub const DRAIN_TIME: Duration = Duration::from_secs(30);
/// First pause before the bus is connected to again. Chosen; doubles up to [`RECONNECT_PAUSE_MAX`].
pub const RECONNECT_PAUSE_MIN: Duration = Duration::from_millis(50);
/// Longest pause between two attempts to reach the bus. Chosen.
pub const RECONNECT_PAUSE_MAX: Duration = Duration::from_secs(1);
/// From TERM and HUP to KILL: the unit's `TimeoutStopUSec`. Chosen.
pub const TERM_TO_KILL_TIME: Duration = Duration::from_secs(2);
/// One file-system call on a foreign descriptor. Chosen.
pub const FOREIGN_CALL_TIME: Duration = Duration::from_secs(3);
/// Pause between two looks whether a stopped unit's cgroup has gone, where no event tells. Chosen.
pub const CGROUP_POLL_PAUSE: Duration = Duration::from_millis(20);
/// Pause between two attempts to stop a unit that outlived its stop. Chosen.
pub const STUCK_RETRY_PAUSE: Duration = Duration::from_secs(30);

// ---- memory and descriptors --------------------------------------------------------------------------------

/// Threads that do file-system calls on foreign descriptors. Chosen.
pub const FOREIGN_CALL_THREADS: usize = 4;
/// Such calls that may wait for a thread. Chosen: one for each handshake.
pub const FOREIGN_CALL_QUEUE_MAX: usize = HANDSHAKES_MAX;
/// Send and receive buffer of the session's socketpair and of its connection, each way. Chosen.
pub const SOCKET_BUFFER_BYTES: usize = 131_072;
/// Input the supervisor holds for one session. Chosen: two full frames.
pub const INPUT_PENDING_BYTES_MAX: usize = 65_536;
/// Most descriptors one message can carry: the kernel's `SCM_MAX_FD`.
pub const MESSAGE_DESCRIPTORS_MAX: usize = 253;

// ---- the session unit (SPEC 8) -----------------------------------------------------------------------------

/// `TasksMax=` of one session. Chosen.
pub const SESSION_TASKS_MAX: u64 = 256;
/// `MemoryHigh=` of one session, bytes. Chosen.
pub const SESSION_MEMORY_HIGH_BYTES: u64 = 768 << 20;
/// `MemoryMax=` of one session, bytes. Chosen.
pub const SESSION_MEMORY_MAX_BYTES: u64 = 1 << 30;
/// `CPUQuota=` of one session, microseconds of CPU time a second: 400%. Chosen.
pub const SESSION_CPU_QUOTA_USEC: u64 = 4_000_000;
/// `IOWeight=` of one session. systemd's default, said explicitly.
pub const SESSION_IO_WEIGHT: u64 = 100;

// ---- fixed paths and names ---------------------------------------------------------------------------------

/// The supervisor's socket.
pub const SOCKET_PATH: &str = "/run/opencode-pty/supervisor.sock";
/// The launcher, one of the binary's three names.
pub const LAUNCHER_PATH: &str = "/usr/local/libexec/opencode-pty-launcher";
/// script(1), of util-linux.
pub const SCRIPT_PATH: &str = "/usr/bin/script";
/// The shell script(1) is told to run, and the session's `SHELL`.
pub const SHELL_PATH: &str = "/bin/sh";
/// The account database.
pub const PASSWD_PATH: &str = "/etc/passwd";
/// The group database (group(5)).
pub const GROUP_PATH: &str = "/etc/group";
/// Where journald takes records in its native protocol (systemd).
pub const JOURNAL_SOCKET_PATH: &str = "/run/systemd/journal/socket";
/// Where the unified cgroup hierarchy is mounted (systemd).
pub const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// The account that sessions run as, unless `--account` says otherwise.
pub const ACCOUNT_DEFAULT: &str = "byk";
/// The unit whose main process may ask for sessions, unless `--server-unit` says otherwise.
pub const SERVER_UNIT_DEFAULT: &str = "opencode-v2.service";
/// The supervisor's own unit, unless `--unit` says otherwise.
pub const SUPERVISOR_UNIT_DEFAULT: &str = "opencode-pty-supervisor.service";
/// The sessions' slice, unless `--slice` says otherwise.
pub const SLICE_DEFAULT: &str = "opencode-pty.slice";
/// The environment variable in which the launcher hands the words to inner-exec.
pub const ARGV_VARIABLE: &str = "OPENCODE_PTY_ARGV";
/// The session's `PATH`, in which a command without a slash is looked up.
pub const SESSION_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
/// Columns and rows of a terminal that reports 0 × 0. The size of a VT100.
pub const TERMINAL_SIZE_DEFAULT: (u16, u16) = (80, 24);

// A start frame at every limit fits into a frame.
const _: () = assert!(8 + 8 + 4 + 2 + 2 + COMMAND_BYTES_MAX + ARGS_BYTES_MAX + 2 * ARGS_MAX <= FRAME_PAYLOAD_BYTES_MAX);
// Each word: one letter `a`, up to two letters of rounding, one dot. Then the variable's name and `=`.
const _: () = assert!(
    (COMMAND_BYTES_MAX + ARGS_BYTES_MAX) * 4 / 3 + 4 * (ARGS_MAX + 1) + ARGV_VARIABLE.len() + 2 < ARG_STRLEN_MAX
);
// Lengths of the start payload are u16.
const _: () = assert!(COMMAND_BYTES_MAX <= u16::MAX as usize);
const _: () = assert!(ARG_BYTES_MAX <= u16::MAX as usize);
const _: () = assert!(ERROR_BYTES_MAX <= FRAME_PAYLOAD_BYTES_MAX && DATA_BYTES_MAX <= FRAME_PAYLOAD_BYTES_MAX);
// While the server is not known yet, a process may have no more of the places than are free: half of them, if it is alone.
const _: () = assert!(SESSIONS_MAX_DEFAULT <= HANDSHAKES_MAX / 2);
// Two whole input frames may be pending.
const _: () = assert!(INPUT_PENDING_BYTES_MAX >= 2 * DATA_BYTES_MAX);
// The unit's own TERM-to-KILL fits into our stop.
const _: () = assert!(TERM_TO_KILL_TIME.as_millis() < STOP_TIME.as_millis());
