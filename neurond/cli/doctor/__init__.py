"""doctor: what on this host keeps leases from working or from being kept, with a fix for each.

Each area is a module with functions that take a Host and yield findings. No node of a chip is opened, nothing is
changed, and whoever is asked gets a few seconds. What this user may not look at is said to be unseen, never fine.
"""

import json
from collections.abc import Iterator, Sequence

from neurond.cli.doctor import caller, chips, containers, nodes, others, service, state
from neurond.cli.doctor.host import Finding, Host
from neurond.cli.options import Parser
from neurond.cli.serve import add_config
from neurond.ledger.words import printable

AREAS = (service, chips, nodes, caller, containers, others, state)
WARNINGS, ERRORS = 1, 2


def doctor(arguments: Sequence[str]) -> int:
    """Look at everything, and print a line for each finding."""
    from neurond.cli.doctor.asking import look

    parser = Parser("doctor", "Say what is wrong on this host, with a fix for each. 0 fine, 1 warnings, 2 errors.")
    add_config(parser)
    parser.add_argument("-j", "--json", action="store_true", help="print a list of objects")
    options = parser.parse(arguments)
    findings = list(examine(look(options.config, options.host)))
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        for finding in findings:
            print(printable(line(finding)))
    return verdict(findings)


def examine(host: Host) -> Iterator[Finding]:
    """Yield what all areas find; a file that a check can't read makes that check unseen, and no other."""
    for area in AREAS:
        for check in area.CHECKS:
            try:
                yield from check(host)
            except OSError as error:
                yield Finding(
                    area.AREA, "unseen", f"{check.__name__}: {error.filename}: {error.strerror}", "run as root"
                )


def line(finding: Finding) -> str:
    """Write a finding as one line."""
    seen = "not seen: " if finding.severity == "unseen" else ""
    fix = f"; fix: {finding.fix}" if finding.fix and finding.severity != "fine" else ""
    return f"{finding.severity:7}  {finding.area:6}  {seen}{finding.sentence}{fix}"


def verdict(findings: Sequence[Finding]) -> int:
    """Return the exit code; what is unseen is not fine either."""
    severities = {finding.severity for finding in findings}
    if "error" in severities:
        return ERRORS
    return WARNINGS if severities & {"warning", "unseen"} else 0
