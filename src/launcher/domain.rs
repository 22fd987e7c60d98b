//! The wall around a session: a Landlock domain and one seccomp rule. (SPEC 6 step 5; threats T2, T22.)
//!
//! The domain restricts no file. What it is for comes with *any* domain: its processes can't trace processes
//! outside it, nor open their `/proc/PID/{environ,fd,root,cwd,mem}`. From ABI 6 on it is made of scopes alone, which
//! also stop signals and abstract sockets. Below, a domain must handle at least one file-system right, and a
//! domain that does forbids mounts in user namespaces; so newer kernels don't get one.
//!
//! The seccomp program is written out by hand, because seccompiler's own compiler kills every process of another
//! architecture, and a session may run 32-bit programs. Both walls belong to the calling thread.

use std::{error, fmt};

use landlock::{
    AccessFs, CompatLevel, Compatible, LandlockStatus, RestrictSelf, Ruleset, RulesetAttr, RulesetError, RulesetStatus,
    Scope,
};
use seccompiler::sock_filter;

/// What the kernel can do about domains: its Landlock ABI, or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abi(Option<u32>);

/// The first ABI with scopes (Linux 6.12).
const SCOPES_ABI: u32 = 6;

impl Abi {
    /// The one of another kernel, so that a test can have an older kernel's domain on a newer one.
    pub const fn new(version: Option<u32>) -> Self {
        Self(version)
    }

    /// What the running kernel has, as far as the landlock crate knows it.
    pub fn of_this_kernel() -> Result<Self, Error> {
        // Without a flag to set, `apply` makes no Landlock call that restricts: it is the crate's only way to ask.
        let status = RestrictSelf::default().no_new_privs(false).apply().map_err(Error::Landlock)?;
        Ok(match status.landlock {
            LandlockStatus::Available { effective_abi, .. } => Self(Some(effective_abi as u32)),
            LandlockStatus::NotEnabled | LandlockStatus::NotImplemented => Self(None),
        })
    }
}

/// What holds a session apart: the launcher's `started` payload.
///
/// One ASCII line with one spelling for each value, `groups=dropped landlock=N scope=S`. Without Landlock N and S
/// are `none`; below ABI 6 S is `none`, else `signal,abstract`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isolation {
    landlock: Abi,
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.landlock.0 {
            Some(abi) if abi >= SCOPES_ABI => write!(f, "groups=dropped landlock={abi} scope=signal,abstract"),
            Some(abi) => write!(f, "groups=dropped landlock={abi} scope=none"),
            None => f.write_str("groups=dropped landlock=none scope=none"),
        }
    }
}

impl Isolation {
    /// Decodes the line; `None` unless it is exactly what some isolation is spelled like.
    pub fn decode(line: &str) -> Option<Self> {
        let (abi, _scope) = line.strip_prefix("groups=dropped landlock=")?.split_once(' ')?;
        let abi = if abi == "none" { None } else { Some(abi.parse().ok().filter(|abi| *abi > 0)?) };
        let decoded = Self { landlock: Abi(abi) };
        (decoded.to_string() == line).then_some(decoded)
    }
}

/// Why the wall does not stand.
#[derive(Debug)]
pub enum Error {
    /// The kernel refused the domain, or has less than it was asked for.
    Landlock(RulesetError),
    /// The kernel took the domain and enforces only a part of it.
    Partial,
    /// The kernel refused the filter.
    Seccomp(seccompiler::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Landlock(_) => "cannot enter the Landlock domain",
            Self::Partial => "the Landlock domain is not fully enforced",
            Self::Seccomp(_) => "cannot set the seccomp filter",
        })
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Landlock(source) => Some(source),
            Self::Seccomp(source) => Some(source),
            Self::Partial => None,
        }
    }
}

/// Puts the calling thread, and all it will execute, behind the wall. For good.
///
/// `abi` says which domain to make, so that a test can have an older kernel's on a newer one.
pub fn enter(abi: Abi) -> Result<Isolation, Error> {
    if let Some(abi) = abi.0 {
        enter_landlock(abi)?;
    }
    seccompiler::apply_filter(&FILTER).map_err(Error::Seccomp)?;
    Ok(Isolation { landlock: abi })
}

fn enter_landlock(abi: u32) -> Result<(), Error> {
    // Hard: what this kernel can't enforce is an error here, never a silent gap.
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let ruleset = if abi >= SCOPES_ABI {
        ruleset.scope(Scope::Signal | Scope::AbstractUnixSocket)
    } else {
        // Making block devices takes a privilege nobody here has: the one right whose loss nobody notices.
        ruleset.handle_access(AccessFs::MakeBlock)
    };
    let status = ruleset.and_then(Ruleset::create).and_then(landlock::RulesetCreated::restrict_self);
    match status.map_err(Error::Landlock)?.ruleset {
        RulesetStatus::FullyEnforced => Ok(()),
        RulesetStatus::PartiallyEnforced | RulesetStatus::NotEnforced => Err(Error::Partial),
    }
}

// ---- the seccomp program -----------------------------------------------------------------------------------
//
// prlimit64(pid, resource, new_limit, old_limit) with a pid other than 0 and a new limit fails with EPERM. Without
// it a session can have the server killed a second later (`prlimit --pid SERVER --cpu=1`), also from inside a
// domain. A filter can't compare the pid with the caller's own, so naming oneself is refused too; setrlimit and
// every shell's `ulimit` pass 0 or use another call, and can only set the caller's own limits.

/// Operations, from `linux/filter.h` and `linux/bpf_common.h`.
const LOAD_WORD: u16 = 0x20;
const AND: u16 = 0x54;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

/// Where things are in the kernel's `struct seccomp_data`. Arguments have 64 bits, low half first on amd64.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
/// The kernel takes a pid's low half only, so that half is what is looked at.
const PID: u32 = 16;
const NEW_LIMIT_LOW: u32 = 32;
const NEW_LIMIT_HIGH: u32 = 36;

/// `AUDIT_ARCH_X86_64` and `AUDIT_ARCH_I386`.
const ARCH_AMD64: u32 = 0xc000_003e;
const ARCH_I386: u32 = 0x4000_0003;
/// prlimit64 on amd64, where x32 programs set one more bit in the number, and on i386.
const PRLIMIT64_AMD64: u32 = 302;
const X32_BIT: u32 = 0x4000_0000;
const PRLIMIT64_I386: u32 = 340;

/// `SECCOMP_RET_ALLOW`, and `SECCOMP_RET_ERRNO` with EPERM (1).
const ALLOW: u32 = 0x7fff_0000;
const REFUSE: u32 = 0x0005_0001;

/// An operation that goes on with the next line.
const fn op(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

/// A comparison that skips `jt` lines if the accumulator is `k` and `jf` lines if not.
const fn equal(k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: JUMP_IF_EQUAL, jt, jf, k }
}

/// Numbers in the comments are lines; a jump of n from line l goes to line l + 1 + n.
const FILTER: [sock_filter; 16] = [
    /*  0 */ op(LOAD_WORD, ARCHITECTURE),
    /*  1 */ equal(ARCH_AMD64, 1, 0), // amd64 or x32: 3
    /*  2 */ equal(ARCH_I386, 3, 11), // i386: 6; none that this kernel runs: 14
    /*  3 */ op(LOAD_WORD, NUMBER),
    /*  4 */ op(AND, !X32_BIT),
    /*  5 */ equal(PRLIMIT64_AMD64, 2, 8), // 8; another call: 14
    /*  6 */ op(LOAD_WORD, NUMBER),
    /*  7 */ equal(PRLIMIT64_I386, 0, 6), // 8; another call: 14
    /*  8 */ op(LOAD_WORD, PID),
    /*  9 */ equal(0, 4, 0), // one's own limits: 14
    /* 10 */ op(LOAD_WORD, NEW_LIMIT_LOW),
    /* 11 */ equal(0, 0, 3), // a pointer: 15
    /* 12 */ op(LOAD_WORD, NEW_LIMIT_HIGH),
    /* 13 */ equal(0, 0, 1), // a pointer: 15; null, only a question: 14
    /* 14 */ op(RETURN, ALLOW),
    /* 15 */ op(RETURN, REFUSE),
];

// Elsewhere the filter would let everything through, without a word.
const _: () = assert!(cfg!(all(target_arch = "x86_64", target_os = "linux")), "the seccomp filter is for amd64");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::privileges;
    use std::io;
    use std::process::{Child, Command, Stdio};

    /// What the filter answers, by a reading of the program that follows every jump.
    fn answer(arch: u32, number: u32, args: [u64; 6]) -> u32 {
        let mut data = Vec::new();
        data.extend_from_slice(&number.to_le_bytes());
        data.extend_from_slice(&arch.to_le_bytes());
        data.extend_from_slice(&0x1234_5678_9abc_def0_u64.to_le_bytes());
        data.extend(args.iter().flat_map(|arg| arg.to_le_bytes()));

        let (mut accumulator, mut line) = (0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = FILTER[line].clone();
            line += 1;
            match code {
                LOAD_WORD => {
                    let at = k as usize;
                    accumulator = u32::from_le_bytes(data[at..at + 4].try_into().unwrap());
                }
                AND => accumulator &= k,
                JUMP_IF_EQUAL => line += usize::from(if accumulator == k { jt } else { jf }),
                RETURN => return k,
                other => panic!("operation {other:#x}"),
            }
        }
    }

    #[test]
    fn setting_a_limit_of_another_process_is_refused_by_every_way_into_the_kernel() {
        const POINTER: u64 = 0x7ffd_0000_1000;
        for (arch, number, pid, new_limit, want) in [
            (ARCH_AMD64, 302, 77, POINTER, REFUSE),
            (ARCH_AMD64, 302, 77, 0x1000, REFUSE),
            (ARCH_AMD64, 302, 77, 0x7_0000_0000, REFUSE),
            (ARCH_AMD64, 302, 0xffff_ffff, POINTER, REFUSE),
            (ARCH_AMD64, 302, 0xffff_ffff_0000_004d, POINTER, REFUSE),
            (ARCH_AMD64, PRLIMIT64_AMD64 | X32_BIT, 77, 0x1000, REFUSE),
            (ARCH_I386, 340, 77, 0xffff_0000, REFUSE),
            // One's own limits, and questions.
            (ARCH_AMD64, 302, 0, POINTER, ALLOW),
            (ARCH_AMD64, 302, 0x7_0000_0000, POINTER, ALLOW),
            (ARCH_AMD64, 302, 77, 0, ALLOW),
            (ARCH_AMD64, PRLIMIT64_AMD64 | X32_BIT, 0, 0x1000, ALLOW),
            (ARCH_AMD64, PRLIMIT64_AMD64 | X32_BIT, 77, 0, ALLOW),
            (ARCH_I386, 340, 0, 0xffff_0000, ALLOW),
            (ARCH_I386, 340, 77, 0, ALLOW),
            // The same numbers mean other calls on the other architecture.
            (ARCH_AMD64, 340, 77, POINTER, ALLOW),
            (ARCH_I386, 302, 77, POINTER, ALLOW),
            (ARCH_I386, PRLIMIT64_I386 | X32_BIT, 77, POINTER, ALLOW),
            (0xc000_00b7, 261, 77, POINTER, ALLOW),
        ] {
            let found = answer(arch, number, [pid, 0, new_limit, 0, 0, 0]);
            assert_eq!(found, want, "arch {arch:#x}, call {number:#x}, pid {pid:#x}, limit {new_limit:#x}");
        }
    }

    #[test]
    fn every_other_call_passes() {
        for arch in [ARCH_AMD64, ARCH_I386] {
            let prlimit64 = if arch == ARCH_AMD64 { PRLIMIT64_AMD64 } else { PRLIMIT64_I386 };
            for number in (0..1_024).filter(|number| *number != prlimit64) {
                assert_eq!(answer(arch, number, [u64::MAX; 6]), ALLOW, "arch {arch:#x}, call {number}");
            }
        }
    }

    #[test]
    fn an_isolation_has_one_spelling() {
        for (abi, line) in [
            (None, "groups=dropped landlock=none scope=none"),
            (Some(1), "groups=dropped landlock=1 scope=none"),
            (Some(4), "groups=dropped landlock=4 scope=none"),
            (Some(6), "groups=dropped landlock=6 scope=signal,abstract"),
            (Some(12), "groups=dropped landlock=12 scope=signal,abstract"),
        ] {
            let isolation = Isolation { landlock: Abi(abi) };
            assert_eq!(isolation.to_string(), line);
            assert_eq!(Isolation::decode(line), Some(isolation));
            assert!(line.len() <= 256 && line.is_ascii());
        }
        for line in [
            "",
            "groups=dropped",
            "groups=kept landlock=6 scope=signal,abstract",
            "groups=dropped landlock=0 scope=none",
            "groups=dropped landlock=04 scope=none",
            "groups=dropped landlock=+4 scope=none",
            "groups=dropped landlock=4 scope=signal,abstract",
            "groups=dropped landlock=6 scope=none",
            "groups=dropped landlock=6 scope=signal",
            "groups=dropped landlock=none scope=signal,abstract",
            "groups=dropped landlock=4 scope=none ",
            "groups=dropped landlock=4  scope=none",
            "groups=dropped landlock=4294967296 scope=signal,abstract",
        ] {
            assert_eq!(Isolation::decode(line), None, "'{line}'");
        }
    }

    /// A process outside the domain, ended when dropped.
    struct Outsider(Child);

    impl Outsider {
        fn new() -> Self {
            Self(Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap())
        }

        fn look_into(&self) -> io::Result<Vec<u8>> {
            std::fs::read(format!("/proc/{}/environ", self.0.id()))
        }

        /// Whether its limits can be set, and whether they can be seen.
        fn limits(&self) -> [bool; 2] {
            ["--nofile=3:3", "--nofile"].map(|what| {
                let pid = self.0.id().to_string();
                Command::new("prlimit").args(["--pid", &pid, what]).output().unwrap().status.success()
            })
        }
    }

    impl Drop for Outsider {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Enters a domain of `abi` on a thread of its own and runs `then` there; not applicable on an older kernel.
    ///
    /// Run as root, the thread drops its capabilities first, as the launcher does: CAP_PERFMON alone opens
    /// `/proc/PID/environ` past every domain (Linux 6.18). The outsider has none either, so that it is the domain
    /// that keeps the two apart and not a lack of capabilities.
    fn behind_a_wall(abi: Option<u32>, then: impl FnOnce(Isolation, &mut Outsider) + Send) {
        if Abi::of_this_kernel().unwrap().0 < abi {
            eprintln!("not applicable: this kernel's Landlock is older than ABI {abi:?}");
            return;
        }
        let outsider = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                privileges::drop_capabilities().unwrap();
                privileges::forbid_new_privileges().unwrap();
                let mut outsider = Outsider::new();
                outsider.look_into().unwrap();
                then(enter(Abi(abi)).unwrap(), &mut outsider);
                outsider
            });
            thread.join().unwrap()
        });
        // Ended from outside the domain.
        drop(outsider);
    }

    #[test]
    fn from_abi_6_on_an_outsider_can_be_neither_looked_into_nor_signalled() {
        behind_a_wall(Some(6), |isolation, outsider| {
            assert_eq!(isolation.to_string(), "groups=dropped landlock=6 scope=signal,abstract");
            assert_eq!(outsider.look_into().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
            assert_eq!(outsider.0.kill().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        });
    }

    #[test]
    fn below_abi_6_an_outsider_can_not_be_looked_into_and_signals_are_open() {
        behind_a_wall(Some(4), |isolation, outsider| {
            assert_eq!(isolation.to_string(), "groups=dropped landlock=4 scope=none");
            assert_eq!(outsider.look_into().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
            outsider.0.kill().unwrap();
        });
    }

    #[test]
    fn an_outsiders_limits_can_be_seen_and_not_set_even_without_landlock() {
        behind_a_wall(None, |isolation, outsider| {
            assert_eq!(isolation.to_string(), "groups=dropped landlock=none scope=none");
            assert_eq!(outsider.limits(), [false, true]);
            assert!(Command::new("sh").args(["-c", "ulimit -n 100"]).status().unwrap().success());
        });
    }
}
