#!/usr/bin/env bash
# Build the CPU image without a container engine and without an image registry, and run a batch in it.
#
#   deploy/build_check.sh FOLDER
#
# Needs root, Debian's packages buildah, debootstrap and podman, and pip. FOLDER keeps the base, the wheels and the
# image; what is there already is used again. DEBIAN_MIRROR names another mirror.
set -euo pipefail

source="$(cd "$(dirname "$0")/.." && pwd)"
mkdir -p "$1"
cd "$1"
export STORAGE_DRIVER=vfs
where=(--storage-driver vfs --root "$PWD/containers" --runroot "$PWD/run")
say() { printf '%s s: %s\n' "$SECONDS" "$*"; }

# A base like python:3.13-slim-trixie, of Debian's own packages.
if [ ! -d root/usr ]; then
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates trixie root "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >debootstrap.log
fi
say "the base is there"

# For the base's Python, on a machine that may have another one.
if [ ! -d wheels ]; then
    python3 - "$source/pyproject.toml" >requirements.txt <<'PYTHON'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))
extra = project["project"]["optional-dependencies"]["otel"]
print("\n".join(project["project"]["dependencies"] + extra + project["build-system"]["requires"]))
PYTHON
    python3 -m pip download --quiet --dest wheels --only-binary=:all: --python-version 3.13 --implementation cp \
        --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_34_x86_64 \
        --requirement requirements.txt
fi
say "the wheels are there"

podman "${where[@]}" image exists localhost/fleet-base || tar -C root -c . | podman "${where[@]}" import -q - localhost/fleet-base
say "the base is imported"

buildah "${where[@]}" bud --isolation chroot --network host --quiet \
    --volume "$PWD/wheels:/offline:ro" --build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/offline \
    --build-arg CPU_BASE=localhost/fleet-base --target cpu --file "$source/deploy/Dockerfile" --tag localhost/batch-fleet:cpu "$source"
say "the image is built"
buildah "${where[@]}" images

# As the image's user: the command line of docker run, without an engine.
container="$(buildah "${where[@]}" from localhost/batch-fleet:cpu)"
trap 'buildah "${where[@]}" rm "$container" >/dev/null' EXIT
inside() { buildah "${where[@]}" run --isolation chroot --network host "$container" -- "$@"; }
inside id
# shellcheck disable=SC2016  # expanded in there
inside sh -c 'for each in /opt/fleet/bin /usr /etc; do ! touch "$each/x" 2>/dev/null || exit 1; done; touch /store/x /files/x'
buildah "${where[@]}" copy -q "$container" "$source/tests/cases/base40.jsonl" /files/in.jsonl
inside producer submit /files/in.jsonl --local --engine echo --model test-model -o /files/out.jsonl
test "$(inside wc -l /files/out.jsonl | cut -d' ' -f1)" = 40
say "a batch of 40 requests ran in it"
