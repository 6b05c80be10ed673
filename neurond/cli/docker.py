"""docker run, create, start: lease chips, then become docker with the devices of the lease added.

From then on terminal, signals, detach keys and exit code are docker's own. The lease is bound to this process, and the
daemon hands it over to the container that carries the lease's label.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from neurond.cli import FAILED_BEFORE_START, USAGE, Exit, dockerflags, main
from neurond.cli.chipdevices import Device
from neurond.cli.dockerflags import CommandLine
from neurond.cli.launching import (
    VISIBLE_CORES,
    acquire_with,
    become,
    check_cores,
    check_image,
    environment,
    find_program,
    lease_name,
    leased_cores,
    real_device,
    volume,
)
from neurond.cli.options import Parser, add_chips
from neurond.client import Client
from neurond.ledger.words import ranges

RUN, CREATE, START = "run", "create", "start"
CHECKED_LISTS = {
    "cgroup_rules": "device-cgroup-rule",
    "devices": "device",
    "labels": "label",
    "mounts": "mount",
    "volumes": "volume",
}
ALWAYS = {"always", "unless-stopped"}
CHECKED_TEXTS = {"gpus": "gpus", "restart": "restart", "runtime": "runtime"}
"""What the daemon looks at before it leases, and docker's names for it."""
OWN_LABELS = "io.neurond."
OWN_VARIABLES = {"NEUROND_LEASE", "NEUROND_CHIPS"}


def docker(arguments: Sequence[str]) -> int:
    """Call docker with leased chips."""
    line = dockerflags.read(arguments, dockerflags.global_flags(), "docker")
    if line.image is None:
        print(usage(), file=sys.stdout if line.on("help") else sys.stderr)
        return 0 if line.on("help") else USAGE
    verb, words = [line.image], line.command
    if line.image == "container" and words[:1] and words[0] in {RUN, CREATE, START}:
        verb, words = ["container", words[0]], words[1:]
    name = verb[-1]
    if name == START:
        return become_docker([*line.options, *verb, *words])
    if name in {RUN, CREATE}:
        return launch([*line.options, *verb], name, words)
    raise Exit(USAGE, f"neurond docker has run, create and start; for the rest use docker itself: docker {name} …")


def usage() -> str:
    """Return what there is below `neurond docker`."""
    return (
        "usage: neurond docker [OPTIONS of docker] run|create (-n N | --chips 0,1 | --all) [OPTIONS] IMAGE [CMD ...]\n"
        "       neurond docker [OPTIONS of docker] start CONTAINER...   (its chips are leased again as it starts)"
    )


def launch(program: list[str], verb: str, words: Sequence[str]) -> int:
    """Lease chips for a container, then become docker."""
    line = dockerflags.read(words, dockerflags.run_flags(verb), f"docker {verb}")
    options = read_own(line, verb)
    if line.image is None:
        raise Exit(USAGE, f"docker {verb} which image? neurond docker {verb} -n 1 IMAGE [CMD ...]")
    check_image(line.image)
    check_labels(line)
    variables = given_variables(line)
    passed_on = [*line.options, line.image, *line.command]
    if options.count == 0:
        return become_docker([*program, *passed_on])
    warn_of_permissions(line.devices)
    always = line.last("restart") in ALWAYS
    if always and not all(device.plain for device in line.devices):
        raise Exit(USAGE, cannot_be_named(line, "with a path or permissions of its own a chip"))
    find_program("docker")
    with Client() as client:
        check = to_check(line, options, variables)
        if client.call("CheckContainer", **check)["image_here"] is False and line.last("pull") != "never":
            pull(program[:-1], line)
            client.call("CheckContainer", **check)  # once more, with what the image sets
        name = line.last("name") or base_name(line.image)
        lease = acquire_with(client, options, pid=0, name=lease_name(name), env=True, container=verb)
        if always and not lease.get("cdi"):  # names were to be had when it was checked
            raise Exit(FAILED_BEFORE_START, cannot_be_named(line, "at the moment the lease"))
        own_cores = [value for name, _, value in (text.partition("=") for text in variables) if name == VISIBLE_CORES]
        for wanted in own_cores[-1:]:
            check_cores(wanted, leased_cores(lease["env"]), local=True)
        numbering = "none" if own_cores else options.core_numbering
        return become_docker([*program, *arguments_for(lease, line.devices, numbering), *passed_on])


def cannot_be_named(line: CommandLine, what: str) -> str:
    """Say why a policy is refused by which docker starts a container whoever has its chips by then."""
    return (
        f"--restart {line.last('restart')}: {what} can't be given by name, so docker could not be kept from starting "
        "the container after its chips went to somebody else: use on-failure[:TIMES]"
    )


def pull(program: list[str], line: CommandLine) -> None:
    """Have docker pull the image, while no chip is held. Raises Exit; docker has said why then."""
    import subprocess

    before = program[:-1] if program[-1:] == ["container"] else program  # docker container run: its pull is docker pull
    platform = [f"--platform={line.last('platform')}"] if line.last("platform") else []
    command = [find_program("docker"), *before, "pull", *platform, str(line.image)]
    code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if code:
        raise Exit(FAILED_BEFORE_START)


def read_own(line: CommandLine, verb: str) -> Namespace:
    """Return neurond's own options; the chips of --device count as asked for by --chips. Raises Exit."""
    parser = Parser(
        f"docker {verb}",
        f"Lease chips, then become docker {verb} with their devices added.\nAll flags of docker {verb} are passed on "
        f"(docker {verb} --help); --device /dev/neuronN asks for chip N.",
        usage=f"neurond docker {verb} (-n N | --chips 0,1 | --all) [OPTIONS] [any flag of docker's] IMAGE [CMD ...]",
        add_help=False,
        host=False,
    )
    parser.add_argument("--help", action="help", help="show this help message and exit")
    add_chips(parser, required=False)
    parser.add_argument(
        "--core-numbering",
        choices=("none", "global", "local"),
        default="none",
        help="set NEURON_RT_VISIBLE_CORES with the host's core numbers, or from 0 on (default: leave it unset)",
    )
    words = ["--help"] if line.on("help") else []
    for name, value in line.own.items():
        if name in dockerflags.OWN_BOOLEANS.split():
            words += [f"--{name}"] if is_true(name, value) else []
        else:
            words.append(f"--{name}={value}")
    devices = sorted({device.chip for device in line.devices})
    if devices and not line.own.keys() & {"count", "chips", "all"}:
        words.append("--chips=" + ",".join(map(str, devices)))
    options = parser.parse(words)
    if devices:
        check_agreement(options, line.devices)
    if options.count is None and options.chips is None and not options.all:
        raise Exit(USAGE, f"how many chips? neurond docker {verb} -n N, --chips 0,1 or --all (-n 0 for none) … IMAGE")
    return options


def is_true(name: str, text: str) -> bool:
    """Read a boolean as docker does. Raises Exit."""
    if text not in dockerflags.TRUE | dockerflags.FALSE:
        raise Exit(USAGE, f"--{name}={text}: true or false")
    return text in dockerflags.TRUE


def check_agreement(options: Namespace, devices: Sequence[Device]) -> None:
    """Make the chips of --device the wish. Raises Exit if that wish is not what the other options say."""
    chips = sorted({device.chip for device in devices})
    asked = f"--device asks for the chips {ranges(chips)}"
    if options.all:
        raise Exit(USAGE, f"{asked}, and --all for all of them: give one of both")
    if options.count not in {None, len(chips)}:
        raise Exit(USAGE, f"{asked}, and -n for {options.count} of neurond's choice: give one of both")
    if options.chips is not None and sorted(set(options.chips)) != chips:
        raise Exit(USAGE, f"{asked}, and --chips for {ranges(set(options.chips))}: give one of both")
    insides: dict[str, int] = {}
    for device in devices:
        if insides.setdefault(device.inside, device.chip) != device.chip:
            both = f"{insides[device.inside]} and {device.chip}"
            raise Exit(USAGE, f"--device makes both chips {both} {device.inside} in the container")
    options.count, options.chips = None, chips


def warn_of_permissions(devices: Sequence[Device]) -> None:
    """Say that a container will not be able to use a chip; docker takes it all the same."""
    for device in devices:
        given = set(device.permissions)
        if given and given <= set("rwm") and not given >= set("rw"):
            what = f"--device /dev/neuron{device.chip} has permissions {device.permissions!r}"
            print(f"neurond: {what}: the Neuron runtime needs rw", file=sys.stderr)


def check_labels(line: CommandLine) -> None:
    """Raise Exit for a label by which the daemon would take this container for another one's."""
    labels = list(line.all("label"))
    for path in line.all("label-file"):
        try:
            with open(path, encoding="utf-8-sig") as file:
                labels += [text.strip() for text in file]
        except (OSError, UnicodeDecodeError):  # docker will say so
            continue
    for label in labels:
        if label.startswith(OWN_LABELS):
            raise Exit(USAGE, f"label {label}: the labels {OWN_LABELS}* are neurond's own")


def given_variables(line: CommandLine) -> list[str]:
    """Return NAME=VALUE of all variables that docker will set. Raises Exit for those that are neurond's to set."""
    files = environment((), line.all("env-file"), strict=False)
    given = environment(line.all("env"), (), strict=False)
    for text in given:  # those of files may stay: docker prefers what -e says, and so neurond's
        name = text.partition("=")[0]
        if name in OWN_VARIABLES:
            raise Exit(USAGE, f"-e {name}: that variable is neurond's to set")
    return files + given


def to_check(line: CommandLine, options: Namespace, variables: list[str]) -> dict[str, Any]:
    """Return what the daemon is asked about the container: only what the user gave."""
    found: dict[str, Any] = {"image": line.image, "privileged": line.on("privileged"), "env": variables}
    found |= {"count": options.count, "chips": options.chips, "all": options.all}
    found |= {key: line.all(name) for key, name in CHECKED_LISTS.items()}
    found |= {key: line.last(name) for key, name in CHECKED_TEXTS.items()}
    found["devices"] = [real_device(text) for text in found["devices"]]
    found["volumes"] = [volume(text) for text in found["volumes"]]
    found["mounts"] = [mount(text) for text in found["mounts"]]
    return {key: value for key, value in found.items() if value}


def mount(text: str) -> str:
    """Return a value of --mount with a relative source made absolute, as docker does."""
    parts = [part.partition("=") for part in text.split(",")]
    sources = {"source", "src"}
    return ",".join(
        name + equals + (os.path.abspath(value) if name.lower() in sources and value.startswith(".") else value)
        for name, equals, value in parts
    )


def base_name(image: str) -> str:
    """Return the last part of an image's name, without tag and digest."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[0]


def arguments_for(lease: dict[str, Any], devices: Sequence[Device] = (), numbering: str = "none") -> list[str]:
    """Return the arguments of docker that give a container the chips of a lease: devices, labels, variables.

    `lease` is the daemon's reply with `chips`, `nodes`, `cdi`, `labels` and `env`; `devices` say what the user wants
    the nodes to be inside; `numbering` is that of --core-numbering.
    """
    if lease.get("cdi") and all(device.plain for device in devices):
        added = ["--device", lease["cdi"]]
    else:
        wanted = {(device.chip, device.inside): device.permissions for device in devices}
        wanted = wanted or {(chip, f"/dev/neuron{chip}"): "" for chip in lease["chips"]}
        added = []
        for (chip, inside), permissions in sorted(wanted.items()):
            added += ["--device", f"{lease['nodes'][str(chip)]}:{inside}:{permissions or 'rw'}"]
    for name, value in lease["labels"].items():
        added += ["--label", f"{name}={value}"]
    variables = dict(lease["env"])
    cores = leased_cores(variables)
    variables.pop(VISIBLE_CORES, None)
    if cores and numbering != "none":
        variables[VISIBLE_CORES] = ",".join(map(str, cores if numbering == "global" else range(len(cores))))
    for name, value in variables.items():
        added += ["-e", f"{name}={value}"]
    return added


def become_docker(arguments: Sequence[str]) -> int:
    """Become docker."""
    become(find_program("docker"), ["docker", *arguments], os.environ)


def plugin() -> int:
    """Answer as a plugin of docker's command line, which calls `docker-neurond [OPTIONS of docker] neurond VERB …`.

    `docker neurond run` and `create` are those of `neurond docker`; every other verb is neurond's own.
    """
    if sys.argv[1:2] == ["docker-cli-plugin-metadata"]:
        from neurond import __version__

        print(
            json.dumps(
                {
                    "SchemaVersion": "0.1.0",
                    "Vendor": "neurond",
                    "Version": __version__,
                    "ShortDescription": "Run containers on leased AWS Neuron chips",
                }
            )
        )
        return 0
    try:
        line = dockerflags.read(sys.argv[1:], dockerflags.global_flags(), "docker")
    except Exit as error:
        print(f"neurond: {error}", file=sys.stderr)
        return error.code
    words = line.command if line.image in {"neurond", "help"} else [*filter(None, [line.image]), *line.command]
    if words[:1] == ["neurond"]:  # docker help neurond
        words = words[1:]
    if words[:1] and words[0] in {RUN, CREATE, START}:
        return main(["docker", *line.options, *words])
    return main(words or ["--help"])
