"""A machine under QEMU without acceleration, which is what runs everywhere; and what its checks tell.

The console goes to a file. The checks have a second serial port, which is ours to read: a JSON object a line, as
`inside/kit.py` writes them. A machine that reboots ends here, and is started again on the same disk, so that one that
panics is told from one that was asked to.
"""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from .image import Image

BOOT_OPTIONS = "root=/dev/vda rw console=ttyS0 quiet panic=-1 mitigations=off"


@dataclass
class Machine:
    """A machine of an instance type, on a disk of its own that holds what differs from the image."""

    image: Image
    instance_type: str
    work: Path
    payload: Path | None = None

    @property
    def disk(self) -> Path:
        """What this machine has written."""
        return self.work / f"{self.instance_type}.qcow2"

    @property
    def console(self) -> Path:
        """What the kernel and systemd have said."""
        return self.work / f"{self.instance_type}.console"

    def make_disk(self) -> None:
        """Begin with the image as it is."""
        overlay = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(self.image.disk), str(self.disk)]
        subprocess.run(overlay, check=True)

    def command(self, *serial: str) -> list[str]:
        """Return the command that boots it, with these serial ports."""
        payload = f"file={self.payload},if=virtio,format=raw,readonly=on"
        return [
            *("qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max,la57=off"),
            *("-m", "2048", "-smp", "2", "-display", "none", "-monitor", "none", "-nic", "none", "-no-reboot"),
            *("-kernel", str(self.image.kernel), "-initrd", str(self.image.initrd), "-append", BOOT_OPTIONS),
            *("-drive", f"file={self.disk},if=virtio,cache=unsafe"),
            *(("-drive", payload) if self.payload else ()),
            *("-smbios", f"type=1,manufacturer=Amazon EC2,product={self.instance_type}"),
            *(word for port in serial for word in ("-serial", port)),
        ]

    def boot(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Boot, and yield what the checks tell until the machine is off; after so many seconds it is switched off."""
        console = ["-chardev", f"file,id=console,path={self.console},append=on"]
        with _running([*self.command("chardev:console", "stdio"), *console], seconds) as lines:
            for line in lines:
                try:
                    yield json.loads(line)
                except ValueError:
                    yield {"kind": "noise", "text": line.decode(errors="replace").strip()}

    def shell(self) -> int:
        """Boot with the console on this terminal."""
        return subprocess.run(self.command("mon:stdio"), check=False).returncode


_processes: set[subprocess.Popen[bytes]] = set()


def stop_all() -> None:
    """Switch off all machines that run."""
    for process in tuple(_processes):
        process.kill()


@contextmanager
def _running(command: Sequence[str], seconds: float) -> Iterator[Iterator[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    _processes.add(process)
    limit = Timer(seconds, process.kill)
    limit.start()
    try:
        assert process.stdout is not None
        yield iter(process.stdout.readline, b"")
    finally:  # one that hangs is of no use, and neither is one whose checks nobody hears
        limit.cancel()
        process.kill()
        process.wait()
        _processes.discard(process)
