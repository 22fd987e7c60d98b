# Installs or unpacks packages of a Debian release into a directory.
#
# Usage: build-root.sh SUITE DIRECTORY MIRROR [mmdebstrap's further options]
#
# Standard input is a pipe that the caller holds: when the caller is gone, however it went, the build ends and the unfinished
# directory with it. Progress goes to standard output. The text of this file is part of the key under which a root is cached.
set -u
suite=$1 root=$2 mirror=$3
shift 3
exec 3<&0 </dev/null 2>&1

# Everything that is mounted or started while the root is built lives in these namespaces and ends with them.
setpriv --pdeathsig KILL \
    unshare --mount --propagation private --pid --fork --kill-child --mount-proc \
    mmdebstrap --mode=root --format=directory \
    --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt=force-unsafe-io \
    "$@" "$suite" "$root" "$mirror" 3<&- &
build=$!

cat <&3 &
caller=$!
wait -n -p ended "$build" "$caller"
status=$?
if [ "$ended" = "$caller" ]; then
    exec >/dev/null 2>&1 # nobody reads any more, and a message about the killed job would kill this shell, too
    kill -KILL "$build"
    wait "$build"
    status=1
else
    kill "$caller"
fi
if [ "$status" != 0 ]; then
    # What was killed may still be writing for a moment.
    for _ in $(seq 100); do
        rm -rf --one-file-system "$root" >/dev/null 2>&1 && break
        sleep 0.05
    done
fi
exit "$status"
