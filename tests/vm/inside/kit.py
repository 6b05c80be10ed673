"""What checks are written with. Only the standard library, the neurond and docker commands, and systemd's.

A check is a function without arguments. Its name, with blanks for underscores, is how it is called in the output, its
docstring is its claim; it returns what it saw, and raises Failed (by `expect` or `until`) otherwise. What it started
and what it leased is ended for it afterwards. The machine is emulated, and slow: wait with `until`, for as long as it
takes, and never for a time.
"""

import json
import shlex
import subprocess
import termios
import time
import tty
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PAYLOAD = Path("/checks")
IMAGE = "busybox:checks"
SOCKET = Path("/run/neurond/neurond.sock")
PARAMETERS = Path("/sys/module/neuron/parameters")

PATIENCE = 300.0
"""Seconds for what takes one on a real machine."""


class Failed(Exception):
    """What a check claims is not so."""


def expect(holds: object, otherwise: str) -> None:
    """Raise Failed with this sentence, unless it holds."""
    if not holds:
        raise Failed(otherwise)


def until(what: str, question: Callable[[], T], seconds: float = PATIENCE) -> T:
    """Ask until the answer is true, and return it. Raise Failed, with the last answer, when it takes too long."""
    end = time.monotonic() + seconds
    while True:
        answer = question()
        if answer:
            return answer
        if time.monotonic() > end:
            raise Failed(f"{seconds:.0f} s have passed, and not yet: {what} (last answer: {answer!r})")
        time.sleep(0.2)


def run(*command: str, code: int | None = 0, seconds: float = PATIENCE, user: str | None = None) -> str:
    """Run a command and return what it wrote to stdout, or to stderr where it wrote nothing else.

    Raise Failed if its exit code is another; any will do with None.
    """
    as_user = ["runuser", "-u", user, "--"] if user else []
    try:
        done = subprocess.run([*as_user, *command], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"{shlex.join(command)} has not ended after {seconds:.0f} s") from None
    if code is not None and done.returncode != code:
        raise Failed(f"{shlex.join(command)} ended with {done.returncode}, not {code}: {done.stdout}{done.stderr}")
    return (done.stdout or done.stderr).strip()


def chips() -> dict[int, dict[str, Any]]:
    """Return what `neurond ls` says of each chip."""
    return {chip["neuron_device"]: chip for chip in json.loads(run("neurond", "ls", "--json"))}


def leases() -> dict[str, dict[str, Any]]:
    """Return what `neurond ps` says of each lease, by its name."""
    return {lease["name"]: lease for lease in json.loads(run("neurond", "ps", "--json"))}


def chips_of(name: str) -> set[int]:
    """Return the chips of a lease, by what neurond says; none if there is no such lease."""
    lease = leases().get(name)
    return set(lease["chips"]) if lease else set()


def state_of(chip: int) -> str | None:
    """Return the state of a chip as `neurond ls` has it, None if it lists no such chip."""
    found = chips().get(chip)
    return found["state"] if found else None


def is_active(unit: str) -> bool:
    """Tell whether a unit is up."""
    return run("systemctl", "is-active", unit, code=None) == "active"


def property_of(unit: str, name: str) -> str:
    """Return a property of a unit, as systemd says it."""
    return run("systemctl", "show", "--value", f"--property={name}", unit)


def mode_of(node: str) -> str:
    """Return owner, group and mode as in root:neuron 0660."""
    return run("stat", "--format=%U:%G %04a", node)


def numbers(chips: Iterable[int]) -> str:
    """Return chips as people write them."""
    return ",".join(map(str, sorted(chips)))


# What may be opened is found out by opening it, in a process and in a container alike. In a container the nodes of
# chips that are not its own are made by hand first, as that must not help. ENXIO is the module's word for no chip.
OPEN_ALL = r"""
for node in /dev/neuron*; do
    if why=$( (: <>"$node") 2>&1); then echo "opens ${node#/dev/neuron}"
    else echo "refused ${node#/dev/neuron} ${why##*: }"; fi
done
"""
LIVE = "trap 'exit 1' TERM; sleep 100000 & wait"
"""Ends when it is told to, and as a failure, so that Docker starts it again where it has that policy."""
MAKE_NODES = r"""
i=0
while [ $i -lt $CHIPS ]; do [ -e /dev/neuron$i ] || mknod -m 666 /dev/neuron$i c $MAJOR $i; i=$((i + 1)); done
"""


def opened_in(output: str) -> set[int]:
    """Return the chips that could be opened, of what OPEN_ALL wrote."""
    lines = [line.split() for line in output.splitlines()]
    return {int(line[1]) for line in lines if line[:1] == ["opens"]}


def opens(user: str) -> set[int]:
    """Return the chips that this user can open."""
    return opened_in(run("sh", "-c", OPEN_ALL, user=user))


class Job:
    """A command under `neurond run`, as some user, that tries all chips first and then lives until it is ended."""

    def __init__(self, name: str, *options: str, user: str = "member", wait: bool = True) -> None:
        self.name = name
        self.output = Path(f"/tmp/{name}.out")
        script = f"{OPEN_ALL}\necho done\nexec sleep 100000"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                ["runuser", "-u", user, "--", "neurond", "run", "--name", name, *options, "--", "sh", "-c", script],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _jobs.append(self)
        if wait:
            until(f"the job {name} has tried all chips", self.has_tried)

    def has_tried(self) -> bool:
        """Tell whether it runs and has tried to open each chip; raise Failed if it does not run any more."""
        if self.process.poll() is not None:
            raise Failed(f"the job {self.name} ended with {self.process.returncode}: {self.output.read_text()}")
        return self.output.read_text().endswith("done\n")

    def opens(self) -> set[int]:
        """Return the chips that it could open at its start."""
        return opened_in(self.output.read_text())

    def lives(self) -> bool:
        """Tell whether it runs."""
        return self.process.poll() is None

    def chips(self) -> set[int]:
        """Return the chips of its lease, by what neurond says."""
        return chips_of(self.name)

    def end(self) -> None:
        """Kill it, and wait until its lease is gone."""
        if self.lives():
            pid = leases().get(self.name, {}).get("pid")
            if pid:
                run("kill", "-KILL", str(pid), code=None)
            self.process.kill()
        self.process.wait()
        until(f"the lease of {self.name} is gone", lambda: self.name not in leases())


class Container:
    """A container on leased chips that lives until it is ended."""

    def __init__(self, name: str, *options: str) -> None:
        self.name = name
        run("neurond", "container", "run", "--detach", "--name", name, *options, IMAGE, "sh", "-c", LIVE)
        until(f"the container {name} is leased", lambda: leases().get(name, {}).get("state") == "active")

    def opens(self) -> set[int]:
        """Return the chips that it can open now, also by nodes that it makes itself."""
        every = chips()
        major = next(chip["device"].partition(":")[0] for chip in every.values())
        script = f"CHIPS={len(every)} MAJOR={major}\n{MAKE_NODES}\n{OPEN_ALL}"
        return opened_in(run("docker", "exec", self.name, "sh", "-c", script))

    def lives(self) -> bool:
        """Tell whether it runs."""
        return run("docker", "inspect", "--format={{.State.Running}}", self.name, code=None) == "true"

    def chips(self) -> set[int]:
        """Return the chips of its lease, by what neurond says."""
        return chips_of(self.name)

    def end(self) -> None:
        """Remove it, and wait until its lease is gone."""
        run("docker", "rm", "--force", self.name)
        until(f"the lease of {self.name} is gone", lambda: self.name not in leases())


_jobs: list[Job] = []
_left: list[str] = []


def leave(why: str) -> None:
    """Have what this check started go on after it, for the next one or until the machine goes down."""
    _left.append(why)


def tidy() -> None:
    """End all jobs and containers, and wait until no chip is leased: the next check begins with nothing."""
    if _left:
        _left.clear()
        return
    for job in _jobs:
        if job.lives():
            run("pkill", "-KILL", "--session", str(job.process.pid), code=None)
            job.process.kill()
        job.process.wait()
    _jobs.clear()
    if is_active("docker"):
        found = run("docker", "ps", "--all", "--quiet").split()
        if found:
            run("docker", "rm", "--force", *found)
    if is_active("neurond"):
        until("no chip is leased", lambda: not leases())


def restart_docker() -> None:
    """Restart Docker, and wait until it answers."""
    run("systemctl", "reset-failed", "docker")
    run("systemctl", "restart", "docker")
    run("docker", "version")


def load_module(*parameters: str) -> None:
    """Load the module, and wait until udev is done with its chips."""
    run("modprobe", "neuron", *parameters)
    run("udevadm", "settle")


class Port:
    """The second serial port, at whose other end packaging/vm-test listens."""

    def __init__(self) -> None:
        self.file = Path("/dev/ttyS1").open("w", encoding="utf-8")  # noqa: SIM115 - for as long as the machine runs
        tty.setraw(self.file.fileno())

    def tell(self, kind: str, text: str = "", **more: Any) -> None:
        """Tell it one thing, and wait until it has gone out."""
        if kind != "log":
            print(f"{kind}: {more.get('name', '')} {text}", flush=True)  # for the console
        print(json.dumps({"kind": kind, "text": text, **more}), file=self.file, flush=True)
        termios.tcdrain(self.file.fileno())
