//! What a VM is made of, its disk, kernel and initrd and the QEMU that runs it: built once per recipe and machine, never
//! written to afterwards.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::host::root::{ROOT, cache, debian, install_missing, key, once};
use crate::host::{Error, Suite};

/// What is set up inside, beside the pristine root's settings.
const SETTINGS: &str = include_str!("settings.sh");

/// From an installed directory to a disk, a kernel and an initrd.
const PACK: &str = include_str!("pack-image.sh");

/// What mmdebstrap is told beside [`ROOT`].
const OPTIONS: [&str; 3] = [
    "--include=linux-image-cloud-amd64,initramfs-tools,zstd",
    "--setup-hook=mkdir -p \"$1/etc/initramfs-tools/conf.d\" && echo MODULES=list >\"$1/etc/initramfs-tools/conf.d/vm\"",
    "--customize-hook=chroot \"$1\" /bin/bash -e -c \"$OPENCODE_PTY_MORE_SETTINGS\"",
];

/// Each program that a VM needs on the machine, and the Debian package that has it.
const TOOLS: [(&str, &str); 5] = [
    ("mkfs.ext4", "e2fsprogs"),
    ("mmdebstrap", "mmdebstrap"),
    ("setpriv", "util-linux"),
    ("setsid", "util-linux"),
    ("tar", "tar"),
];

/// Installs what the machine lacks of the programs that a VM needs.
///
/// # Errors
/// apt can't.
pub fn install_tools(progress: &mut dyn FnMut(&str)) -> Result<(), Error> {
    install_missing(&TOOLS, progress)
}

/// All that a VM is made of: [`image`] and [`emulator`].
pub(super) fn parts(progress: &mut dyn FnMut(&str)) -> Result<(PathBuf, Vec<String>), Error> {
    Ok((image(progress)?, emulator(progress)?))
}

/// The directory with `disk`, `kernel` and `initrd`, from the cache or built now.
fn image(progress: &mut dyn FnMut(&str)) -> Result<PathBuf, Error> {
    install_tools(progress)?;
    let suite = Suite::Trixie;
    let options = [ROOT.as_slice(), &OPTIONS].concat();
    let recipe = [&*options, &[SETTINGS, PACK]].concat();
    let image = cache().join("vms").join(format!("{suite}-{:016x}", key(&recipe)));
    let mut build = |unfinished: &Path, progress: &mut dyn FnMut(&str)| {
        fs::create_dir_all(unfinished).map_err(Error::system("make a directory for the VM's image"))?;
        let root = unfinished.join("root");
        debian(suite, &root, &options, SETTINGS, progress)?;
        progress(&format!("{suite} VM image: packing it"));
        pack(unfinished)
    };
    once(&image, &format!("{suite} VM image"), "about a minute and a half", &mut build, progress)?;
    Ok(image)
}

/// What mmdebstrap is told to unpack QEMU and what it depends on; nothing of it is set up.
const EMULATOR: [&str; 2] = ["--variant=extract", "--include=qemu-system-x86"];

/// QEMU, from the cache or fetched now: words that a command begins with.
///
/// Not the machine's own: under trixie's 10.0 a process starts in half the time that it takes under bookworm's 7.2. It lies in
/// a directory of its own with all its libraries, and nothing of it is installed.
fn emulator(progress: &mut dyn FnMut(&str)) -> Result<Vec<String>, Error> {
    let suite = Suite::Trixie;
    let root = cache().join("vms").join(format!("qemu-{:016x}", key(&[&EMULATOR, &[suite.name()][..]].concat())));
    let mut build =
        |unfinished: &Path, progress: &mut dyn FnMut(&str)| debian(suite, unfinished, &EMULATOR, "", progress);
    once(&root, &format!("QEMU of {suite}"), "about twenty seconds", &mut build, progress)?;
    let at = |path: &str| root.join(path).display().to_string();
    let mut words = vec![at("usr/lib64/ld-linux-x86-64.so.2")];
    words.extend(["--library-path".to_owned(), at("usr/lib/x86_64-linux-gnu"), at("usr/bin/qemu-system-x86_64")]);
    words.extend(["usr/share/qemu", "usr/share/seabios"].into_iter().flat_map(|data| ["-L".to_owned(), at(data)]));
    Ok(words)
}

fn pack(directory: &Path) -> Result<(), Error> {
    let doing = "pack the VM's image";
    let output = Command::new("bash")
        .args(["-c", PACK, "pack-image.sh"])
        .arg(directory)
        .stdin(Stdio::null())
        .output()
        .map_err(Error::system(doing))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::failed(doing, format!("{}\n{}", output.status, String::from_utf8_lossy(&output.stderr))))
}
