#!/bin/sh
# Start Redis with the fleet's users. The container images of Redis and Valkey have all that it needs.
#
#   REDIS_FLEET_PASSWORD, REDIS_EXPORTER_PASSWORD, REDIS_FLOWER_PASSWORD   required
#   REDIS_SCALER_PASSWORD   without it there is no user for an autoscaler
#   REDIS_MAXMEMORY         default 2gb
#   REDIS_FILES             where redis.conf and users.acl lie; default: beside this script
#   REDIS_RUN               a private folder for the finished list of users; default /run/fleet
#   REDIS_SERVER            default redis-server
#
# Further arguments are Redis' own. Passwords are hashed here: they stand neither in a file nor in arguments.
set -eu

files="${REDIS_FILES:-$(dirname "$0")}"
run="${REDIS_RUN:-/run/fleet}"

digest() { printf %s "$1" | sha256sum | cut -d' ' -f1; }

fleet="$(digest "${REDIS_FLEET_PASSWORD:?set it}")"
exporter="$(digest "${REDIS_EXPORTER_PASSWORD:?set it}")"
flower="$(digest "${REDIS_FLOWER_PASSWORD:?set it}")"
scaler="s/#SCALER_PASSWORD/#$(digest "${REDIS_SCALER_PASSWORD:-}")/"
[ -n "${REDIS_SCALER_PASSWORD:-}" ] || scaler="/^user scaler /d"

umask 077
mkdir -p "$run"
sed -e "s/#FLEET_PASSWORD/#$fleet/" -e "s/#EXPORTER_PASSWORD/#$exporter/" -e "s/#FLOWER_PASSWORD/#$flower/" \
    -e "$scaler" "$files/users.acl" >"$run/users.acl"

# The server has no use for them.
unset REDIS_FLEET_PASSWORD REDIS_SCALER_PASSWORD REDIS_EXPORTER_PASSWORD REDIS_FLOWER_PASSWORD
exec "${REDIS_SERVER:-redis-server}" "$files/redis.conf" --aclfile "$run/users.acl" --maxmemory "${REDIS_MAXMEMORY:-2gb}" "$@"
