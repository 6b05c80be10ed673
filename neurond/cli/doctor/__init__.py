"""doctor: what is wrong with this host, and what to do about each. Needs no daemon and no rights."""

import errno
import json
import os
import pwd
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from neurond.cli.doctor import chips, engine, service
from neurond.cli.doctor.findings import ERROR, FINE, UNSEEN, WARNING, Finding, Host
from neurond.cli.options import Parser
from neurond.client import address
from neurond.ledger.words import printable
from neurond.settings.sources import sources_of
from neurond.settings.table import KEYS

Check = Callable[[Host], Iterable[Finding]]
OF_CHIPS: tuple[Check, ...] = (chips.driver, chips.count, chips.nodes)
OF_HOST: tuple[Check, ...] = (
    service.daemon, service.settings, service.socket_rights, service.membership, service.unit, service.room,
    service.journal, service.clock, engine.docker, engine.hook, engine.others,
)  # fmt: skip
DENIED = os.strerror(errno.EACCES)


def doctor(arguments: Sequence[str]) -> int:
    """Print a line for each finding; 0 if all is fine, 1 with warnings, 2 with errors."""
    parser = Parser("doctor", "Look at this host for what keeps chips from being leased, and say how to mend it.")
    parser.add_argument("-j", "--json", action="store_true", help="print a list of objects")
    options = parser.parse(arguments)
    found = examine(this_host(options.host or address()))
    if options.json:
        print(json.dumps([asdict(finding) for finding in found]))
    else:
        for finding in found:
            fix = f"; to do: {finding.fix}" if finding.fix else ""
            print(f"{finding.severity:8} {finding.area:10} {printable(finding.text + fix)}")
    return exit_code(found)


def this_host(where: str) -> Host:
    """Return this host as the caller sees it, with the daemon at this address."""
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"user {uid}"
    host = Host(Path("/"), _path(where), Path(), user, uid, frozenset({os.getegid(), *os.getgroups()}))
    host = with_settings(host, os.environ)
    return replace(host, docker=_path(host.settings.docker))


def with_settings(host: Host, environment: Mapping[str, str]) -> Host:
    """Return the host with the settings of its files, or rather those in force, if the daemon tells them."""
    read = sources_of(None, {}, environment).read()
    unread = tuple(str(finding) for finding in read.findings if finding.sentence.endswith(DENIED))
    wrong = tuple(str(finding) for finding in read.findings if not finding.sentence.endswith(DENIED))
    host = replace(host, settings=read.settings, files=tuple(read.files), wrong=wrong, unread=unread)
    try:
        rows = [row for row in host.ask("ListSettings")["settings"] if row["key"] in KEYS]
        pending = [f"{row['key']} ({row['next_origin']})" for row in rows if row["next_origin"]]
        in_force = replace(host.settings, **{row["key"]: row["value"] for row in rows})
    except (OSError, ValueError, LookupError, TypeError):
        return host
    return replace(host, settings=in_force, pending=tuple(pending))


def _path(where: str) -> Path:
    return Path(where.removeprefix("unix://").removeprefix("unix:"))


def examine(host: Host) -> list[Finding]:
    """Return all findings. What may not be read is said to be unseen, whichever check it stops."""
    found: list[Finding] = []
    checks = OF_HOST if _simulated(host) else OF_CHIPS + OF_HOST
    if checks is OF_HOST:
        found.append(Finding("chips", FINE, "the daemon's chips are simulated, so the real ones were not looked at"))
    for check in checks:
        try:
            found += check(host)
        except PermissionError as error:
            text = f"not seen: {error.filename}, {host.user} may not read it"
            found.append(Finding(check.__name__, UNSEEN, text, "run as root"))
        except OSError as error:
            text = f"not seen: {error.filename}: {error.strerror}"
            found.append(Finding(check.__name__, UNSEEN, text, "see dmesg for what is wrong with it"))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            text = f"not seen: something there answers what makes no sense ({error!r})"
            found.append(Finding(check.__name__, UNSEEN, text, "see what serves its socket: ss -xlp"))
    return found


def exit_code(found: Iterable[Finding]) -> int:
    """Return 2 with errors, 1 with warnings, else 0."""
    severities = {finding.severity for finding in found}
    return 2 if ERROR in severities else 1 if WARNING in severities else 0


def _simulated(host: Host) -> bool:
    try:
        return bool(host.ask("Describe")["simulated"])
    except (OSError, ValueError, KeyError):
        return False
