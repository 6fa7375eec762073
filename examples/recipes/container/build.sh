#!/bin/sh
# Builds the image of a service out of Debian's packages and a wheel, and prints its name:
#
#   examples/recipes/container/build.sh dist/aqueduct_arrow-*.whl
#
# The wheel has to be for the Python of this Debian: `make wheel` on it. With a registry of images
# at hand, `podman build --build-arg BASE=docker.io/library/python:3.13-slim` is enough. It needs
# root, podman, runc and mmdebstrap.
set -eu
wheel=$(readlink -f "$1")
here=$(readlink -f "$(dirname -- "$0")")
image=localhost/aqueduct-words
for program in podman runc mmdebstrap; do
    command -v "$program" >/dev/null || {
        echo "build.sh: no $program. Type: apt-get install podman runc mmdebstrap" >&2
        exit 1
    }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck disable=SC1091
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
base=localhost/aqueduct-python-$suite
if ! podman image exists "$base"; then
    sources=/etc/apt/sources.list.d/debian.sources
    [ -e "$sources" ] || sources=/etc/apt/sources.list
    mmdebstrap -q --mode=root --variant=minbase --include=ca-certificates,python3,python3-venv \
        "$suite" "$work/rootfs.tar" "$sources" >&2
    podman import -q "$work/rootfs.tar" "$base" >&2
fi
mkdir -p "$work/context/wheels"
cp "$here/Containerfile" "$here/service.py" /etc/ssl/certs/ca-certificates.crt "$work/context"
cp "$wheel" "$work/context/wheels"
# Podman's own limits need CAP_SYS_RESOURCE, and crun refuses hybrid cgroups. An image of the format
# "docker" keeps the health check.
open=$(ulimit -Hn)
podman --runtime runc build -q --format docker --network host --build-arg "BASE=$base" \
    "--ulimit=nofile=$open:$open" --ulimit=nproc=32768:32768 -t "$image" "$work/context" >&2
echo "$image"
