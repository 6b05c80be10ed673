"""Ways around the lease: what a container must not be given unless its lease has every chip of the host.

Everything that starts containers passes here before anything is leased: `container run`, `docker run`, task files.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from neurond import wire
from neurond.daemon import labels, views
from neurond.daemon.openable import allows
from neurond.host.cdi import KIND
from neurond.ledger.chips import Chip
from neurond.ledger.cores import BadCoreList, contradiction, parse_cores
from neurond.ledger.errors import InvalidRequest
from neurond.ledger.ledger import Ledger
from neurond.spec import SpecError, device

T = TypeVar("T")

VISIBLE_CORES, NUM_CORES, HOOK = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "AWS_NEURON_VISIBLE_DEVICES"
MOUNTED = re.compile(r"(?:^|,)\"?(?:source|src|volume-opt=device)=([^,\"]*)", re.IGNORECASE)
"""What a --mount takes from the host, whatever its other options are."""
ALL_OR_NOTHING = "lease all chips with it (--all), or leave it out"


def vet(check: wire.ContainerCheck, ledger: Ledger, lnc: int, image_env: Iterable[str] = ()) -> None:
    """Raise InvalidRequest with the name of the first option that would get past the lease."""
    if not check.image:
        raise InvalidRequest("which image? It has no name")
    for field in check.__struct_fields__:
        given = getattr(check, field)
        for text in given if isinstance(given, list) else [given]:
            if isinstance(text, str) and "\0" in text:
                raise InvalidRequest(f"{field}: {text!r} has a NUL in it, which no path and no variable can have")
    if check.gpus:
        raise InvalidRequest(f"--gpus {check.gpus}: these are NVIDIA's; Neuron chips are asked for with -n or --chips")
    for label in check.labels or ():
        if label.startswith(labels.PREFIX):
            raise InvalidRequest(f"--label {label}: labels that begin with {labels.PREFIX} are neurond's own")
    if not check.all:
        _vet_access(check, ledger)
    given = environment_of(check.env or ())
    from_image = {name: value for name, value in environment_of(image_env).items() if name not in given}
    _vet_environment(given, check, ledger, lnc, "")
    _vet_environment(from_image, check, ledger, lnc, f"image {check.image} sets ")


def contradicts(env: Mapping[str, str], ledger: Ledger, chips: Sequence[int], lnc: int) -> str | None:
    """Say why the core list in a container's environment does not fit these chips; None if it does.

    Cores may be named with the numbers that they have on the host, or from 0 on.
    """
    cores = views.cores_of(ledger, chips, lnc)
    value = env.get(VISIBLE_CORES)
    if value is None or not cores:
        return None
    return contradiction(value, cores) if contradiction(value, range(len(cores))) else None


def environment_of(texts: Iterable[str]) -> dict[str, str]:
    """Return NAME=VALUE texts as a mapping; raises InvalidRequest for another form."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise InvalidRequest(f"-e {text}: an environment variable is NAME=VALUE")
        found[name] = value
    return found


def _vet_access(check: wire.ContainerCheck, ledger: Ledger) -> None:
    """Look at what opens device nodes: of all chips, or of chips that were not asked for."""
    chips = ledger.chips.values()
    if check.privileged:
        raise InvalidRequest(f"--privileged opens every chip of this host to the container: {ALL_OR_NOTHING}")
    if check.runtime == "neuron":
        raise InvalidRequest(
            "--runtime neuron is AWS's OCI hook, which maps chips that no lease knows of: leave it out, as neurond "
            "maps the nodes itself"
        )
    for rule in check.cgroup_rules or ():
        if any(allows(rule, (chip.major, chip.minor)) for chip in chips):
            raise InvalidRequest(f"--device-cgroup-rule {rule!r} opens chips beyond the lease: {ALL_OR_NOTHING}")
    asked = set(check.chips or ())
    for text in check.devices or ():
        if text.startswith(f"{KIND}="):
            raise InvalidRequest(f"--device {text} gives the chips of that lease: docker itself takes it, without -n")
        node = _read(device, text).node
        beyond = sorted(chip.index for chip in chips if _reaches(node, chip) and chip.index not in asked)
        if beyond:
            raise InvalidRequest(
                f"--device {text} gives chip {beyond[0]} without a lease: ask for chips with -n, --chips or --device "
                "/dev/neuronN"
            )
    sources = [text.partition(":")[0] for text in check.volumes or () if ":" in text]
    sources += [source for text in check.mounts or () for source in MOUNTED.findall(text)]
    for source in sources:
        if source.startswith("/") and (_holds(source, "/dev/neuron0") or any(_holds(source, c.node) for c in chips)):
            raise InvalidRequest(f"mounting {source} gives the container the nodes of all chips: {ALL_OR_NOTHING}")


def _vet_environment(env: Mapping[str, str], check: wire.ContainerCheck, ledger: Ledger, lnc: int, who: str) -> None:
    """Look at the variables that the Neuron runtime and AWS's OCI hook read."""
    if env.get(HOOK):
        raise InvalidRequest(
            f"{who}{HOOK}={env[HOOK]}: it asks AWS's OCI hook for chips behind neurond's back: ask for them with -n or "
            f"--chips, which maps the nodes themselves{f' (-e {HOOK}= takes it away)' if who else ''}"
        )
    most = _most_cores(check, ledger, lnc)
    if NUM_CORES in env:
        value = env[NUM_CORES]
        if not (value.isascii() and value.isdecimal() and len(value) < 6) or (most is not None and int(value) > most):
            has = "" if most is None else f": the lease will have {most} cores"
            raise InvalidRequest(f"{who}{NUM_CORES}={value}{has}; leave it out, and the runtime takes all of them")
    if VISIBLE_CORES in env:
        value = env[VISIBLE_CORES]
        try:
            cores = parse_cores(value)
        except BadCoreList as error:
            raise InvalidRequest(f"{who}{VISIBLE_CORES}={error}") from None
        if most is not None and len(cores) > most:
            raise InvalidRequest(f"{who}{VISIBLE_CORES}={value} names {len(cores)} cores: the lease will have {most}")
        named = check.chips or (list(ledger.chips) if check.all else [])
        wrong = contradicts(env, ledger, tuple(sorted(set(named) & ledger.chips.keys())), lnc)
        if wrong:
            raise InvalidRequest(f"{who}{wrong}")


def _most_cores(check: wire.ContainerCheck, ledger: Ledger, lnc: int) -> int | None:
    """Return how many logical cores the lease will have, None where that is not known."""
    counts = {chip.cores for chip in ledger.chips.values()}
    cores = counts.pop() if len(counts) == 1 else None
    chips = check.count or len(set(check.chips or ())) or len(ledger.chips)
    return chips * (cores // lnc) if cores else None


def _reaches(path: str, chip: Chip) -> bool:
    """Tell whether a path is the node of a chip under any name, or a directory with it."""
    if _holds(path, chip.node):
        return True
    try:
        number = os.stat(path).st_rdev  # noqa: PTH116 - as everywhere for devices
    except (OSError, ValueError):  # no such path, or none that the kernel could be asked for
        return False
    return number != 0 and (os.major(number), os.minor(number)) == (chip.major, chip.minor)


def _holds(directory: str, path: str) -> bool:
    """Tell whether a path lies in a directory, or is it."""
    real = os.path.realpath(directory)
    return path == real or path.startswith(real.rstrip("/") + "/")


def _read(form: Callable[[str], T], text: str) -> T:
    try:
        return form(text)
    except SpecError as error:
        raise InvalidRequest(str(error)) from None
