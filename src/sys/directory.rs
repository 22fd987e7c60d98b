//! The approved directory: which one a descriptor holds, where it is now, and going there.
//!
//! A descriptor carries its *mount* with it, not only its inode: `..` through one that came from another mount
//! namespace climbs out into that namespace. [`open_in_own_mounts`] is what a session's directory has to come from.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, fcntl_getfl, fstat, open, openat};
use rustix::process::fchdir;

/// Which file a descriptor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// `st_dev`.
    pub dev: u64,
    /// `st_ino`.
    pub ino: u64,
    /// Whether it is a directory.
    pub is_directory: bool,
}

/// Which file `fd` holds. On a mount whose server is gone this can hang for good.
pub fn identify(fd: impl AsFd) -> io::Result<Identity> {
    let stat = fstat(fd)?;
    let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    Ok(Identity { dev: stat.st_dev, ino: stat.st_ino, is_directory })
}

/// The mount that `fd` is on, as the kernel numbers it. Asks the kernel alone, so this does not hang.
pub fn mount_of(fd: impl AsFd) -> io::Result<u64> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd()))?;
    let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    mount.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Whether closing `fd` does not wait for its file system: of a directory, or of what was opened with `O_PATH`, there is
/// nothing to write back.
pub fn closes_at_once(fd: impl AsFd) -> bool {
    fcntl_getfl(fd).is_ok_and(|flags| flags.intersects(OFlags::PATH | OFlags::DIRECTORY))
}

/// The present path of what `fd` holds, also after a rename. It may lead elsewhere, or nowhere, in this namespace.
pub fn present_path(fd: impl AsFd) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

/// Opens the directory at the absolute `path` through this process's own mounts, only to go there or to identify it.
///
/// No symbolic link is followed. A path the kernel gave has none, so one that is met was put there since; and
/// `/proc/PID/root` is one, through which the same inode can be reached by another namespace's mounts. The walk is one
/// component at a time because `openat2`, which could do it in one call, is `ENOSYS` under `RestrictSUIDSGID=`.
pub fn open_in_own_mounts(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut components = path.components();
    if components.next() != Some(Component::RootDir) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut directory = open("/", flags, Mode::empty())?;
    for component in components {
        let Component::Normal(name) = component else { return Err(io::ErrorKind::InvalidInput.into()) };
        directory = openat(&directory, name, flags, Mode::empty())?;
    }
    Ok(directory)
}

/// Makes `fd` the working directory. It must be a directory that may be searched.
pub fn enter(fd: impl AsFd) -> io::Result<()> {
    Ok(fchdir(fd)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};

    /// A directory of this test's own, removed when dropped.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("opencode-pty-{name}-{}", std::process::id()));
            fs::create_dir(&path).unwrap();
            Self(path.canonicalize().unwrap())
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_moved_directory_is_found_at_its_present_path() {
        let scratch = Scratch::new("moved");
        let (before, after) = (scratch.0.join("before"), scratch.0.join("after"));
        fs::create_dir(&before).unwrap();
        let held = File::open(&before).unwrap();
        fs::rename(&before, &after).unwrap();

        let path = present_path(&held).unwrap();

        assert_eq!(path, after);
        let opened = open_in_own_mounts(&path).unwrap();
        assert_eq!(identify(&opened).unwrap(), identify(&held).unwrap());
        assert!(identify(&opened).unwrap().is_directory);
    }

    #[test]
    fn no_symbolic_link_is_followed_not_even_into_the_same_directory() {
        let scratch = Scratch::new("link");
        fs::create_dir(scratch.0.join("real")).unwrap();
        std::os::unix::fs::symlink("real", scratch.0.join("link")).unwrap();
        fs::create_dir(scratch.0.join("real/inner")).unwrap();
        assert!(open_in_own_mounts(&scratch.0.join("real/inner")).is_ok());
        for path in ["link", "link/inner"] {
            let refused = open_in_own_mounts(&scratch.0.join(path)).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::NotADirectory, "{path}");
        }
    }

    #[test]
    fn another_processs_root_is_no_way_to_a_directory() {
        let way = format!("/proc/{}/root/", std::process::id());
        assert_eq!(open_in_own_mounts(way.as_ref()).unwrap_err().kind(), io::ErrorKind::NotADirectory);
    }

    #[test]
    fn a_deleted_directory_leads_nowhere_and_a_file_is_no_directory() {
        let scratch = Scratch::new("deleted");
        let inner = scratch.0.join("inner");
        fs::create_dir(&inner).unwrap();
        let held = File::open(&inner).unwrap();
        fs::remove_dir(&inner).unwrap();
        let path = present_path(&held).unwrap();
        assert_eq!(open_in_own_mounts(&path).unwrap_err().kind(), io::ErrorKind::NotFound);

        fs::write(&inner, "").unwrap();
        assert_eq!(open_in_own_mounts(&inner).unwrap_err().kind(), io::ErrorKind::NotADirectory);
        assert!(!identify(File::open(&inner).unwrap()).unwrap().is_directory);
    }
}
