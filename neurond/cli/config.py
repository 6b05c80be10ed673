"""config: what is set, from where; whether the files are right; and the file to begin with."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neurond.cli import FAILED
from neurond.cli.options import Parser
from neurond.cli.serve import add_config, say
from neurond.client import Client, NeurondError, Unreachable
from neurond.ledger.words import printable
from neurond.settings import texts
from neurond.settings.sources import Reader, sources_of
from neurond.settings.table import KEYS


def config(arguments: Sequence[str]) -> int:
    """Print or check the settings."""
    parser = Parser(
        "config",
        "Print the settings that are in force and where each is set: those of the daemon that runs, or, if none "
        "answers or --config is given, those that one would start with.",
    )
    add_config(parser)
    parser.add_argument("-j", "--json", action="store_true", help="print an object")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check", action="store_true", help="only say what is wrong in the files; 0 nothing, 1 something"
    )
    what.add_argument(
        "--example", action="store_true", help="print a file with all keys, commented out, with their defaults"
    )
    parser.add_argument(
        "file", nargs="*", metavar="FILE", help="with --check: these files, instead of those of the daemon"
    )
    options = parser.parse(arguments)
    if options.file and not options.check:
        parser.error("files are given to --check; --config FILE prints what a daemon with that file would have")
    if options.example:
        print(texts.example(), end="")
        return 0
    if options.check:
        return _check(options.config, options.file)
    return _print(options.config, options.host, as_json=options.json)


def _check(config_file: str | None, files: Sequence[str]) -> int:
    """Validate without a daemon."""
    if files:
        reader = Reader()
        for path in files:
            reader.read_file(Path(path))
        read = reader.outcome()
    else:
        read = sources_of(config_file, {}, os.environ).read()
    say(read.findings)
    if read.findings:
        return FAILED
    print(f"{', '.join(read.files) or 'no file'}: nothing wrong")
    return 0


def _print(config_file: str | None, host: str | None, *, as_json: bool) -> int:
    reply: Mapping[str, Any] | None = None
    if config_file is None:
        try:
            with Client(host) as client:
                reply = client.call("ListSettings")
        except Unreachable as error:
            print(f"neurond: {error}\nneurond: these are the settings that it would start with", file=sys.stderr)
        except NeurondError as error:
            if error.kind != "MethodNotFound":
                raise
            print(
                "neurond: the daemon is older than this command; these are the settings that one would start with",
                file=sys.stderr,
            )
    if reply is None:
        read = sources_of(config_file, {}, os.environ).read()
        say(read.findings)
        if read.findings:
            return FAILED
        settings = [
            {"key": name, "value": getattr(read.settings, name), "origin": origin, "next": None, "next_origin": None}
            for name, origin in read.origins.items()
        ]
        reply = {"pid": None, "files": read.files, "problems": [], "settings": settings}
    if as_json:
        print(json.dumps(reply))
        return 0
    known = [row for row in reply["settings"] if row["key"] in KEYS]  # a newer daemon may have more
    values = {row["key"]: row["value"] for row in known}
    origins = {row["key"]: printable(row["origin"]) for row in known}
    pending = {row["key"]: (row["next"], printable(row["next_origin"])) for row in known if row["next_origin"]}
    print(texts.table(values, origins, pending), end="")
    for problem in reply["problems"]:
        print(f"neurond: {printable(problem)}", file=sys.stderr)
    if reply["problems"]:
        print("neurond: so the settings from before stay in force until that is right, and reloaded", file=sys.stderr)
    return 0
