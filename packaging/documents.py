"""Writes the man pages and the completion of shells from what the verbs themselves read their options by.

The parser of a verb is made by the verb, and nowhere kept, as `neurond run` shall not wait for it. So each verb is
called with --help, and its parser taken at the moment when it would print.
"""

import argparse
import contextlib
import gzip
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import shtab

from neurond import cli
from neurond.cli.options import Parser

os.environ["COLUMNS"] = "80"  # for argparse, so that nothing depends on the terminal

LEASES = shtab.cmd("neurond ps -q 2>/dev/null")
COMPLETED: dict[str, Any] = {
    "lease": LEASES,
    "task": LEASES,
    "container": shtab.cmd("neurond container ls -q 2>/dev/null"),
    "file": shtab.FILE,
    "command": shtab.FILE,
    "config": shtab.FILE,
    "env_file": shtab.FILE,
    "plot": shtab.FILE,
    "runtime_dir": shtab.DIRECTORY,
}
"""How an argument is completed, by its name in the program. What there is now is asked of the daemon."""

COMPLETION = {
    "bash": "usr/share/bash-completion/completions/neurond",
    "zsh": "usr/share/zsh/{zsh}/_neurond",
    "fish": "usr/share/fish/vendor_completions.d/neurond.fish",
}
"""Where each shell looks for it."""
OF_ZSH = {"deb": "vendor-completions", "rpm": "site-functions"}
"""Where zsh looks depends on the distribution."""

SEE_ALSO = "neurond(1), neurond.toml(5), docker(1)"


class _Found(Exception):
    """A parser that was about to print its help."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb, and of each verb below one, as `container run`."""
    found: dict[str, argparse.ArgumentParser] = {}
    for verb in cli.VERBS:
        text = _ask(found, verb)
        for word in _verbs_below(text):
            _ask(found, f"{verb} {word}")
    return found


def _ask(found: dict[str, argparse.ArgumentParser], verb: str) -> str:
    """Add the parser of a verb, or return what it prints instead: the names of the verbs below it."""

    def caught(parser: argparse.ArgumentParser, _: object = None) -> None:
        raise _Found(parser)

    try:
        with patch.object(Parser, "print_help", caught):
            return output_of(*verb.split(), "--help")
    except _Found as one:
        found[verb] = one.parser
        return ""


def output_of(*words: str) -> str:
    """Return what a verb prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        cli.main(words)
    return said.getvalue()


def _verbs_below(text: str) -> Sequence[str]:
    """Read `usage: neurond container {run,ls} …` or `usage: neurond docker … run|create …`."""
    names = re.search(r"\{([a-z,]+)\}|\b([a-z]+(?:\|[a-z]+)+) ", text)
    return re.split("[,|]", names[1] or names[2]) if names else ()


# -- completion -------------------------------------------------------------------------------------------------------


def completions(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the completion of each shell: where to in a deb or rpm, and what."""
    whole = argparse.ArgumentParser("neurond", add_help=False)
    whole.add_argument("-h", "--help", action="store_true", help="list the verbs")
    whole.add_argument("-V", "--version", action="store_true", help="print the version")
    whole.add_argument("-H", "--host", metavar="ADDRESS", help="address of the daemon")
    verbs = whole.add_subparsers()
    found = parsers()
    for verb, (_, text) in cli.VERBS.items():
        below = {name.partition(" ")[2]: name for name in found if name.startswith(f"{verb} ")}
        if below:
            more = verbs.add_parser(verb, help=text).add_subparsers()
            for word, name in below.items():
                more.add_parser(word, help=summary(found[name]), parents=[completed(found[name])], add_help=False)
        else:
            verbs.add_parser(verb, help=text, parents=[completed(found[verb])], add_help=False)
    for shell, place in COMPLETION.items():
        yield place.format(zsh=OF_ZSH[kind]), shtab.complete(whole, shell)


def completed(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the parser, with how its arguments are completed."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to ask
        how = COMPLETED.get(action.dest)
        if how is not None:
            action.complete = how  # type: ignore[attr-defined] # shtab's way
    return parser


# -- man pages --------------------------------------------------------------------------------------------------------


def man_pages(version: str, date: str, example: str) -> Iterator[tuple[str, str]]:
    """Yield the man pages: where to, and what. `example` is the file of settings with all keys."""
    found = parsers()
    yield "usr/share/man/man1/neurond.1", overview(found, version, date)
    for verb, parser in found.items():
        page = "-".join(["neurond", *verb.split()])
        yield f"usr/share/man/man1/{page}.1", page_of(page, parser, version, date)
    yield "usr/share/man/man5/neurond.toml.5", settings_page(example, version, date)


def overview(found: Mapping[str, argparse.ArgumentParser], version: str, date: str) -> str:
    """Return neurond(1)."""
    lines = [*head("neurond", 1, "leases of AWS Neuron chips, for processes and containers", version, date)]
    lines += [".SH SYNOPSIS", ".B neurond", r"\fIVERB\fR [\fIOPTIONS\fR]", ".SH DESCRIPTION"]
    lines += [
        "neurond owns the ledger of who holds which Neuron chip of a host. A person, a script or a service asks for",
        "chips by one of the verbs below, and waits in a queue if there are none; the lease ends by itself with the",
        "process, the container or the time that it is bound to.",
        ".SH VERBS",
    ]
    for verb, (_, text) in cli.VERBS.items():
        pages = [name for name in found if name == verb or name.startswith(f"{verb} ")]
        see = ", ".join(rf"\fBneurond\-{roff(name.replace(' ', '-'))}\fR(1)" for name in pages)
        lines += [".TP", rf"\fB{roff(verb)}\fR", f"{sentence(text)} See {see}."]
    for title, block in re.findall(r"^(\w[\w ]+):\n((?:  .*\n)+)", cli.HELP_EPILOG, re.MULTILINE):
        lines += [f".SH {title.upper()}", ".nf", roff(block.rstrip()), ".fi"]
    lines += [".SH FILES"]
    for file, what in (
        ("/etc/neurond/neurond.toml, /etc/neurond/conf.d/*.toml", "settings of the daemon; see neurond.toml(5)"),
        ("/run/neurond/neurond.sock", "the socket of the daemon, for root and group neuron"),
        (
            "/usr/share/neurond/udev/60-neurond-enforced.rules",
            "shuts the chips to those without a lease, once it is linked into /etc/udev/rules.d",
        ),
    ):
        lines += [".TP", rf"\fI{roff(file)}\fR", sentence(what)]
    return page_text([*lines, ".SH SEE ALSO", "neurond.toml(5), docker(1), systemctl(1)"])


def page_of(page: str, parser: argparse.ArgumentParser, version: str, date: str) -> str:
    """Return the page of a verb."""
    lines = [*head(page, 1, summary(parser), version, date), ".SH SYNOPSIS"]
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    lines += [roff(usage), ".SH DESCRIPTION", roff(parser.description or ""), ".SH OPTIONS"]
    variable = "NEUROND_" + parser.prog.removeprefix("neurond ").replace(" ", "_").upper() + "_"
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to ask
        if action.help == argparse.SUPPRESS:
            continue
        names = ", ".join(rf"\fB{roff(name)}\fR" for name in action.option_strings)
        value = rf"\fI{roff(value_of(action))}\fR" if action.nargs != 0 else ""
        help_text = (action.help or "") % {**vars(action), "prog": parser.prog}
        lines += [".TP", " ".join(filter(None, [names, value])), sentence(help_text)]
    lines += [".SH EXIT STATUS", "See neurond(1).", ".SH ENVIRONMENT"]
    lines += [
        rf"Each long option can be given as a variable too, as \fB{roff(variable)}\fR\fIOPTION\fR.",
        ".SH SEE ALSO",
    ]
    return page_text([*lines, SEE_ALSO])


def settings_page(example: str, version: str, date: str) -> str:
    """Return neurond.toml(5)."""
    lines = [*head("neurond.toml", 5, "settings of the neurond daemon", version, date), ".SH SYNOPSIS"]
    lines += [r"\fI/etc/neurond/neurond.toml\fR", ".br", r"\fI/etc/neurond/conf.d/*.toml\fR", ".SH DESCRIPTION"]
    lines += ["The first file is read first, then those of the directory in the order of their names; what is read"]
    lines += ["later counts. Each key, with its default:", ".nf", roff(example.rstrip()), ".fi", ".SH SEE ALSO"]
    return page_text([*lines, "neurond(1)"])


def head(page: str, section: int, text: str, version: str, date: str) -> list[str]:
    """Return the beginning of a page."""
    title = f'.TH {page.upper()} {section} {date} "neurond {version}" "neurond"'
    return [title, ".nh", ".SH NAME", rf"{roff(page)} \- {roff(text)}"]


def value_of(action: argparse.Action) -> str:
    """Return how an argument's value is called."""
    if action.metavar is not None:
        return str(action.metavar)
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper() if action.option_strings else action.dest


def summary(parser: argparse.ArgumentParser) -> str:
    """Return the first sentence of what a verb does, as the line of a list."""
    first = re.split(r"\.(?:\s|$)|: ", parser.description or "", maxsplit=1)[0]
    return " ".join((first[:1].lower() + first[1:]).split())


def sentence(text: str) -> str:
    """Begin with a capital and end with a stop, safe for roff."""
    return roff(text[:1].upper() + text[1:] + ("" if text.endswith(".") else "."))


def roff(text: str) -> str:
    """Escape what roff would read as its own."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def page_text(lines: Sequence[str]) -> str:
    """Join the lines of a page."""
    return "\n".join(lines) + "\n"


def write_all(root: Path, kind: str, version: str, date: str, example: str) -> None:
    """Write all of it below a directory; the man pages compressed, as distributions have them."""
    for place, text in completions(kind):
        put(root / place, text.encode())
    for place, text in man_pages(version, date, example):
        put(root / f"{place}.gz", gzip.compress(text.encode(), mtime=0))


def put(file: Path, data: bytes) -> None:
    """Write a file, and make the directories above it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
