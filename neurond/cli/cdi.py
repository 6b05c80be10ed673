"""cdi list, generate: leases as device names, for every tool that knows the Container Device Interface."""

import json
import sys
from collections.abc import Sequence

from neurond.cli import NO_SUCH, USAGE, Exit
from neurond.cli.options import Parser
from neurond.cli.tables import print_table
from neurond.client import Client
from neurond.ledger.words import ranges


def cdi(arguments: Sequence[str]) -> int:
    """Call one of the verbs."""
    verbs = {"list": list_names, "generate": generate}
    if arguments[:1] and arguments[0] in verbs:
        return verbs[arguments[0]](arguments[1:])
    wanted = arguments[:1] in (["-h"], ["--help"])
    print(f"usage: neurond cdi {{{','.join(verbs)}}} [OPTIONS]", file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else USAGE


def list_names(arguments: Sequence[str]) -> int:
    """List the names that leases have as devices."""
    parser = Parser("cdi list", "List the names that leases have as devices: docker run --device NAME IMAGE.")
    parser.add_argument("-j", "--json", action="store_true", help="print an object with the chips by name")
    options = parser.parse(arguments)
    with Client(options.host) as client:
        reply = client.call("ListNames")
    if reply["file"] is None:
        print("neurond: the engine here does not resolve these names: it has no CDI, or has it off", file=sys.stderr)
    if options.json:
        print(json.dumps(reply["names"]))
    elif reply["names"]:
        print_table(["NAME", "CHIPS"], [[name, ranges(chips)] for name, chips in reply["names"].items()], colour=False)
    return 0


def generate(arguments: Sequence[str]) -> int:
    """Print the CDI specification of leases."""
    parser = Parser(
        "cdi generate",
        "Print the CDI specification that gives leases names as devices, for a tool that neurond does not write it\n"
        "for: put it into /etc/cdi or /run/cdi. It is true for as long as the leases are.",
    )
    parser.add_argument("lease", nargs="*", help="these leases only")
    options = parser.parse(arguments)
    with Client(options.host) as client:
        specification = client.call("ListNames")["specification"]
    devices = {device["name"]: device for device in specification["devices"]}
    missing = [lease for lease in options.lease if lease not in devices]
    if missing:
        raise Exit(NO_SUCH, f"no lease {missing[0]!r} that has a name (neurond cdi list)")
    specification["devices"] = [devices[lease] for lease in options.lease or devices]
    print(json.dumps(specification, indent=2))
    return 0
