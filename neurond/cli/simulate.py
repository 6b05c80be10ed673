"""simulate: pull and plug chips of a simulated host."""

from collections.abc import Sequence

from neurond.cli.options import Parser
from neurond.client import Client


def simulate(arguments: Sequence[str]) -> int:
    """Pull or plug a chip."""
    parser = Parser("simulate", "Pull (remove) or plug (add) a chip of a simulated host.")
    parser.add_argument("action", choices=("remove", "add"), help="pull or plug")
    parser.add_argument("chip", type=int, help="number of the chip")
    parser.add_argument("--major", type=int, help="plug it under this major number, as after a driver upgrade")
    options = parser.parse(arguments)
    with Client(options.host) as client:
        client.call("Simulate", chip=options.chip, action=options.action, major=options.major)
    return 0
