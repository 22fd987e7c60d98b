//! A machine of its own: Debian trixie under QEMU without KVM, with every controller of the unified hierarchy.
//!
//! It is slow (about ten times) and takes half a minute to boot; what a container host can show is shown there. A VM is
//! one `qemu-system-x86_64` and a directory; the disk it writes to is an unnamed file that ends with it. There is no network.
//! Commands go through a virtio-serial port to an agent inside (`agent.rs`), one at a time; a second port is for people.
//!
//! Tests of the product run *inside*, where descriptors can be passed: `Vm::install` makes the inside a host
//! that `Host::attach(HOST)` finds. What only the machine outside can see, a reboot or the end of it all, is tested from here.

/// The inside.
pub mod agent;
mod image;
mod wire;

use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

pub use image::install_tools;
use rustix::net::{self, sockopt};

use self::wire::{Kind, PAYLOAD_BYTES_MAX};
use crate::host::{Error, build_vm_agent, check_name, start_time, target, workspace};

/// Where each VM that runs has a directory.
const STATES: &str = "/run/opencode-pty-vms";

/// What the agents' disk is unpacked to, inside, and what else tests need there.
pub const FILES: &str = "/opt/opencode-pty-tests";

/// The name by which tests inside find the host they run on.
pub const HOST: &str = "vm";

/// QEMU's monitor, in that directory.
const MONITOR: &str = "monitor";

/// From the start of QEMU, or of a reboot, to an answer of the agent. Chosen: half a minute is usual on a quiet machine, and
/// four minutes were seen on one with eight times the work that it can do.
const BOOT_MAX: Duration = Duration::from_mins(10);

/// From SIGKILL to the last of it. Chosen.
const DOWN_MAX: Duration = Duration::from_secs(15);

/// How long an agent that is there takes to say so. Chosen: a byte each way, on a machine with all its processors busy.
const PONG_MAX: Duration = Duration::from_secs(20);

/// How long a command may say nothing, unless its caller knows better. Chosen: the longest seen is half a minute, on a machine
/// with all its processors busy.
const SILENCE_MAX: Duration = Duration::from_mins(3);

/// Between two looks whether a VM that says nothing has a kernel yet.
const LOOK_FOR_PANIC: Duration = Duration::from_secs(5);

/// Between two looks at something that sends no event.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The VM's memory: the slice's 2 GiB at their limit, the stand-in, and room.
const MEMORY: &str = "4G";

/// The processor: what protects a kernel from itself costs a tenth of the speed here, and so do five levels of pages.
const PROCESSOR: &str = "max,-smap,-smep,-la57";

/// What the kernel is told. It boots with one processor, see [`STEADY`]. Mitigations, and its care about its own memory, would
/// only cost time, and so would looking for timers, processors and tasks that seem to stand still, as they do here when the
/// machine outside is busy. The console is what a shutdown is watched on.
const KERNEL: &str = "root=/dev/vda rw console=ttyS0 maxcpus=1 loglevel=4 fsck.mode=skip systemd.show_status=auto \
                      mitigations=off init_on_alloc=0 hardened_usercopy=off randomize_kstack_offset=off \
                      no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1 tsc=reliable";

/// Gives a machine that is up its second processor, and keeps its kernel's code as it is.
///
/// Linux patches jumps in its own code when something is used for the first time, and when for the last (static keys), and keeps
/// the other processors out of the place by a breakpoint. With two of them QEMU 7.2 now and then has one run into a breakpoint
/// that is gone already, and the kernel gives up: "Fatal exception in interrupt", one byte behind a jump. Most of that is done
/// while the machine boots; afterwards each first session would do some, for what its unit is the only one to use.
const STEADY: &str = "systemd-run --quiet --unit=steady --property=CPUQuota=400% --property=MemoryHigh=1G --property=TasksMax=10 \
                      --property=IOWeight=100 --property=IPAddressDeny=any --property=DevicePolicy=closed sleep infinity && \
                      echo 1 >/sys/devices/system/cpu/cpu1/online";

/// Who may use which port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// Programs.
    Tests,
    /// A person at a terminal, so that both can work.
    Shell,
}

impl Port {
    fn file(self) -> &'static str {
        match self {
            Self::Tests => "agent.0",
            Self::Shell => "agent.1",
        }
    }
}

/// A running VM.
#[derive(Debug)]
pub struct Vm {
    name: String,
    qemu: u32,
    start_time: String,
    /// QEMU itself, where the VM is to end with this process.
    child: Option<Child>,
}

/// Sees to it that what a VM is made of is in the cache, and the tools it needs installed.
///
/// # Errors
/// A package can't be had, or the image can't be built.
pub fn prepare(progress: &mut dyn FnMut(&str)) -> Result<(), Error> {
    image::parts(progress).map(drop)
}

impl Vm {
    /// Boots a VM and waits until its agent answers and its systemd says that it is up.
    ///
    /// Installs the tools it needs, and builds the image if it is not in the cache. An ephemeral VM ends with this process,
    /// however that one ends.
    pub fn boot(name: &str, ephemeral: bool, progress: &mut dyn FnMut(&str)) -> Result<Self, Error> {
        check_name(name)?;
        if Self::attach(name).is_ok() {
            return Err(Error::failed("boot a VM", format!("a VM '{name}' is up already")));
        }
        let (image, emulator) = image::parts(progress)?;
        let directory = state_dir(name);
        // What a VM that has ended left behind.
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).map_err(Error::system(format!("make {}", directory.display())))?;
        let agents = directory.join("agents.tar");
        archive(&[("opencode-vm-agent", &build_vm_agent()?)], &agents)?;

        progress(&format!("VM {name}: booting, without KVM; about half a minute"));
        let child = start_qemu(emulator, &image, &directory, ephemeral)?;
        let qemu = child.id();
        let start_time = start_time(qemu).unwrap_or_default();
        let state = format!("qemu={qemu}\nstarttime={start_time}\n");
        fs::write(directory.join("state"), state).map_err(Error::system("write the VM's state file"))?;
        let mut vm = Self { name: name.to_owned(), qemu, start_time, child: Some(child) };
        let up = vm.wait_until_up(progress);
        if let Err(error) = up {
            vm.end()?;
            return Err(error);
        }
        if !ephemeral {
            vm.child = None;
        }
        Ok(vm)
    }

    /// The VM of this name that runs already.
    pub fn attach(name: &str) -> Result<Self, Error> {
        check_name(name)?;
        let gone = || Error::failed("find the VM", format!("no VM '{name}' is up"));
        let state = fs::read_to_string(state_dir(name).join("state")).map_err(|_| gone())?;
        let value =
            |key: &str| state.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).ok_or_else(gone);
        let qemu = value("qemu")?.parse().map_err(|_| gone())?;
        let vm = Self { name: name.to_owned(), qemu, start_time: value("starttime")?.to_owned(), child: None };
        if vm.runs() { Ok(vm) } else { Err(gone()) }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether its QEMU still runs.
    pub fn runs(&self) -> bool {
        // A zombie has a start time, too.
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.qemu)).unwrap_or_default();
        let alive = stat.rsplit_once(") ").is_some_and(|(_, fields)| !fields.starts_with(['Z', 'X']));
        alive && start_time(self.qemu).as_deref() == Some(self.start_time.as_str())
    }

    /// Blocks until its systemd has finished starting: after the boot, and after a reboot that was asked for.
    pub fn wait_until_up(&mut self, progress: &mut dyn FnMut(&str)) -> Result<(), Error> {
        let deadline = Instant::now() + BOOT_MAX;
        loop {
            let exited = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            if exited.is_some() || !self.runs() {
                let said = fs::read_to_string(state_dir(&self.name).join("qemu.log")).unwrap_or_default();
                let error = Error::failed(format!("boot {self}"), format!("QEMU ended: {said}"));
                return Err(error.and_detail(&self.console_tail()));
            }
            // An agent that went down with the machine never answers, and its port stays open: ask anew rather than wait.
            match self.sh_within("systemctl is-system-running", PONG_MAX) {
                Ok(output) => match String::from_utf8_lossy(&output.stdout).trim() {
                    "running" => break,
                    "degraded" => {
                        let failed = self.sh_ok("systemctl list-units --failed --plain --no-legend --no-pager")?;
                        progress(&format!("{self} is up, without: {failed}"));
                        break;
                    }
                    // Still the one before the reboot.
                    "stopping" | "starting" | "" if Instant::now() < deadline => thread::sleep(LOOK_AGAIN),
                    other => {
                        let error = Error::failed(format!("boot {self}"), format!("its systemd says '{other}'"));
                        return Err(error.and_detail(&self.state()));
                    }
                },
                Err(_) if Instant::now() < deadline && !self.has_panicked() => thread::sleep(LOOK_AGAIN),
                Err(error) => return Err(error),
            }
        }
        self.sh_ok(STEADY).map(drop)
    }

    /// Which boot this is, in the kernel's words; another one after each reboot.
    pub fn boot_id(&self) -> Result<String, Error> {
        self.sh_ok("cat /proc/sys/kernel/random/boot_id")
    }

    // ---- commands ----------------------------------------------------------------------------------------------

    /// Runs words inside as root, in `/`, with these as its standard streams; ends when it has closed them and exited.
    ///
    /// An error if nothing is heard from the VM for `silence`.
    pub fn run(
        &self,
        port: Port,
        silence: Option<Duration>,
        words: &[&str],
        input: impl Read + Send + 'static,
        output: &mut dyn Write,
        complaints: &mut dyn Write,
    ) -> Result<ExitStatus, Error> {
        let doing = || format!("run '{}' in {self}", words.join(" "));
        let channel = self.connect(port)?;
        let mut listener = Listener { vm: self, channel: &channel, silence };
        let mut command = words.join("\0");
        command.push('\0');
        let ended = (|| {
            channel.set_read_timeout(Some(LOOK_FOR_PANIC))?;
            wire::write(&channel, Kind::Run, command.as_bytes())?;
            let sending = channel.try_clone()?;
            // It ends when the input does, or the connection.
            thread::spawn(move || feed(input, &sending));
            loop {
                match wire::read(&mut listener)? {
                    (Kind::Output, bytes) => {
                        output.write_all(&bytes)?;
                        output.flush()?;
                    }
                    (Kind::Complaint, bytes) => {
                        complaints.write_all(&bytes)?;
                        complaints.flush()?;
                    }
                    (Kind::Ended, status) => {
                        let status = status.try_into().map_err(|_| io::Error::other("a status that is not one"))?;
                        return Ok(ExitStatus::from_raw(i32::from_be_bytes(status)));
                    }
                    (other, _) => return Err(io::Error::other(format!("the agent sent {other:?}"))),
                }
            }
        })();
        let _ = channel.shutdown(std::net::Shutdown::Both);
        ended.map_err(|error: io::Error| match error.kind() {
            ErrorKind::UnexpectedEof => Error::failed(doing(), "the VM ended or hung up"),
            ErrorKind::TimedOut => Error::failed(doing(), error.to_string()).and_detail(&self.state()),
            _ => Error::system(doing())(error),
        })
    }

    /// Runs a bash script inside, without input, and waits for it.
    pub fn sh(&self, script: &str) -> Result<Output, Error> {
        self.sh_within(script, SILENCE_MAX)
    }

    fn sh_within(&self, script: &str, silence: Duration) -> Result<Output, Error> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let words = ["/bin/bash", "-c", script];
        let status = self.run(Port::Tests, Some(silence), &words, io::empty(), &mut stdout, &mut stderr)?;
        Ok(Output { status, stdout, stderr })
    }

    /// Like [`Vm::sh`], but a failure is an error; what it printed, without the last newline.
    pub fn sh_ok(&self, script: &str) -> Result<String, Error> {
        let output = self.sh(script)?;
        let stdout = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let detail = format!("{}\n{stdout}{stderr}", output.status);
            return Err(Error::failed(format!("run '{script}' in {self}"), detail));
        }
        Ok(stdout.strip_suffix('\n').unwrap_or(&stdout).to_owned())
    }

    /// Copies files into [`FILES`], each under a name or a path below it.
    pub fn copy_in(&self, files: &[(&str, &Path)]) -> Result<(), Error> {
        let tar = state_dir(&self.name).join("files.tar");
        archive(files, &tar)?;
        self.unpack(&tar, FILES)
    }

    /// Unpacks a tar archive of this machine into a directory of the VM.
    fn unpack(&self, tar: &Path, into: &str) -> Result<(), Error> {
        let file = File::open(tar).map_err(Error::system(format!("open {}", tar.display())))?;
        let mut said = Vec::new();
        let words = ["/bin/tar", "--extract", "--directory", into];
        let status = self.run(Port::Tests, Some(SILENCE_MAX), &words, file, &mut io::sink(), &mut said)?;
        let _ = fs::remove_file(tar);
        if status.success() {
            return Ok(());
        }
        let detail = format!("{status}: {}", String::from_utf8_lossy(&said));
        Err(Error::failed(format!("copy files into {self}"), detail))
    }

    /// Installs the product and the stand-in, by the code that installs them on container hosts, and starts both.
    ///
    /// The unit files lie inside at the path they have here, where installer and tests look for them.
    pub fn install(&self, product: &Path, standin: &Path) -> Result<(), Error> {
        self.copy_in(&[("opencode-pty", product), ("opencode-standin", standin)])?;
        let units = state_dir(&self.name).join("units.tar");
        let shipped = workspace().join("units");
        tar(Path::new("/"), shipped.strip_prefix("/").unwrap_or(&shipped), &units)?;
        self.unpack(&units, "/")?;
        self.sh_ok(&format!("{FILES}/opencode-vm-agent install {HOST} {FILES}")).map(drop)
    }

    // ---- what there is to see of it ----------------------------------------------------------------------------

    /// The journal of this boot (0) or an earlier one (-1, …).
    pub fn journal(&self, boot: i32) -> Result<String, Error> {
        self.sh_ok(&format!("journalctl --boot={boot} --output=short-monotonic --no-pager"))
    }

    /// All that came out of its serial console so far, reboots included.
    pub fn console(&self) -> String {
        let bytes = fs::read(state_dir(&self.name).join("console")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// What there is to see of a VM that has gone quiet: whether its processors run, and where; who holds its ports; the end of
    /// its console.
    fn state(&self) -> String {
        let mut said = Vec::new();
        let asked = connect_within(&state_dir(&self.name).join(MONITOR), PONG_MAX).and_then(|mut monitor| {
            monitor.write_all(b"info status\ninfo chardev\ninfo registers -a\n")?;
            // It stays open: what it says ends when it says nothing more.
            monitor.set_read_timeout(Some(Duration::from_secs(2)))?;
            monitor.read_to_end(&mut said).map(drop)
        });
        let said = String::from_utf8_lossy(&said);
        let useful = ["VM status", "filename=", "CPU#", "RIP="];
        let mut lines: Vec<&str> = said.lines().filter(|line| useful.iter().any(|word| line.contains(word))).collect();
        let error = asked.err().filter(|_| lines.is_empty()).map(|error| format!("QEMU's monitor: {error}"));
        lines.extend(error.as_deref());
        format!("{}\nits console ends with:\n{}", lines.join("\n"), self.console_tail())
    }

    /// Whether its kernel has given up.
    pub fn has_panicked(&self) -> bool {
        self.console().contains("Kernel panic - not syncing")
    }

    /// The end of it.
    pub fn console_tail(&self) -> String {
        let console = self.console();
        let lines: Vec<&str> = console.lines().collect();
        lines.get(lines.len().saturating_sub(30)..).unwrap_or_default().join("\n")
    }

    /// Blocks until QEMU has ended by itself, as it does when the machine inside powers off.
    pub fn wait_until_off(&mut self, time: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + time;
        loop {
            // Reaped, if it is ours.
            let exited = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            if exited.is_some() || !self.runs() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Error::failed(format!("see {self} power off"), self.console_tail()));
            }
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// Ends it at once.
    pub fn down(mut self) -> Result<(), Error> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Error> {
        let pid = i32::try_from(self.qemu).ok().and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid.filter(|_| self.runs()) {
            // It may have ended by itself.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        self.wait_until_off(DOWN_MAX)?;
        self.child = None;
        let directory = state_dir(&self.name);
        fs::remove_dir_all(&directory).map_err(Error::system(format!("remove {}", directory.display())))
    }

    /// A connection to an agent that has answered on it.
    fn connect(&self, port: Port) -> Result<UnixStream, Error> {
        let doing = || format!("reach the agent of {self}");
        let mut nonce = [0_u8; 16];
        let path = state_dir(&self.name).join(port.file());
        let deadline = Instant::now() + BOOT_MAX;
        loop {
            let stream = connect_within(&path, PONG_MAX).map_err(|error| match error.kind() {
                ErrorKind::WouldBlock => Error::failed(doing(), "QEMU takes no connection").and_detail(&self.state()),
                _ => Error::system(doing())(error),
            })?;
            File::open("/dev/urandom")
                .and_then(|mut random| random.read_exact(&mut nonce))
                .map_err(Error::system("read random bytes"))?;
            match answers(&stream, nonce) {
                Ok(()) => return Ok(stream),
                Err(error) if !self.runs() => return Err(Error::system(doing())(error)),
                Err(error) if Instant::now() > deadline || self.has_panicked() => {
                    return Err(Error::failed(doing(), error.to_string()).and_detail(&self.state()));
                }
                // It is not there yet, or has not noticed that the one before us has gone.
                Err(_) => thread::sleep(LOOK_AGAIN),
            }
        }
    }
}

/// What a VM says; `TimedOut` if it says nothing for so long, or never will again. The channel has a read timeout.
struct Listener<'a> {
    vm: &'a Vm,
    channel: &'a UnixStream,
    silence: Option<Duration>,
}

impl Read for Listener<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let begun = Instant::now();
        loop {
            match self.channel.read(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => return other,
            }
            if self.vm.has_panicked() {
                return Err(io::Error::new(ErrorKind::TimedOut, "its kernel has given up"));
            }
            if self.silence.is_some_and(|most| begun.elapsed() >= most) {
                let seconds = begun.elapsed().as_secs();
                return Err(io::Error::new(ErrorKind::TimedOut, format!("it has said nothing for {seconds} s")));
            }
        }
    }
}

impl fmt::Display for Vm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VM {}", self.name)
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if self.child.is_some() {
            // Nobody is there to tell.
            let _ = self.end();
        }
    }
}

fn state_dir(name: &str) -> PathBuf {
    Path::new(STATES).join(name)
}

fn start_qemu(emulator: Vec<String>, image: &Path, directory: &Path, ephemeral: bool) -> Result<Child, Error> {
    let doing = "start qemu-system-x86_64";
    let at = |file: &str| directory.join(file).display().to_string();
    let of = |file: &str| image.join(file).display().to_string();
    let mut words = emulator;
    let mut add = |more: &[&str]| words.extend(more.iter().map(|&word| word.to_owned()));
    add(&["-nodefaults", "-no-user-config", "-display", "none", "-accel", "tcg,thread=multi", "-cpu", PROCESSOR]);
    add(&["-smp", "2", "-m", MEMORY]);
    add(&["-kernel", &of("kernel"), "-initrd", &of("initrd"), "-append", KERNEL]);
    // `snapshot`: what is written goes to an unnamed file. `unsafe`: nothing of it has to survive this machine's crash.
    add(&["-drive", &format!("file={},format=raw,if=virtio,snapshot=on,cache=unsafe", of("disk"))]);
    add(&["-drive", &format!("file={},format=raw,if=virtio,readonly=on", at("agents.tar"))]);
    add(&["-chardev", &format!("file,id=console,path={}", at("console")), "-serial", "chardev:console"]);
    add(&["-chardev", &format!("socket,id=monitor,path={},server=on,wait=off", at(MONITOR))]);
    add(&["-mon", "chardev=monitor,mode=readline"]);
    add(&["-device", "virtio-serial-pci"]);
    for (index, port) in [Port::Tests, Port::Shell].into_iter().enumerate() {
        add(&["-chardev", &format!("socket,id=agent{index},path={},server=on,wait=off", at(port.file()))]);
        add(&["-device", &format!("virtserialport,chardev=agent{index},name=opencode-pty.agent.{index}")]);
    }
    let mut command = if ephemeral {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        command
    } else {
        Command::new("setsid")
    };
    let log = File::create(directory.join("qemu.log")).map_err(Error::system("write QEMU's log"))?;
    let child = command
        .args(words)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .map_err(Error::system(doing))?;
    // Both helpers execute QEMU in their own place, so that its pid is the child's; its sockets show that it has begun.
    let deadline = Instant::now() + DOWN_MAX;
    while !directory.join(Port::Shell.file()).exists() && Instant::now() < deadline {
        thread::sleep(LOOK_AGAIN);
    }
    Ok(child)
}

/// A connection to one of QEMU's sockets; `WouldBlock` if it has not been taken after this long. QEMU takes one at a time, and
/// connect(2) waits without end when it takes none.
fn connect_within(path: &Path, time: Duration) -> io::Result<UnixStream> {
    let socket = net::socket_with(net::AddressFamily::UNIX, net::SocketType::STREAM, net::SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(time))?;
    net::connect(&socket, &net::SocketAddrUnix::new(path)?)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, None)?;
    Ok(socket.into())
}

/// Whether an agent sends these bytes back.
fn answers(mut stream: &UnixStream, nonce: [u8; 16]) -> io::Result<()> {
    stream.set_read_timeout(Some(PONG_MAX))?;
    wire::open(stream, &nonce)?;
    let wanted = wire::encode(Kind::Pong, &nonce)?;
    // What is left of an earlier connection may come before.
    let mut last = Vec::new();
    while last != wanted {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        last.extend_from_slice(&byte);
        if last.len() > wanted.len() {
            last.remove(0);
        }
    }
    stream.set_read_timeout(None)
}

fn feed(mut input: impl Read, channel: &UnixStream) {
    let mut buffer = vec![0; PAYLOAD_BYTES_MAX];
    loop {
        let len = input.read(&mut buffer).unwrap_or(0);
        let sent = wire::write(channel, Kind::Input, buffer.get(..len).unwrap_or_default());
        if len == 0 || sent.is_err() {
            return;
        }
    }
}

/// Puts files into a tar archive under other names, programs without what only a debugger reads.
fn archive(files: &[(&str, &Path)], to: &Path) -> Result<(), Error> {
    let staged = target().join(format!("vm-files-{}", std::process::id()));
    let _ = fs::remove_dir_all(&staged);
    fs::create_dir_all(&staged).map_err(Error::system(format!("make {}", staged.display())))?;
    for (name, file) in files {
        let copy = staged.join(name);
        fs::create_dir_all(copy.parent().unwrap_or(&staged))
            .and_then(|()| fs::copy(file, &copy))
            .map_err(Error::system(format!("copy {}", file.display())))?;
        // It comes with the linker; what it can't read, it leaves alone.
        let _ = Command::new("strip").arg("--strip-debug").arg(&copy).stderr(Stdio::null()).status();
    }
    let done = tar(&staged, Path::new("."), to);
    let _ = fs::remove_dir_all(&staged);
    done
}

/// Puts what a directory has under a path into an archive, as root's.
fn tar(directory: &Path, what: &Path, to: &Path) -> Result<(), Error> {
    let doing = format!("archive {} of {}", what.display(), directory.display());
    let output = Command::new("tar")
        .args(["--create", "--owner=0", "--group=0", "--file"])
        .arg(to)
        .arg("--directory")
        .arg(directory)
        .arg(what)
        .output()
        .map_err(Error::system(doing.clone()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::failed(doing, String::from_utf8_lossy(&output.stderr).into_owned()))
}
