"""Who may open a chip's node: its mode, and an access control list for the time of a lease.

Where an admin has closed the nodes to others (mode 0660 root:neuron, as AWS's security page recommends), a user who
leases a chip gets an entry of its own in the node's list, and the group loses its right, so that leasing is the only
way in. The entry is taken back when the lease ends. With the driver package's 0666 there is nothing to enforce.
"""

import errno
import os
import stat
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

ATTRIBUTE = "system.posix_acl_access"
VERSION = 2
# Tags and rights of acl(5), as in the kernel's include/uapi/linux/posix_acl.h.
USER_OBJ, USER, GROUP_OBJ, MASK, OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
READ_WRITE, NOTHING = 6, 0
NOBODY_IN_PARTICULAR = 0xFFFFFFFF


def why_open(node: str) -> str | None:
    """Say why everybody can open this node, lease or not; None if others are shut out."""
    try:
        mode = Path(node).stat().st_mode
    except OSError as error:
        return f"{node}: {error.strerror}"
    if not stat.S_ISCHR(mode):
        return f"{node} is a stand-in, not a device"
    if mode & stat.S_IRWXO:
        return f"{node} has mode {stat.S_IMODE(mode):04o}: everybody can open it"
    return None


def allow(node: str, uids: Collection[int]) -> None:
    """Let exactly these users open a node, and root; nobody else, the owning group neither. Raises OSError."""
    entries = [(USER_OBJ, READ_WRITE, NOBODY_IN_PARTICULAR)]
    entries += [(USER, READ_WRITE, uid) for uid in sorted(uids)]
    entries += [
        (GROUP_OBJ, NOTHING, NOBODY_IN_PARTICULAR),
        (MASK, READ_WRITE, NOBODY_IN_PARTICULAR),
        (OTHER, NOTHING, NOBODY_IN_PARTICULAR),
    ]
    content = struct.pack("<I", VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(node, ATTRIBUTE, content)


def restore(node: str) -> None:
    """Take the list away: the node's mode counts again, with its group. Raises OSError.

    With a list, the mode shows its mask as the group's right, and keeps that. The group root had none: without a udev
    rule the kernel makes nodes 0600 root:root.
    """
    with suppress(FileNotFoundError):
        try:
            os.removexattr(node, ATTRIBUTE)
            found = Path(node).stat()
            if found.st_gid == 0:
                Path(node).chmod(stat.S_IMODE(found.st_mode) & ~stat.S_IRWXG)
        except OSError as error:
            if error.errno not in {errno.ENODATA, errno.ENOTSUP}:
                raise
