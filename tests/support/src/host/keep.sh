# Keeps one host: boots it, waits, and takes everything away again.
#
# Usage: keep.sh NAME ROOT STATE_DIR ephemeral|persistent
#
# Standard input is a pipe whose other end the owner of an ephemeral host holds: end of file means that the owner is gone,
# however it went. Standard output carries one line, `booting PID`, or `failed: REASON`; nothing is written there afterwards.
#
# Runs in a mount namespace of its own, as a session leader (a terminal's Ctrl-C is for the owner). Everything of the host is
# below one process, `unshare`, in a PID namespace of its own: the death of any link, by SIGKILL too, takes the rest with it.
# What a killed keeper can leave is an empty cgroup and a state directory, and the next one sweeps those up.
set -u
name=$1 root=$2 states=$3 life=$4
cgroups=/sys/fs/cgroup
prefix=opencode-pty-host-
state=$states/$name
exec 3<&0 </dev/null 2>&1

fail() { echo "failed: $*"; exit 1; }

# Removes a cgroup with all below it. A cgroup is busy until the last of its processes has been reaped.
remove_cgroup() {
    [ -d "$1" ] || return 0
    [ ! -e "$1/cgroup.kill" ] || echo 1 >"$1/cgroup.kill"
    for _ in $(seq 200); do
        find "$1" -depth -type d -exec rmdir {} + 2>/dev/null
        [ -d "$1" ] || return 0
        sleep 0.02
    done
    return 1
}

forget() { # NAME
    remove_cgroup "$cgroups/$prefix$1"
    rm -rf --one-file-system "${states:?}/$1"
}

mkdir -p "$states" || fail "cannot make $states"
# The machine's own hierarchy, whatever its version, stays as it is: this mount is seen from here on only.
mount -t cgroup2 none "$cgroups" || fail "cannot mount cgroup2"

# One at a time from here to the lock that says that this host is alive.
exec 8>"$states/.lock" || fail "cannot open the lock"
flock 8
for old in "$states"/*/; do
    old=$(basename "$old")
    [ -e "$states/$old/alive" ] || continue
    if flock --nonblock "$states/$old/alive" true; then forget "$old"; fi
done
[ ! -e "$state" ] || fail "host $name is already up"
mkdir -p "$state/mnt" || fail "cannot make $state"
exec 9>"$state/alive"
flock 9
remove_cgroup "$cgroups/$prefix$name" && mkdir "$cgroups/$prefix$name" || fail "cannot make the cgroup"
exec 8>&-

# shellcheck disable=SC2016 # expanded by the inner shell
inner='
    name=$1 root=$2 mnt=$3 cgroup=$4
    mount -t tmpfs -o mode=0755 opencode-pty-host "$mnt" || exit
    mkdir "$mnt/upper" "$mnt/work" "$mnt/root"
    mount -t overlay -o "lowerdir=$root,upperdir=$mnt/upper,workdir=$mnt/work" opencode-pty-host "$mnt/root" || exit
    echo 0 >"$cgroup/cgroup.procs" || exit
    SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 systemd-nspawn -q -D "$mnt/root" -M "$name" --register=no --keep-unit \
        --private-network --system-call-filter="landlock_create_ruleset landlock_add_rule landlock_restrict_self pidfd_getfd add_key keyctl request_key" -b
    # Not the last command: this shell stays and is PID 1 of the namespace, so that its end is the end of all.
    exit $?
'
setpriv --pdeathsig KILL \
    unshare --mount --propagation private --pid --fork --kill-child --mount-proc \
    bash -c "$inner" keep "$name" "$root" "$state/mnt" "$cgroups/$prefix$name" \
    >"$state/console" 2>&1 3<&- 9<&- &
host=$!

clean_up() {
    kill -KILL "$host" 2>/dev/null
    wait "$host"
    forget "$name"
}
trap clean_up EXIT
trap exit TERM

echo "booting $host"
exec >/dev/null 2>&1 # the reader may be gone from here on

if [ "$life" = ephemeral ]; then
    cat <&3 9<&- &
    owner=$!
    wait -n "$host" "$owner"
    kill "$owner" 2>/dev/null
else
    wait "$host"
fi
