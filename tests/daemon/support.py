"""What tests of daemon and command line share: a raw connection, other users, processes that hold chips."""

import json
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

from tests.harness import PATIENCE, Daemon

Reply = dict[str, Any]

ME = pwd.getpwuid(os.geteuid()).pw_name
"""Who runs the tests, which is mostly root."""
NOBODY, NOGROUP = 65534, 65534
NEURON = 64999
"""The id of the group neuron in the /etc/group that `with_group_neuron` shows to a daemon."""

BECOME = """
import grp, locale, os, shutil, sys
from neurond.cli import containers, leases, main, show, simulate
uid, gid, *groups = map(int, sys.argv[1].split(","))
os.setgroups(groups), os.setgid(gid), os.setuid(uid)
sys.exit(main(sys.argv[2:]))
"""
"""Becomes another user only once all is imported: that user may not be able to read our interpreter's files."""

HOLD = """
import os, sys
held = [os.open(node, os.O_RDWR | os.O_NOCTTY) for node in sys.argv[1:]]
print("open", flush=True)
sys.stdin.read()
"""


class Raw:
    """A connection that shows every byte; a context manager."""

    def __init__(self, daemon: Daemon) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(daemon.socket))
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def send(self, method: str, *, more: bool = False, oneway: bool = False, **parameters: Any) -> None:
        """Send a call of io.neurond and do not wait for the reply."""
        self.socket.sendall(frame(f"io.neurond.{method}", parameters, more=more, oneway=oneway))

    def reply(self) -> Reply | None:
        """Return the next reply, or None if the daemon has closed the connection."""
        while b"\0" not in self._unread:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                assert not self._unread, f"half a reply: {self._unread[:200]!r}"
                return None
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        parsed: Reply = json.loads(message)
        return parsed

    def expect(self) -> Reply:
        """Return the parameters of the next reply, which has to be a success."""
        reply = self.reply()
        assert reply is not None
        assert "error" not in reply, reply
        parameters: Reply = reply["parameters"]
        return parameters

    def error(self) -> tuple[str, str]:
        """Return the name of the error that comes next, and its sentence (or the one parameter that it has)."""
        reply = self.reply()
        assert reply is not None
        assert "error" in reply, reply
        parameters = reply["parameters"]
        return reply["error"], str(parameters.get("message") or next(iter(parameters.values())))

    def ask(self, method: str, **parameters: Any) -> Reply:
        """Call a method of io.neurond that has one reply, and return that."""
        self.send(method, **parameters)
        return self.expect()


def frame(method: str, parameters: Any = None, **flags: bool) -> bytes:
    """Return the bytes of a call."""
    return json.dumps({"method": method, "parameters": parameters or {}, **flags}).encode() + b"\0"


def wait_in_line(connection: Raw, **parameters: Any) -> tuple[str, str]:
    """Ask for chips that are not free, wait until the request is queued, and return its id and why it waits."""
    connection.send("Acquire", more=True, **{"wait": PATIENCE} | parameters)
    reply = connection.expect()
    assert reply["chips"] == []
    return reply["lease"], reply["waiting"]


@contextmanager
def with_group_neuron(directory: Path, *, exists: bool = True) -> Iterator[Daemon]:
    """Give a daemon that finds a group neuron in its /etc/group, or none, whatever this host has."""
    group = directory / "group"
    others = [line for line in Path("/etc/group").read_text().splitlines() if not line.startswith("neuron:")]
    group.write_text("\n".join([*others, *([f"neuron:x:{NEURON}:"] if exists else [])]) + "\n")
    daemon = Daemon(directory / "grouped")
    daemon.prefix = ["unshare", "--mount", "sh", "-c", f'mount --bind {group} /etc/group && exec "$@"', "sh"]
    try:
        yield daemon.start()
    finally:
        daemon.close()


def as_nobody(
    daemon: Daemon, *arguments: str, groups: Sequence[int] = (), stdin: int | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the command line as the user nobody, who is in these further groups."""
    who = ",".join(map(str, [NOBODY, NOGROUP, *groups]))
    return subprocess.run(
        [sys.executable, "-c", BECOME, who, *arguments],
        env=os.environ | {"NEUROND_HOST": daemon.address},
        stdin=stdin if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@contextmanager
def ending(started: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """End this process after the block, if it has not ended by then."""
    with started:
        try:
            yield started
        finally:
            started.kill()


def process(*command: str, **kwargs: Any) -> AbstractContextManager["subprocess.Popen[str]"]:
    """Run a command (`sleep` if none is given) in the background, until the end of the block."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | kwargs
    return ending(subprocess.Popen(command or ("sleep", "600"), text=True, **streams))


@contextmanager
def holding(*nodes: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a process that has these nodes open; they are open when this returns. It ends when its stdin does."""
    with process(sys.executable, "-c", HOLD, *nodes, stderr=None) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n", "a fourth simulated host on one machine has no nodes to open"
        yield holder


@contextmanager
def leases_nothing(daemon: Daemon) -> Iterator[None]:
    """Check that no lease begins or ends in this block, not even for a moment."""
    before = [(row["lease"], row["state"]) for row in daemon.leases(ended=True)]
    yield
    assert [(row["lease"], row["state"]) for row in daemon.leases(ended=True)] == before


def node_of(daemon: Daemon, chip: int) -> str:
    """Return the path of a chip's device node."""
    node: str = daemon.call("ListChips")["chips"][chip]["node"]
    return node
