//! The VM's disk, kernel and initrd: built once per recipe and machine, never written to afterwards.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::host::root::{cache, debian, install_missing, key, once};
use crate::host::{Error, Suite};

/// What is set up inside, beside the pristine root's settings.
const SETTINGS: &str = include_str!("settings.sh");

/// From an installed directory to a disk, a kernel and an initrd.
const PACK: &str = include_str!("pack-image.sh");

/// What mmdebstrap is told beside what it is told for a pristine root.
const OPTIONS: [&str; 3] = [
    "--include=linux-image-cloud-amd64,initramfs-tools,zstd",
    "--setup-hook=mkdir -p \"$1/etc/initramfs-tools/conf.d\" && echo MODULES=list >\"$1/etc/initramfs-tools/conf.d/vm\"",
    "--customize-hook=chroot \"$1\" /bin/bash -e -c \"$OPENCODE_PTY_MORE_SETTINGS\"",
];

/// Each program that a VM needs on the machine, and the Debian package that has it.
const TOOLS: [(&str, &str); 6] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
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

/// The directory with `disk`, `kernel` and `initrd`, from the cache or built now.
pub(super) fn image(progress: &mut dyn FnMut(&str)) -> Result<PathBuf, Error> {
    install_tools(progress)?;
    let suite = Suite::Trixie;
    let recipe: Vec<&str> = OPTIONS.iter().copied().chain([SETTINGS, PACK]).collect();
    let image = cache().join("vms").join(format!("{suite}-{:016x}", key(&recipe)));
    let mut build = |unfinished: &Path, progress: &mut dyn FnMut(&str)| {
        fs::create_dir_all(unfinished).map_err(Error::system("make a directory for the VM's image"))?;
        let root = unfinished.join("root");
        debian(suite, &root, &OPTIONS, SETTINGS, progress)?;
        progress(&format!("{suite} VM image: packing it"));
        pack(unfinished)
    };
    once(&image, &format!("{suite} VM image"), "about a minute and a half", &mut build, progress)?;
    Ok(image)
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
