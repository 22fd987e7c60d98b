# Packs an installed Debian into a disk image, beside its kernel and its initrd.
#
# Usage: pack-image.sh DIRECTORY, which has it in `root` and gets `disk`, `kernel` and `initrd` instead.
set -eu
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd "$1"
cp root/boot/vmlinuz-* kernel
cp root/boot/initrd.img-* initrd
truncate --size=8G disk
# Nobody repairs it: it is never written to, and what is written over it is thrown away.
mkfs.ext4 -q -F -O ^has_journal -m 0 -d root disk
rm -rf --one-file-system root
