"""The runtime directory: its room, the journal, the clock."""

import json
import re
from collections.abc import Iterator

from neurond.cli.doctor.host import Finding, Host

AREA = "state"
FORMAT = 1
"""The format of the journal that this version reads: neurond.host.journal.VERSION, which a verb may not import."""
LITTLE, FEW = 16 << 20, 1000
"""Bytes and inodes that a busy daemon should have: a journal is compacted far below."""


def room(host: Host) -> Iterator[Finding]:
    """Say whether there is room for the journal."""
    if host.free is None:
        yield Finding(
            AREA,
            "warning" if host.daemon.content is None else "unseen",
            f"the runtime directory {host.settings.runtime_dir} is not there, or not to be seen",
            "start neurond, which makes it; or run as root",
        )
        return
    size, inodes = host.free
    text = f"{host.settings.runtime_dir} has {size >> 20} MiB and {inodes} inodes free"
    if not size or not inodes:
        yield Finding(AREA, "error", text, "make room: df -h, df -i; until then nothing can be leased")
    elif size < LITTLE or inodes < FEW:
        yield Finding(AREA, "warning", text, "make room: df -h, df -i; when it is full nothing can be leased")
    else:
        yield Finding(AREA, "fine", text)


def journal(host: Host) -> Iterator[Finding]:
    """Look at the journal's first line, and for files that were kept aside."""
    path = f"{host.settings.runtime_dir}/journal"
    try:
        aside = [name for name in host.names(host.settings.runtime_dir) if re.match(r"journal\.\d", name)]
        text = host.text(path)
    except PermissionError:
        yield Finding(AREA, "unseen", f"the journal {path}", "run as root")
        return
    if aside:
        yield Finding(
            AREA,
            "warning",
            f"journals were kept aside as they could not be used: {', '.join(aside)}",
            f"look at the log of neurond from then, and remove them from {host.settings.runtime_dir}",
        )
    if text is None:
        return
    try:
        header = json.loads(text.partition("\n")[0][9:])
        version, boot = header["journal"], header["boot"]
    except (KeyError, TypeError, ValueError):
        yield Finding(
            AREA, "error", f"{path} is not a journal of neurond's", "restart neurond: it keeps the file aside"
        )
        return
    now = (host.text("/proc/sys/kernel/random/boot_id") or "").strip()
    if version != FORMAT:
        yield Finding(
            AREA,
            "error",
            f"the journal has format {version!r}, this neurond reads {FORMAT}",
            "install the version that wrote it again; this one would keep it aside and begin anew",
        )
    elif boot != now:
        yield Finding(
            AREA,
            "warning",
            "the journal is of another boot: its leases are void",
            "start neurond, which begins a new one",
        )
    else:
        yield Finding(AREA, "fine", "the journal is of this boot and format")


def clock(host: Host) -> Iterator[Finding]:
    """Say whether the kernel's clock is synchronised."""
    if host.synchronised is None:
        yield Finding(AREA, "unseen", "whether the clock is synchronised", "timedatectl")
    elif host.synchronised:
        yield Finding(AREA, "fine", "the clock is synchronised")
    else:
        yield Finding(
            AREA,
            "warning",
            "the clock is not synchronised: times of leases and logs may jump",
            "systemctl enable --now chronyd (or systemd-timesyncd)",
        )


CHECKS = (room, journal, clock)
