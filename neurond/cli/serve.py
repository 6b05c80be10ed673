"""serve: the one verb that becomes the daemon."""

import os
from collections.abc import Sequence
from pathlib import Path

from neurond.cli.options import Parser

LONGEST_SOCKET_PATH = 107
"""Bytes, without the final NUL (unix(7))."""


def serve(arguments: Sequence[str]) -> int:
    """Run the daemon in the foreground."""
    parser = Parser("serve", "Run the daemon in the foreground, until SIGTERM or SIGINT. Stopping it ends no lease.")
    add = parser.add_argument
    add("--simulate", metavar="TYPE", help="simulate a host of this instance type, as trn1.32xlarge")
    add(
        "--runtime-dir",
        type=Path,
        default=Path("/run/neurond"),
        metavar="DIR",
        help="where journal, lock and socket (DIR/neurond.sock) are (default: /run/neurond)",
    )
    add(
        "--docker",
        default="unix:///var/run/docker.sock",
        metavar="URL",
        help="address of the Docker Engine (default: unix:///var/run/docker.sock)",
    )
    add(
        "--cdi-dir",
        default="/run/cdi",
        metavar="DIR",
        help="where to give leases names as devices, if the engine looks there (default: /run/cdi; empty: nowhere)",
    )
    add(
        "--stop-conflicts",
        action="store_true",
        help="stop a container that was started again after its chips had gone to somebody else (default: only say so)",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--log-format", choices=("auto", "json", "text"), default="auto", help="auto is text on a terminal, else JSON")
    options = parser.parse(arguments)
    if options.simulate == "":
        parser.error("--simulate: of which instance type?")
    if str(options.runtime_dir) == ".":
        parser.error("--runtime-dir: give a directory of neurond's own, as /run/neurond")
    socket = options.runtime_dir.absolute() / "neurond.sock"
    if len(os.fsencode(socket)) > LONGEST_SOCKET_PATH:
        parser.error(
            f"--runtime-dir: the socket {socket} would have a path of {len(os.fsencode(socket))} bytes, "
            f"and {LONGEST_SOCKET_PATH} are possible"
        )
    if "://" not in options.docker:
        parser.error(f"--docker {options.docker}: an address is of the form unix:///var/run/docker.sock")
    from neurond.daemon import service

    return service.serve(
        service.Options(
            runtime_dir=options.runtime_dir.absolute(),
            simulate=options.simulate,
            engine_url=options.docker,
            cdi_dir=Path(options.cdi_dir) if options.cdi_dir else None,
            stop_conflicts=options.stop_conflicts,
            log_level=options.log_level,
            log_json={"auto": None, "json": True, "text": False}[options.log_format],
        )
    )
