"""ls, ps, watch, version: what there is and what happens."""

import json
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from typing import Any

from neurond.cli import NO_SUCH, USAGE, Exit
from neurond.cli.options import Parser
from neurond.cli.tables import clock, paint, print_table, want_colour
from neurond.client import Client, Unreachable
from neurond.ledger.words import printable, ranges

Row = dict[str, Any]


def ls(arguments: Sequence[str]) -> int:
    """Show the chips."""
    parser = Parser("ls", "Show the chips of this host: state, lease, holders.")
    parser.add_argument("chip", nargs="*", type=int, help="only these chips")
    parser.add_argument("-j", "--json", action="store_true", help="print a list of objects, as neuron-ls -j does")
    parser.add_argument("-w", "--wide", action="store_true", help="more columns")
    parser.add_argument("-t", "--topology", action="store_true", help="draw how the chips lie together")
    add_colour(parser)
    options = parser.parse(arguments)
    with Client(options.host) as client:
        reply = client.call("ListChips")
    chips = reply["chips"]
    if options.chip:
        known = {chip["neuron_device"] for chip in chips}
        unknown = sorted(set(options.chip) - known)
        if unknown:
            raise Exit(NO_SUCH, f"no chip {unknown[0]} on this host (have {ranges(known)})")
        chips = [chip for chip in chips if chip["neuron_device"] in options.chip]
    if options.json:
        print(json.dumps(chips))
        return 0
    if reply.get("note"):
        print(f"neurond: {reply['note']}", file=sys.stderr)
    colour = want_colour(options.color)
    if options.topology:
        draw(reply["instance_type"], reply["shape"], reply["chips"], colour=colour)
    elif chips:
        header = ["CHIP", "STATE", "LEASE", "OWNER", "LEVEL", "SINCE", "HOLDER"]
        wide = ["NODE", "DEVICE", "CORES", "MEMORY", "LINKS", "NAME"] if options.wide else []
        print_table(
            header + wide,
            [chip_row(chip) + (wide_chip_row(chip) if wide else []) for chip in chips],
            colour=colour,
        )
    return 0


def chip_row(chip: Row) -> list[str]:
    """Return the cells of one chip."""
    holders = ", ".join(map(holder_text, chip["holders"]))
    if chip["lease"] and chip["foreign"]:
        holders = f"{holders}{'; ' if holders else ''}also {', '.join(map(holder_text, chip['foreign']))}"
    return [
        str(chip["neuron_device"]),
        chip["state"],
        chip["lease"] or "",
        chip["owner"] or next((holder.get("user") or "" for holder in chip["holders"]), ""),
        chip["enforcement"] or "",
        clock(chip["since"]),
        chip["problem"] or holders,
    ]


def wide_chip_row(chip: Row) -> list[str]:
    """Return the further cells of ls -w; a fact that is not the kernel's own says where it is from."""
    cores = "?" if chip["nc_count"] is None else ranges(chip["neuroncore_ids"])
    links = "?" if chip["connected_to"] is None else ",".join(map(str, chip["connected_to"]))
    return [
        chip["node"],
        chip["device"],
        cores + (" (catalog)" if chip["cores_from"] == "catalog" else ""),
        "?" if not chip["memory_size"] else f"{chip['memory_size'] >> 30} GiB",
        links + (" (catalog)" if chip["connected_from"] == "catalog" else ""),
        chip["name"] or "",
    ]


def holder_text(holder: Row) -> str:
    """Say who holds a chip: "4242 python train.py" or "container trainer"."""
    if holder.get("container") is not None:
        return f"container {holder['container'] or 'being created'}"
    where = f" in container {holder['container_id'][:12]}" if holder.get("container_id") else ""
    return f"{holder.get('pid')} {shorten(holder.get('command') or '', 60)}{where}".strip()


def shorten(text: str, most: int) -> str:
    """Cut a long text, with a sign that it was cut."""
    return text if len(text) <= most else text[: most - 1] + "…"


def draw(instance_type: str, shape: str, chips: Sequence[Row], *, colour: bool) -> None:
    """Draw the chips: a grid of four columns, or a row."""
    print(f"{instance_type}: {'rows of 4 and halves of 8 belong together' if shape == 'grid' else shape}")
    width = 4 if shape == "grid" else max(1, len(chips))
    by_index = {chip["neuron_device"]: chip for chip in chips}
    top = max(by_index, default=-1) + 1
    for start in range(0, top, width):
        cells = []
        for index in range(start, min(start + width, top)):
            chip = by_index.get(index)
            state = chip["state"] if chip else "absent"
            cells.append(paint(f"[{index:>2} {state:<8}]", state, on=colour))
        print(" ".join(cells))


def binding_text(row: Row) -> str:
    """Say what a lease is bound to."""
    if row["binding"] == "process":
        return f"process {row['pid']}"
    if row["binding"] == "container":
        return f"container {row['container'] or 'being created'}"
    if row["binding"] == "task":
        return f"task of {row['container'] or 'containers being created'}"
    if row["binding"] == "time":
        return f"until {clock(row['until'])}"
    return f"connection of {row['pid']}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "lease": lambda row: row["lease"],
    "state": lambda row: row["state"],
    "chips": lambda row: ranges(row["chips"]) if row["chips"] else row["asked"],
    "owner": lambda row: row["owner"],
    "binding": binding_text,
    "level": lambda row: row["enforcement"] or "",
    "since": lambda row: clock(row["since"]),
    "name": lambda row: row["name"],
    "why": lambda row: row["why"] or (f"lost: {ranges(row['lost'])}" if row["lost"] else ""),
    "pid": lambda row: str(row["pid"] or ""),
    "command": lambda row: row["command"] or "",
    "container": lambda row: row["container"] or "",
    "until": lambda row: clock(row["until"]),
    "asked": lambda row: row["asked"],
}
USUAL_COLUMNS = ["lease", "state", "chips", "owner", "binding", "level", "since", "name", "why"]
FILTERS = ("lease", "state", "owner", "binding", "name", "container")


def ps(arguments: Sequence[str]) -> int:
    """Show the leases."""
    parser = Parser("ps", "Show the leases and the requests that wait.")
    parser.add_argument("-a", "--ended", action="store_true", help="also those that ended lately")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the ids only")
    parser.add_argument(
        "--filter", action="append", default=[], metavar="K=V", help=f"only those with K=V; K is {', '.join(FILTERS)}"
    )
    parser.add_argument("-o", "--columns", metavar="COLS", help=f"columns out of {','.join(COLUMNS)}")
    parser.add_argument("-j", "--json", action="store_true", help="print a list of objects")
    add_colour(parser)
    options = parser.parse(arguments)
    filters = [read_filter(text) for text in options.filter]
    columns = options.columns.lower().split(",") if options.columns else USUAL_COLUMNS
    unknown = [column for column in columns if column not in COLUMNS]
    if unknown:
        raise Exit(USAGE, f"no column {unknown[0]!r}: there are {','.join(COLUMNS)}")
    with Client(options.host) as client:
        rows = client.call("ListLeases", ended=options.ended)["leases"]
    rows = [row for row in rows if all(row[key] == value for key, value in filters)]
    if options.json:
        print(json.dumps(rows))
    elif options.quiet:
        print("".join(f"{row['lease']}\n" for row in rows), end="")
    elif rows:
        table = [[COLUMNS[column](row) for column in columns] for row in rows]
        print_table([column.upper() for column in columns], table, colour=want_colour(options.color))
    return 0


def read_filter(text: str) -> tuple[str, str]:
    """Read K=V."""
    key, equals, value = text.partition("=")
    if not equals or key not in FILTERS:
        raise Exit(USAGE, f"--filter {text}: the form is K=V, with K one of {', '.join(FILTERS)}")
    return key, value


def watch(arguments: Sequence[str]) -> int:
    """Follow what happens."""
    parser = Parser("watch", "Follow what happens to chips and leases, from now on.")
    parser.add_argument("--since", type=int, metavar="SEQ", help="begin with the event of this number")
    parser.add_argument("-j", "--json", action="store_true", help="print one object a line")
    parser.add_argument("--count", type=int, help=SUPPRESS)
    options = parser.parse(arguments)
    if options.since is not None and options.since < 0:
        raise Exit(USAGE, f"--since {options.since}: events are numbered from 1 on, and 0 is all that are kept")
    with Client(options.host) as client:
        for number, reply in enumerate(client.stream("Watch", since=options.since), start=1):
            event = reply["event"]
            text = json.dumps(event) if options.json else event_text(event)
            print(text, flush=True)
            if number == options.count:
                return 0
    raise Unreachable("neurond ended the stream")


def event_text(event: Row) -> str:
    """Write an event as one line: time, kind, and what it is about."""
    data = event["data"]
    lease = data.get("lease") or {}
    parts = [clock(event["at"]), f"{event['event']:<14}", data.get("id") or lease.get("id") or ""]
    if lease:
        parts += [f"chips {ranges(lease['chips'])}" if lease["chips"] else "waits", lease["owner"]["name"]]
        parts += [lease["binding"]["kind"], lease["name"]]
    if "chip" in data:
        parts.append(f"chip {data['chip']['index']} {data['chip']['problem'] or ''}")
    if "index" in data:
        parts.append(f"chip {data['index']}")
    if "users" in data:
        named = [f"pid {user['pid']} ({user['user']}, {user['command']})" for user in data["users"]]
        parts.append("used by " + ", ".join(named) if named else "used by nobody any more")
    if "binding" in data:
        parts.append(data["binding"]["kind"])
    parts.append(data.get("reason") or "")
    return printable(" ".join(part for part in parts if part))


def check(arguments: Sequence[str]) -> int:
    """Print every disagreement."""
    parser = Parser(
        "check", "Compare ledger, processes, nodes and containers now. Exit code 0 if they agree, 1 if not."
    )
    parser.add_argument("-j", "--json", action="store_true", help="print a list of objects")
    options = parser.parse(arguments)
    with Client(options.host) as client:
        findings = client.call("Check")["findings"]
    if options.json:
        print(json.dumps(findings))
    for finding in findings if not options.json else ():
        print(printable(f"{finding['kind']}: {finding['sentence']}"))
    return 1 if findings else 0


def version(arguments: Sequence[str]) -> int:
    """Print the versions of the command and of the daemon."""
    from neurond import __version__

    parser = Parser("version", "Print the versions of the command and of the daemon.")
    parser.add_argument("-j", "--json", action="store_true", help="print an object")
    options = parser.parse(arguments)
    daemon: Row | None = None
    trouble = ""
    try:
        with Client(options.host) as client:
            daemon = client.call("Describe")
    except Unreachable as error:
        trouble = str(error)
    if options.json:
        print(json.dumps({"version": __version__, "daemon": daemon}))
    elif daemon is None:
        print(f"neurond {__version__}\ndaemon: none ({trouble})")
    else:
        simulated = ", simulated" if daemon["simulated"] else ""
        print(
            f"neurond {__version__}\ndaemon {daemon['version']}, pid {daemon['pid']}, "
            f"on {daemon['instance_type']}{simulated}"
        )
        if daemon["journal_problem"]:
            print(f"neurond: {daemon['journal_problem']}", file=sys.stderr)
    return 0


def add_colour(parser: Parser) -> None:
    """Add --color."""
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="colour the states")
