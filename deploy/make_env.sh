#!/bin/sh
# Make .env for docker-compose.yml: .env.example with random passwords and this user's id.
#
#   sh deploy/make_env.sh [FILE]      default: .env in the checkout; an existing file is left as it is
set -eu

top="$(dirname "$0")/.."
env="${1:-$top/.env}"
if [ -e "$env" ]; then
    echo "$env is there already, and stays as it is" >&2
    exit 0
fi

secret() { head -c 24 /dev/urandom | sha256sum | cut -c 1-32; }

umask 077
while IFS= read -r line; do
    case "$line" in
        *=SECRET) printf '%s%s\n' "${line%SECRET}" "$(secret)" ;;
        # Root's own id cannot be the containers' user.
        FLEET_UID=*) if [ "$(id -u)" = 0 ]; then printf '%s\n' "$line"; else printf 'FLEET_UID=%s\n' "$(id -u)"; fi ;;
        *) printf '%s\n' "$line" ;;
    esac
done <"$top/.env.example" >"$env.part"
mv "$env.part" "$env"
echo "$env is made; the passwords are in it" >&2
