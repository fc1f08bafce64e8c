#!/usr/bin/env bash
# Run patchline from a copy of its environment on this node's own disk, which imports without the file server:
#
#   tar --create --file /shared/patchline.tar --directory /shared/venvs/patchline .
#   command: [/shared/node_local.sh, /shared/patchline.tar]          in your cluster's settings
#
# The first process on a node unpacks the archive, and the others wait for it. A newer archive gets a copy of its own.
# The environment must have patchline installed in it (pip install ., not --editable), and the Python that it was made
# with must be on all nodes. PATCHLINE_LOCAL is the folder for copies: by default /tmp, which must have room for it.

set -euo pipefail

archive=$(realpath --canonicalize-existing -- "${1:-}") || {
    echo "node_local.sh: give the archive of an environment first, as in: node_local.sh /shared/patchline.tar" >&2
    exit 2
}
shift
name=patchline-$(id --user)-$(stat --format=%i-%Y-%s "$archive")
copy=${PATCHLINE_LOCAL:-/tmp}/$name

mkdir --mode=700 "$copy" 2>/dev/null || [[ -d $copy && ! -L $copy && -O $copy ]] || {
    echo "node_local.sh: $copy is not a folder of yours; set PATCHLINE_LOCAL to another folder on this node" >&2
    exit 2
}
if [[ ! -e $copy/ready ]]; then
    exec {lock}>"$copy/lock"
    flock "$lock"
    if [[ ! -e $copy/ready ]]; then
        mkdir --parents "$copy/environment"
        if ! tar --extract --file "$archive" --directory "$copy/environment"; then
            rm --recursive --force "$copy/environment"
            echo "node_local.sh: $archive cannot be unpacked to $copy; make room, or set PATCHLINE_LOCAL" >&2
            exit 74
        fi
        touch "$copy/ready"
    fi
    exec {lock}>&-
fi
exec "$copy/environment/bin/python" -m patchline "$@"
