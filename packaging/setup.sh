# Sourced by packaging/demo and packaging/test: Debian packages and a Python environment, each only if it is missing.
# shellcheck shell=bash

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache="$repository/.cache"

say() { printf '%s\n' "$*"; }

am_root() { [ "$(id -u)" = 0 ]; }

# have_package_for WHAT: whether what a Debian package is wanted for is there already, from wherever.
have_package_for() {
    case $1 in
        docker.io) command -v dockerd && command -v docker ;;
        umockdev) command -v umockdev-run ;;
        busybox-static) [ -x /bin/busybox ] && ! ldd /bin/busybox ;;
        acl) command -v setfacl ;;
        redis-server) command -v redis-server ;;
        etcd-server) command -v etcd ;;
        qemu-system-x86) command -v qemu-system-x86_64 ;;
        qemu-utils) command -v qemu-img ;;
        e2fsprogs) command -v mke2fs ;;
        debian-archive-keyring) [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] ;;
        mmdebstrap | patchelf | rpm) command -v "$1" ;;
        systemd) command -v systemd-analyze ;;
        python3-venv) find_python ;;
        *) false ;;
    esac >/dev/null 2>&1
}

# want_packages NAME...: install those that are missing; an ordinary user is told what to ask for.
want_packages() {
    local package missing=() keep_services_down=
    for package; do have_package_for "$package" || missing+=("$package"); done
    [ ${#missing[@]} -gt 0 ] || return 0
    if ! am_root; then
        say "missing, and only root can install it: ${missing[*]}"
        return 0
    fi
    say "installing Debian packages: ${missing[*]}"
    if [ ! -e /usr/sbin/policy-rc.d ]; then # what is installed for a test must not start a service
        printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
        chmod +x /usr/sbin/policy-rc.d
        keep_services_down=yes
    fi
    local failed=
    apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${missing[@]}" >"$cache/apt.log" 2>&1 ||
        failed=yes
    [ -z "$keep_services_down" ] || rm /usr/sbin/policy-rc.d
    if [ -n "$failed" ]; then
        say "apt-get could not install them; $cache/apt.log says why:"
        tail -n 5 "$cache/apt.log"
        exit 1
    fi
}

# find_python: print a Python of 3.11 or newer that can make virtual environments.
find_python() {
    local candidate
    for candidate in python3 /usr/bin/python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# want_environment LOCK: a virtual environment with exactly what the lock file says, and neurond itself from here.
# Sets `environment`. It is made anew when the lock file has changed, and kept otherwise.
want_environment() {
    local lock=$1 python version
    python=$(find_python) || {
        say "no Python of 3.11 or newer with the venv module: apt-get install python3-venv"
        exit 1
    }
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    environment="$cache/$(basename "$lock" .txt)-$version-$(sha256sum "$lock" "$repository/pyproject.toml" | sha256sum | cut -c1-12)"
    if [ ! -e "$environment/whole" ]; then
        say "making a Python $version environment in $environment with what $lock pins"
        rm -rf "$environment"
        "$python" -m venv "$environment"
        "$environment/bin/python" -m pip install -qq --disable-pip-version-check --require-hashes -r "$lock"
        "$environment/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation \
            --editable "$repository"
        touch "$environment/whole"
    fi
}

mkdir -p "$cache"
