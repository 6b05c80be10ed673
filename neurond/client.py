"""A small blocking client of the daemon, on the standard library only.

A verb of the command line pays for each import on every call, so messages are plain dictionaries here; wire.py says
what is in them, and the daemon checks it.
"""

from __future__ import annotations

import _socket  # what socket adds is not used here, and takes longer to import than a call takes
import json
import os

TYPE_CHECKING = False  # typing takes longer to import than all that is done here
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

INTERFACE = "io.neurond"
SLOW = {"RunContainer", "RunTask", "StopContainer", "StopTask", "ContainerLogs", "WriteInput", "Watch"}
"""Methods whose first reply may take its time: a grace, input that is read slowly, an image to get."""
PATIENCE = 60.0
"""Seconds that the first reply to any other may take before the daemon is taken not to answer."""
DEFAULT_ADDRESS = "unix:///run/neurond/neurond.sock"


class NeurondError(Exception):
    """The daemon refused. `kind` is the last part of the varlink error, `parameters` are its parameters."""

    def __init__(self, kind: str, parameters: dict[str, Any]) -> None:
        super().__init__(parameters.get("message") or f"{kind}: {parameters}")
        self.kind = kind
        self.parameters = parameters


class Unreachable(Exception):
    """No daemon answers at the address."""


class ShutOut(Unreachable):
    """The socket may not be opened by this user."""


def address() -> str:
    """Return the address that NEUROND_HOST gives, or the default one."""
    return os.environ.get("NEUROND_HOST") or DEFAULT_ADDRESS


def _group_of(path: str) -> str:
    import grp  # noqa: PLC0415 - only after a failure

    try:
        return grp.getgrgid(os.stat(path).st_gid).gr_name
    except (OSError, KeyError):
        return "neuron"


class Client:
    """One connection to the daemon; a context manager."""

    def __init__(self, where: str | None = None) -> None:
        where = where or address()
        path = where.removeprefix("unix://").removeprefix("unix:")
        if path == where and not where.startswith("/"):
            raise Unreachable(f"{where!r} is no address of a daemon: it looks like {DEFAULT_ADDRESS}")
        self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            if isinstance(error, PermissionError):
                raise ShutOut(f"you may not open {path}: that takes the group {_group_of(path)}") from None
            hint = {
                FileNotFoundError: "is it running? (systemctl status neurond; neurond serve)",
                ConnectionRefusedError: "it has stopped or crashed (systemctl status neurond)",
            }.get(type(error), "")
            reason = error.strerror or str(error)
            raise Unreachable(f"neurond does not answer at {path}: {reason}" + (f"; {hint}" if hint else "")) from None
        self._unread = b""

    def __enter__(self) -> Client:  # noqa: PYI034 - typing is slow to import
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; leases bound to it end."""
        self._socket.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method and return its reply. Raises NeurondError or Unreachable."""
        return next(self._replies(method, parameters, more=False))

    def stream(self, method: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Call a method and yield its replies as they come."""
        return self._replies(method, parameters, more=True)

    def _replies(self, method: str, parameters: dict[str, Any], *, more: bool) -> Iterator[dict[str, Any]]:
        call = {"method": f"{INTERFACE}.{method}", "parameters": parameters, "more": more}
        try:
            message = json.dumps(call, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise NeurondError("InvalidRequest", {"message": "an argument is no UTF-8 text"}) from None
        try:
            self._socket.settimeout(None if method in SLOW else PATIENCE)
            self._socket.sendall(message + b"\0")
            while True:
                reply = json.loads(self._message())
                self._socket.settimeout(None)
                if "error" in reply:
                    raise NeurondError(reply["error"].rpartition(".")[2], reply.get("parameters") or {})
                yield reply.get("parameters") or {}
                if not reply.get("continues"):
                    return
        except TimeoutError:
            raise Unreachable(f"neurond does not answer: it took the call and was silent for {PATIENCE:g} s") from None
        except OSError as error:
            raise Unreachable(f"the connection to neurond broke: {error.strerror or error}") from None

    def _message(self) -> bytes:
        parts = [self._unread]
        while b"\0" not in parts[-1]:
            data = self._socket.recv(1 << 16)
            if not data:
                raise Unreachable("neurond closed the connection")
            parts.append(data)
        message, _, self._unread = b"".join(parts).partition(b"\0")
        return message
