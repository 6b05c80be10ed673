"""Device names for the Container Device Interface: a file that tells the engine what `neurond.io/lease=ID` stands for.

The engine reads the file anew when it changes, so a name that is gone can't be resolved by a container that is started
again. The form is CDI 0.5.0: https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

VERSION = "0.5.0"
KIND = "neurond.io/lease"

Node = tuple[str, str]
"""A device node of the host, and its path inside."""


class CdiFile:
    """The names of one daemon, in a file of its own."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / f"{name}.json"

    def exists(self) -> bool:
        """Tell whether an earlier daemon has left names."""
        return self.path.exists()

    def rival(self) -> Path | None:
        """Return a file of somebody else that gives names of our kind, which engines take for a conflict."""
        for path in sorted(self.path.parent.glob("*.json")):
            if path.name.startswith("neurond"):
                continue  # another daemon of ours, whose leases have other ids
            with suppress(OSError, ValueError, AttributeError):
                if json.loads(path.read_text()).get("kind") == KIND:
                    return path
        return None

    def write(self, names: Mapping[str, Sequence[Node]]) -> None:
        """Replace all names in one step; with none of them there is no file. Raises OSError."""
        if not names:
            self.remove()
            return
        content = describe(names)
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps(content))
        draft.chmod(0o644)  # whatever our umask is: every container tool may read it
        os.replace(draft, self.path)  # noqa: PTH105 - as everywhere for a rename that must not be half done

    def remove(self) -> None:
        """Take all names away; a file that is gone already is done. Raises OSError."""
        with suppress(FileNotFoundError, NotADirectoryError):
            self.path.unlink()


def describe(names: Mapping[str, Sequence[Node]]) -> dict[str, object]:
    """Return the CDI specification that gives these names."""
    return {
        "cdiVersion": VERSION,
        "kind": KIND,
        "devices": [
            {
                "name": name,
                "containerEdits": {
                    "deviceNodes": [{"path": inside, "hostPath": node, "permissions": "rw"} for node, inside in nodes]
                },
            }
            for name, nodes in names.items()
        ],
    }
