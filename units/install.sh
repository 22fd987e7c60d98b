#!/bin/sh
# Installs what lies beside it, by the commands that docs/install.md lists, or takes it away again.
#
# It starts, stops, enables and accepts nothing: no unit is started, and no readiness marker is written or removed.
set -eu
umask 022
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C

usage='Usage: install.sh [--upgrade | --uninstall]

  (nothing)    install; refused while an installed version runs
  --upgrade    install although one runs; it goes on running until it is restarted
  --uninstall  remove what was installed; refused while it runs or is enabled

Exit codes: 0 done, 1 refused or failed, 64 wrong usage.'

units=/etc/systemd/system
services='opencode-pty-supervisor.service opencode-v2.service'

fail() {
    printf 'install.sh: %s\n' "$1" >&2
    exit 1
}

# Whether a process runs the installed binary, or systemd is about to start one.
runs() {
    for exe in /proc/[0-9]*/exe; do
        if [ "$exe" -ef /usr/local/libexec/opencode-pty-supervisor ]; then return 0; fi
    done
    for service in $services; do
        case $(systemctl show --property=ActiveState --value "$service") in
        active | activating | reloading | deactivating) return 0 ;;
        esac
    done
    return 1
}

check_directories() {
    for directory in / /usr /usr/local /usr/local/libexec /usr/local/sbin /usr/local/share /etc /etc/systemd $units; do
        [ -e $directory ] || continue
        case $(stat -c '%f %u' $directory) in
        4?[02468ace][014589cd]' 0') ;;
        *) fail "$directory must be a directory of root's that only root can write to" ;;
        esac
    done
}

# The commands between the lines are those of docs/install.md, word for word: a test compares.
install_all() {
    # -- install --
    sha256sum --check --strict --quiet SHA256SUMS
    install -d -o root -g root -m 0755 /usr/local/libexec /usr/local/sbin /etc/systemd/system
    install -o root -g root -m 0755 opencode-pty /usr/local/libexec/opencode-pty-supervisor
    ln -f /usr/local/libexec/opencode-pty-supervisor /usr/local/libexec/opencode-pty-launcher
    ln -f /usr/local/libexec/opencode-pty-supervisor /usr/local/libexec/opencode-pty-client
    ln -sfn /usr/local/libexec/opencode-pty-supervisor /usr/local/sbin/opencode-pty
    install -o root -g root -m 0755 opencode-pty-verify-readiness /usr/local/libexec/
    install -o root -g root -m 0644 units/opencode-pty-supervisor.service units/opencode-pty.slice /etc/systemd/system/
    find share -type f | while read -r file; do install -D -o root -g root -m 0644 "$file" "/usr/local/$file"; done
    systemctl daemon-reload
    # -- end --
}

uninstall_all() {
    # -- uninstall --
    rm -f /usr/local/libexec/opencode-pty-supervisor /usr/local/libexec/opencode-pty-launcher
    rm -f /usr/local/libexec/opencode-pty-client /usr/local/libexec/opencode-pty-verify-readiness
    rm -f /usr/local/sbin/opencode-pty
    rm -f /etc/systemd/system/opencode-pty-supervisor.service /etc/systemd/system/opencode-pty.slice
    find share -type f | while read -r file; do rm -f "/usr/local/$file"; done
    rm -rf /usr/local/share/doc/opencode-pty
    systemctl daemon-reload
    # -- end --
}

[ $# -le 1 ] || { printf '%s\n' "$usage" >&2; exit 64; }
case ${1-} in
'' | --upgrade | --uninstall) ;;
--help) printf '%s\n' "$usage"; exit 0 ;;
*) printf '%s\n' "$usage" >&2; exit 64 ;;
esac
cd "$(dirname "$0")"
[ "$(id -u)" -eq 0 ] || fail 'only root can do this'

case ${1-} in
--uninstall)
    ! runs || fail "it runs; first: systemctl stop $services"
    [ ! -e $units/multi-user.target.wants/opencode-pty-supervisor.service ] ||
        fail 'it is enabled; first: systemctl disable opencode-pty-supervisor.service'
    uninstall_all
    echo 'Removed. Left, since they were not installed by this: /etc/opencode, opencode-v2.service.'
    ;;
*)
    if runs; then
        [ "${1-}" = --upgrade ] || fail 'an installed version runs; stop it, or say --upgrade (docs/install.md says what that means)'
    fi
    check_directories
    install_all
    echo 'Installed; nothing was started or enabled. docs/root-acceptance.md has what comes next.'
    ! runs || echo 'The earlier version runs until it is restarted.'
    ;;
esac
