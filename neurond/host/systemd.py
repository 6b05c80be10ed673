"""systemd: telling it how we are (sd_notify(3)), and taking over the socket that it listens on (sd_listen_fds(3)).

Own code, as the protocol is a datagram and two variables, and the package for it on PyPI has had no release since 2017
and can only be built from source.
"""

import os
import socket

FIRST_LISTEN_FD = 3


def notify(state: str) -> None:
    """Tell systemd, as in "READY=1"; without systemd nothing happens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in {"/", "@"}:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.connect("\0" + address[1:] if address[0] == "@" else address)
            sock.sendall(state.encode())
        except OSError:
            return  # nobody listens any more, and the daemon is fine


def activated_socket() -> socket.socket | None:
    """Return the listening socket that systemd started us with, if it did."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    os.set_inheritable(FIRST_LISTEN_FD, False)
    return socket.socket(fileno=FIRST_LISTEN_FD)


def watchdog_period() -> float | None:
    """Return how often systemd wants to hear from us, in seconds; None if it does not care."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if usec.isdigit() and usec != "0" else None
