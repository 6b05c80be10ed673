"""A host to install on: this one's files with all changes thrown away, in namespaces of its own.

The files are an overlay over /, so dpkg, its database, Python and the shells are the distribution's own. What needs a
booted system is played by small programs: `systemctl` starts and stops the daemon on a simulated host and keeps a
record of how it was called; `udevadm` does what the driver's rule does, at the trigger. A whole booted machine is the
affair of packaging/vm-test.
"""

import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

SETUP = """
set -e
mount -t tmpfs changes "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
for place in run tmp dev; do mount -t tmpfs none $place; done
chmod 1777 tmp
mkdir dev/pts run/udev run/systemd run/systemd/system
for node in null:3 zero:5 full:7 random:8 urandom:9; do mknod -m 666 "dev/${node%:*}" c 1 "${node#*:}"; done
ln -s /proc/self/fd dev/fd
rm -f usr/sbin/policy-rc.d var/lib/man-db/auto-update # which would index all pages after each installation
mkdir -p etc/udev/rules.d
echo ready
exec 3<&0
cat <&3 & # until the end is said
wait      # and buries orphans meanwhile
"""

SYSTEMCTL = """#!/bin/sh
# Plays systemd for one service. What is done without one is left to the real program.
echo "$*" >>/run/systemctl.log
verb= service=
for word; do case $word in
    start | stop | restart | try-restart | is-active) verb=$word ;;
    --now) verb=stop ;; # disable --now
    neurond.service) service=yes ;;
esac done
case "$*" in
    *preset* | *enable* | *disable*) /usr/bin/systemctl.real --root=/ $(echo "$*" | sed 's/--now//') || exit ;;
esac
[ -n "$service" ] || exit 0
running() { [ -e /run/neurond.pid ] && kill -0 "$(cat /run/neurond.pid)" 2>/dev/null; }
stop() {
    running || return 0
    kill "$(cat /run/neurond.pid)"
    while running; do sleep 0.05; done
}
start() {
    rm -f /run/neurond/neurond.sock
    setsid /usr/bin/neurond serve --simulate trn1.32xlarge >>/run/neurond.log 2>&1 </dev/null &
    echo $! >/run/neurond.pid
    for _ in $(seq 200); do [ ! -S /run/neurond/neurond.sock ] || return 0; sleep 0.05; done
    return 1
}
case $verb in
    start) running || start ;;
    stop) stop ;;
    restart) stop && start ;;
    try-restart) ! running || { stop && start; } ;;
    is-active) running ;;
esac
"""

UDEVADM = """#!/bin/sh
# Plays udevd on a host of which /run/driver-rule is what the driver's own rule sets as the mode of a chip's node.
echo "$*" >>/run/udevadm.log
[ "$1" = trigger ] && [ -e /run/driver-rule ] || exit 0
[ ! -e /etc/udev/rules.d/60-neurond-enforced.rules ] || exit 0
for node in /dev/neuron[0-9]*; do [ ! -c "$node" ] || chmod "$(cat /run/driver-rule)" "$node"; done
"""


RECORDS = ("/etc/group", "/etc/gshadow", "/etc/.pwd", "/var/lib/dpkg", "/var/lib/systemd", "/var/log", "/var/cache")


class Machine:
    """A host; it and all that runs on it end with the context."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._holder: subprocess.Popen[str] | None = None
        self._inside: list[str] = []
        self._init = ""

    def __enter__(self) -> Self:
        alone = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child"]
        self._holder = subprocess.Popen(
            [*alone, "sh", "-c", SETUP, "sh", str(self._directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"
        holder = self._holder.pid
        self._init = Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0]
        self._inside = ["nsenter", f"--target={self._init}", "--mount", "--pid", "--net", "--"]
        self._inside += ["chroot", str(self._directory / "root")]
        self.run("mv", "/usr/bin/systemctl", "/usr/bin/systemctl.real")
        self.put("/usr/bin/systemctl", SYSTEMCTL)
        self.put("/usr/bin/udevadm", UDEVADM)
        self.run("chmod", "755", "/usr/bin/systemctl", "/usr/bin/udevadm")
        self.run("python3", "-c", "import socket; socket.socket(socket.AF_UNIX).bind('/run/udev/control')")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._holder is not None
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.kill()  # takes its namespaces along
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command inside."""
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}
        return subprocess.Popen(
            [*self._inside, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def run(self, *command: str, code: int = 0) -> str:
        """Run a command inside; return what it says, and fail if it ends otherwise."""
        running = self.start(*command)
        said, _ = running.communicate()
        assert running.returncode == code, f"{' '.join(command)} ended with {running.returncode}:\n{said}"
        return said

    def shell(self, script: str, code: int = 0) -> str:
        """Run a shell script inside."""
        return self.run("sh", "-c", script, code=code)

    def put(self, place: str, text: str) -> None:
        """Write a file inside."""
        writer = subprocess.run([*self._inside, "tee", place], input=text, text=True, check=True, capture_output=True)
        assert writer.stdout == text

    def bring(self, file: Path) -> str:
        """Copy a file to /tmp inside; return its path there."""
        with file.open("rb") as data:
            place = f"/tmp/{file.name}"
            subprocess.run([*self._inside, "sh", "-c", f"cat >'{place}'"], stdin=data, check=True)
        return place

    def without_systemd(self) -> None:
        """Be a chroot as it is while an image is made: nothing of a booted system."""
        self.run("rm", "-r", "/run/systemd", "/run/udev")
        self.run("mv", "/usr/bin/systemctl.real", "/usr/bin/systemctl")

    def changes(self) -> set[str]:
        """Return what is new on the host, as +/path, and what is gone, as -/path, but for packages' own records."""
        upper = Path(f"/proc/{self._init}/root{self._directory}/upper")
        found: set[str] = set()
        for path in upper.rglob("*"):
            place = f"/{path.relative_to(upper)}"
            if place.startswith(RECORDS):
                continue
            if path.is_char_device():
                found.add(f"-{place}")
            elif not os.path.lexists(place):
                found.add(f"+{place}")
        return found
