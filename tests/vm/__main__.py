"""The command: boot the machines side by side, print a line for each check and a summary."""

import argparse
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from .image import CACHE, want_image
from .machine import Machine, stop_all
from .payload import make_payload

MACHINES = ("trn1.32xlarge", "inf2.48xlarge")
MOST_BOOTS = 4
"""Of one machine. Its checks ask for as many as they need."""


def main() -> int:
    """Run what the arguments ask for; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="packaging/vm-test",
        description="Boot a Debian 12 with chips under QEMU, install the package in it and check that all works.",
        epilog=f"The machine's disk is kept in {CACHE} (or $NEUROND_VM_CACHE).",
    )
    parser.add_argument("--machine", choices=MACHINES, help="only the machine of this instance type")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="only checks with this word in their names (and those they build on)"
    )
    parser.add_argument("--limit", type=float, default=3000, metavar="SECONDS", help="for all together (default: 3000)")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="keep disks, consoles and packages here")
    parser.add_argument(
        "--shell", action="store_true", help="boot a machine to look around in (Ctrl-A X ends it), and check nothing"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # takes the machine along
    image = want_image()
    with ExitStack() as stack:
        work: Path = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neurond-vm.")))
        work.mkdir(parents=True, exist_ok=True)
        if options.shell:
            machine = Machine(image, options.machine or MACHINES[0], work)
            machine.make_disk()
            return machine.shell()
        payload = make_payload(work, options.only)
        report = Report(time.monotonic() + options.limit)
        names = [options.machine] if options.machine else MACHINES
        with ThreadPoolExecutor() as threads:
            followed = [threads.submit(report.follow, Machine(image, name, work, payload)) for name in names]
            try:
                for one in followed:
                    one.result()
            finally:
                stop_all()
        return report.summary()


@dataclass
class Report:
    """What all checks said, a line each, and whether all of them said it."""

    until: float
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def follow(self, machine: Machine) -> None:
        """Boot a machine as often as its checks ask for, and take down what they say."""
        machine.make_disk()
        ended = None
        for _ in range(MOST_BOOTS):
            ended = self._boot(machine)
            if ended != "reboot":
                break
        if ended != "end":
            self.failed.append(f"{machine.instance_type} gave no summary")
            late = " (its time was over)" if time.monotonic() > self.until else ""
            print(f"{machine.instance_type} went away before its checks were over{late}; its console ends:", flush=True)
            print("".join(machine.console.read_text(errors="replace").splitlines(keepends=True)[-40:]), flush=True)

    def _boot(self, machine: Machine) -> str | None:
        ended, began = None, time.monotonic()
        for told in machine.boot(max(self.until - began, 1)):
            match told["kind"]:
                case "up":
                    print(
                        f"up   {time.monotonic() - began:6.1f} s  {machine.instance_type}  {told['text']}", flush=True
                    )
                case "check":
                    word = "ok  " if told["ok"] else "FAIL"
                    line = f"{word} {told['seconds']:6.1f} s  {machine.instance_type}  {told['name']}: {told['text']}"
                    print(line, flush=True)
                    if told["ok"]:
                        self.passed += 1
                    else:
                        self.failed.append(f"{machine.instance_type}: {told['name']}")
                case "reboot" | "end":
                    ended = told["kind"]
                case _:
                    print(told["text"], flush=True)
        return ended

    def summary(self) -> int:
        """Print how it went; return the exit code."""
        took = time.monotonic() - self.began
        print(f"\n{self.passed} checks passed, {len(self.failed)} failed, in {took:.0f} s")
        for name in self.failed:
            print(f"  failed: {name}")
        return 1 if self.failed or not self.passed else 0


if __name__ == "__main__":
    sys.exit(main())
