#!/bin/sh
# Puts what tests/deploy wants of Debian's packages into a folder, as any user and without touching the system:
# promtool, and a Redis that speaks TLS. Called by `make test`: fetch_tools.sh FOLDER
# What is there already is not fetched again. What cannot be had here is said and left out, and its tests are skipped:
# that is no error. Ctrl-C leaves nothing behind.
set -eu

folder=$1
mkdir -p "$folder/bin"
folder=$(cd "$folder" && pwd)
work=$(mktemp -d "$folder/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# apt-get with its lists in our folder if the system's are absent or too old; the packages come from the same places.
# In the foreground: elsewhere Ctrl-C would not reach it.
apt() {
    timeout --foreground 180 apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 "$@"
}
own_lists() {
    apt -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root "$@"
}
# Makes our own lists, once; "no" if they cannot be had, and then no other package is asked for either.
lists=
update() {
    if [ -z "$lists" ]; then
        mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
        lists=no
        if own_lists -o APT::Update::Error-Mode=any update >/dev/null 2>"$work/said"; then lists=made; fi
    fi
    [ "$lists" = made ]
}
# Unpacks packages into $work/root; what went wrong is in $work/said. Called in conditions, where `set -e` is off.
fetch() {
    if [ "$lists" = no ]; then return 1; fi
    rm -rf "$work/debs" "$work/root" && mkdir "$work/debs" && cd "$work/debs" || return 1
    if [ -n "$lists" ] || ! apt -o APT::Sandbox::User=root download "$@" 2>"$work/said"; then
        update || return 1
        own_lists download "$@" 2>"$work/said" || return 1
    fi
    for each in "$work"/debs/*.deb; do
        dpkg-deb -x "$each" "$work/root" 2>"$work/said" || return 1
    done
}
# The program of this name among what was unpacked, which may be a link.
unpacked() {
    find "$work/root" -path "*/bin/$1"
}
leave_out() {
    echo "$1 is left out, and its tests are skipped: $2" >&2
}

for needed in apt-get dpkg-deb; do
    if ! command -v "$needed" >/dev/null; then
        leave_out "what comes from Debian's packages" "no $needed on this machine"
        exit 0
    fi
done

if [ ! -x "$folder/bin/promtool" ]; then
    if fetch prometheus; then
        mv "$(unpacked promtool)" "$folder/bin/promtool"
    else
        leave_out promtool "$(tail -n 1 "$work/said")"
    fi
fi

# redis-tools has the server's binary; the libraries are those that a small system may lack.
if [ ! -x "$folder/bin/redis-server" ]; then
    if fetch redis-server redis-tools libatomic1 libjemalloc2 liblzf1; then
        rm -rf "$folder/redis"
        mkdir "$folder/redis"
        cp -L "$(unpacked redis-server)" "$folder/redis/redis-server"
        find "$work/root" -name 'lib*.so.*' -exec cp -P {} "$folder/redis/" \;
        # shellcheck disable=SC2016  # expanded when it is called
        printf '#!/bin/sh\nhere=$(dirname "$0")/../redis\nLD_LIBRARY_PATH=$here exec "$here/redis-server" "$@"\n' \
            >"$folder/bin/redis-server"
        chmod 755 "$folder/bin/redis-server"
        if ! said=$("$folder/bin/redis-server" --version 2>&1); then
            rm "$folder/bin/redis-server"
            leave_out "a Redis with TLS" "$said"
        fi
    else
        leave_out "a Redis with TLS" "$(tail -n 1 "$work/said")"
    fi
fi
