"""bench: measure how fast leases are given and taken on this machine, beside what people would use instead."""

import os
from collections.abc import Sequence
from pathlib import Path

from neurond.cli import FAILED, Exit
from neurond.cli.options import Parser


def bench(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = Parser(
        "bench",
        "Measure neurond on simulated hosts of its own, beside Redis, etcd, flock and others where they are installed. "
        "The daemon of this host is left alone.",
        host=False,
    )
    parser.add_argument(
        "section", nargs="*", metavar="SECTION", help="ledger, socket, peers, launch, recovery, rest (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="less than 40 s, for a first look; the figures are rough")
    parser.add_argument("-j", "--json", action="store_true", help="print one object instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the figures too")
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")
    parser.add_argument(
        "--docker",
        default=os.environ.get("DOCKER_HOST"),
        metavar="URL",
        help="a Docker Engine on which to start containers (default: $DOCKER_HOST; without one they are left out)",
    )
    parser.add_argument("--image", help="an image of that Engine which has `true` (default: one made of busybox)")
    options = parser.parse(arguments)
    from neurond.bench import load, plot, run, servers

    wrong = [name for name in options.section if name not in run.SECTIONS]
    if wrong:
        parser.error(f"no section {wrong[0]!r}: there are {', '.join(run.SECTIONS)}")
    sections = [name for name in run.SECTIONS if name in options.section or not options.section]
    try:
        report = run.run(
            sections, quick=options.quick, talkative=not options.quiet, engine=options.docker, image=options.image
        )
        if options.plot is not None:
            plot.write(options.plot, report)
    except (load.LoadError, servers.ServerError, OSError) as error:
        raise Exit(FAILED, f"the benchmark failed: {error}") from None
    print(report.as_json() if options.json else report.as_table())
    return 0
