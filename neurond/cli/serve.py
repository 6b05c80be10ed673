"""serve: the one verb that becomes the daemon."""

import argparse
import os
import sys
from collections.abc import Sequence

from neurond.cli import FAILED, USAGE
from neurond.cli.options import Parser
from neurond.ledger.words import printable
from neurond.settings.kinds import Flag
from neurond.settings.sources import COMMAND_LINE, Finding, sources_of
from neurond.settings.table import DEFAULT_FILE, KEYS


def serve(arguments: Sequence[str]) -> int:
    """Run the daemon in the foreground."""
    parser = Parser(
        "serve", "Run the daemon in the foreground, until SIGTERM or SIGINT. Stopping it ends no lease.", host=False
    )
    add_config(parser)
    for key in KEYS.values():
        text = f"{key.meaning} (default: {key.kind.write(key.default)})".replace("%", "%%")
        if isinstance(key.kind, Flag):
            parser.add_argument(key.option, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(key.option, metavar=key.kind.metavar, choices=key.kind.choices, help=text)
    options = parser.parse_args(arguments)  # the environment is read with the files, to say where a value is from
    if options.simulate == "":
        parser.error("--simulate: of which instance type?")
    given = {name: getattr(options, name) for name in KEYS if getattr(options, name) is not None}
    sources = sources_of(options.config, {name: _text(value) for name, value in given.items()}, os.environ)
    read = sources.read()
    if read.findings:
        say(read.findings)
        return USAGE if all(finding.origin == COMMAND_LINE for finding in read.findings) else FAILED
    from neurond.daemon import service

    return service.serve(sources, read)


def add_config(parser: Parser) -> None:
    """Add the file to read."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"read this file, and conf.d/*.toml beside it (default: {DEFAULT_FILE}, where it is; /dev/null for none)",
    )


def say(findings: Sequence[Finding]) -> None:
    """Say everything that is wrong."""
    for finding in findings:
        print(f"neurond: {printable(str(finding))}", file=sys.stderr)


def _text(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
