# What a pristine root is given beside its packages. Runs inside it, once, as root.

# The accounts: the server's, in every group that its real counterpart has, and somebody else.
for group in adm cdrom sudo dip plugdev lxd docker; do
    getent group "$group" >/dev/null || groupadd --system "$group"
done
useradd --create-home --uid 1000 --user-group --shell /bin/bash --groups adm,cdrom,sudo,dip,plugdev,lxd,docker byk
useradd --create-home --uid 1001 --user-group --shell /bin/bash eve
chmod 0755 /home/byk /home/eve

# A host is named when it boots, and is a new machine every time.
rm -f /etc/hostname
: >/etc/machine-id
rm -f /var/lib/dbus/machine-id

# What a boot would do again and again for nothing.
mask() { for unit; do ln -sf /dev/null "/etc/systemd/system/$unit"; done; }
mask getty.target console-getty.service systemd-networkd-wait-online.service \
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer \
    systemd-tmpfiles-clean.timer motd-news.timer \
    systemd-networkd.service systemd-networkd.socket systemd-resolved.service systemd-timesyncd.service \
    dev-hugepages.mount ldconfig.service systemd-journal-catalog-update.service systemd-update-done.service
journalctl --update-catalog
touch /etc/.updated /var/.updated
systemctl set-default multi-user.target
# Work for later: there for tests that start them.
systemctl disable --quiet atd.service cron.service

# The journal: all of it, in memory.
mkdir -p /etc/systemd/journald.conf.d
cat >/etc/systemd/journald.conf.d/test-host.conf <<'EOF'
[Journal]
Storage=volatile
RateLimitIntervalSec=0
ForwardToConsole=no
EOF

rm -f /tmp/settings
