"""udev: which neuron devices there are, and when to look again. The only import of pyudev."""

from contextlib import suppress
from pathlib import Path

import pyudev

SUBSYSTEM = "neuron_device"
BUFFER = 4 << 20
"""Receive buffer of the monitor in bytes: a storm of events must not overflow it at once."""


class Udev:
    """The real host's devices. `fileno` is readable when there is news; news says only "look again"."""

    def __init__(self) -> None:
        self._context = pyudev.Context()
        self._monitor = self._listen()

    def fileno(self) -> int:
        """Return the descriptor of the monitor; it changes when `drain` returns False."""
        return int(self._monitor.fileno())

    def drain(self) -> bool:
        """Take in all pending events; False if the monitor had failed and was made anew.

        A full netlink buffer raises (ENOBUFS, or "Error while polling fd"): events were lost, which does no harm as
        everything is listed again, but a failed monitor would never report anything more.
        """
        try:
            while self._monitor.poll(timeout=0) is not None:
                pass
        except OSError:
            self._monitor = self._listen()
            return False
        return True

    def directories(self) -> list[Path]:
        """Return the sysfs directories of all devices of the class."""
        return [Path(device.sys_path) for device in self._context.list_devices(subsystem=SUBSYSTEM)]

    def _listen(self) -> pyudev.Monitor:
        # udevd passes an event on when it has applied its rules, so modes and owners are right by then; without udevd
        # nobody would pass on anything.
        source = "udev" if Path("/run/udev/control").exists() else "kernel"
        monitor = pyudev.Monitor.from_netlink(self._context, source=source)
        monitor.filter_by(SUBSYSTEM)
        with suppress(OSError):  # not root: the default buffer, and the periodic look, must do
            monitor.set_receive_buffer_size(BUFFER)
        monitor.start()
        return monitor
