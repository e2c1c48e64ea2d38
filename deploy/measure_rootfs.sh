#!/usr/bin/env bash
# The root file system of an image, made without Docker from the lines of its Dockerfile: its size by package, and
# the seconds that it takes to the first token of a stream, as the image's user and written to nowhere but /cache.
#
#     deploy/measure_rootfs.sh cpu
#     deploy/measure_rootfs.sh cuda --build-arg COMPILE='--arch sm_90 --dtype bfloat16' --limit 1400
#
# Needs Linux, root, debootstrap and Python 3.11. All is mounted in a namespace that ends with it; what it makes lies
# in one folder (under $TMPDIR), which it deletes, however it ends.
set -euo pipefail

here=$(dirname "$(readlink -f "$0")")
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "measure_rootfs.sh: needs Python 3.11 or newer, as python3" >&2
    exit 77
fi
case " $* " in *" -h "* | *" --help "*) exec python3 -B "$here/rootfs/arguments.py" --help ;; esac
python3 -B "$here/rootfs/arguments.py" "$@"
if [ "$(id -u)" != 0 ]; then
    echo "measure_rootfs.sh: needs root, for chroot and mounts" >&2
    exit 77
fi
for tool in debootstrap unshare ip; do
    if ! command -v "$tool" >/dev/null; then
        echo "measure_rootfs.sh: needs $tool (Debian: apt-get install debootstrap util-linux iproute2)" >&2
        exit 77
    fi
done

if ! scratch=$(mktemp -d "${TMPDIR:-/tmp}/rootfs.XXXXXXXX" 2>/dev/null); then
    echo "measure_rootfs.sh: no folder can be made in ${TMPDIR:-/tmp}; TMPDIR names another place" >&2
    exit 1
fi
child=
clean_up() {
    trap '' INT TERM HUP
    # The first process of a namespace takes all others with it, and these the mounts. (unshare blocks SIGTERM.)
    [ -z "$child" ] || { kill -KILL "$child" && wait "$child"; } 2>/dev/null || true
    rm -rf --one-file-system "$scratch"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
umask 022
ROOTFS_SCRATCH=$scratch unshare --mount --pid --fork --kill-child --mount-proc --propagation private \
    python3 -B "$here/rootfs/measure.py" "$@" &
child=$!
wait "$child" || { code=$?; child=; exit "$code"; }
child=
