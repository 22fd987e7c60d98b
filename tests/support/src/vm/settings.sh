# What the VM's root has beside the pristine root of the container hosts. Runs inside it, once, as root.

# All that the kernel does not have built in: the disk's driver. udev would load what nobody uses here, and that takes half of
# a boot.
echo virtio_blk >>/etc/initramfs-tools/modules
rm /usr/share/initramfs-tools/hooks/udev /usr/share/initramfs-tools/scripts/init-*/udev
update-initramfs -u -k all

# Weights between control groups need a scheduler that knows them.
echo 'w /sys/block/vda/queue/scheduler - - - - bfq' >/etc/tmpfiles.d/weights.conf

# A reboot is looked at afterwards.
cat >/etc/systemd/journald.conf.d/test-vm.conf <<'CONF'
[Journal]
Storage=persistent
SyncIntervalSec=1s
CONF

# No hardware, and every process costs seconds here.
mask() { for unit; do ln -sf /dev/null "/etc/systemd/system/$unit"; done; }
mask modprobe@.service systemd-pstore.service systemd-hwdb-update.service systemd-udev-settle.service \
    systemd-binfmt.service systemd-random-seed.service systemd-boot-random-seed.service \
    systemd-sysctl.service systemd-modules-load.service dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount \
    systemd-udevd.service systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-udev-trigger.service \
    systemd-udev-load-credentials.service
# Nothing here is generated, and each daemon-reload would ask them all.
mkdir -p /etc/systemd/system-generators
for generator in /usr/lib/systemd/system-generators/*; do
    ln -s /dev/null "/etc/systemd/system-generators/${generator##*/}"
done

# The agents come with every boot on a disk of their own: a tar archive.
mkdir -p /opt/opencode-pty-tests
cat >/etc/systemd/system/opencode-vm-files.service <<'UNIT'
[Unit]
Description=What the machine outside gave this one
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/tar -xf /dev/vdb -C /opt/opencode-pty-tests
UNIT
cat >/etc/systemd/system/opencode-vm-agent@.service <<'UNIT'
[Unit]
Description=Runs commands for the machine outside (port %i)
Requires=opencode-vm-files.service
After=opencode-vm-files.service
[Service]
ExecStart=/opt/opencode-pty-tests/opencode-vm-agent serve opencode-pty.agent.%i
Restart=on-failure
OOMScoreAdjust=-900
CPUWeight=1000
TimeoutStopSec=5s
[Install]
WantedBy=multi-user.target
UNIT
systemctl enable opencode-vm-agent@0.service opencode-vm-agent@1.service
