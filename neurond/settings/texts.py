"""What is printed of the settings: the file as it is shipped, the table of the README, and what is in force."""

from collections.abc import Mapping
from textwrap import wrap

from neurond.settings.table import KEYS, Key

WIDTH = 100


def example() -> str:
    """Return the file as it is shipped: each key with its default, commented out, and what it means."""
    head = """\
# Settings of neurond. What is commented out is the default.
#
# Files conf.d/*.toml beside this one are read after it, by name; what is set later counts. The environment
# (NEUROND_SERVE_<KEY>) counts more than the files, the command line of `neurond serve` more than the environment.
#
# neurond config --check    is this file right?
# systemctl reload neurond  apply it; what takes a restart is marked below
# neurond config            what is in force, and from where
"""
    return head + "".join(f"\n{_comment(key)}#{key.name} = {key.kind.write(key.default)}\n" for key in KEYS.values())


def _comment(key: Key) -> str:
    when = "" if key.reload else " Takes a restart."
    text = f"{key.meaning[0].upper()}{key.meaning[1:]}. Possible: {key.kind.legal}.{when}"
    return "".join(f"# {line}\n" for line in wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def markdown() -> str:
    """Return the table of the README."""
    rows = [
        f"| `{key.name}` | {key.kind.legal} | `{key.kind.write(key.default)}` | {key.meaning} | {key.applies} |"
        for key in KEYS.values()
    ]
    return "\n".join(["| key | possible | default | meaning | takes effect |", "|---|---|---|---|---|", *rows]) + "\n"


def table(values: Mapping[str, object], origins: Mapping[str, str], pending: Mapping[str, tuple[object, str]]) -> str:
    """Return what is in force as TOML, with where each value comes from, and what waits for the next start."""
    lines = []
    for key in KEYS.values():
        if key.name not in values:
            continue
        note = origins.get(key.name, "?")
        if key.name in pending:
            value, origin = pending[key.name]
            note += f"; at the next start {key.kind.write(value)} ({origin})"
        lines.append((f"{key.name} = {key.kind.write(values[key.name])}", note))
    width = max((len(line) for line, _ in lines if len(line) <= WIDTH // 2), default=0)
    return "".join(f"{line:{width}}  # {note}\n" for line, note in lines)
