"""A launch that fails says why in the engine's own words, has docker run's exit code, and leaves nothing behind."""

import random
import shlex
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice

import pytest

from tests.containers.support import IMAGE, SOON, STUBBORN, inspect, is_running, launch, ours, wait_until_free
from tests.harness import PATIENCE, Daemon, PrivateEngine, eventually

pytestmark = pytest.mark.docker


def check_nothing_is_left(daemon: Daemon, engine: PrivateEngine) -> None:
    """Check that at this moment no chip is in use, nothing waits, and no container of neurond's is there."""
    assert daemon.all_free()
    assert ours(engine) == set()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("localhost:1/no/image:1 true", 125, "connection refused"),
        ("NOT_AN_IMAGE true", 125, "invalid reference format"),
        ("IMAGE no-such-command", 127, '"no-such-command": executable file not found'),
        ("IMAGE /bin", 126, "permission denied"),
        ("--name 'not a name' IMAGE true", 125, "Invalid container name"),
        ("-v /etc/passwd:/bin IMAGE true", 125, "not a directory"),
        ("-v /etc:/data:sideways IMAGE true", 125, "invalid mode: sideways"),
        ("-v /etc:relative IMAGE true", 125, "mount path must be absolute"),
        ("-w relative IMAGE true", 125, "needs to be an absolute path"),
        ("-u nobody-at-all IMAGE true", 125, "unable to find user nobody-at-all"),
        ("--network no-such-network IMAGE true", 125, "network no-such-network not found"),
        ("--cap-add FLY IMAGE true", 125, "CAP_FLY"),
        ("--ulimit wings=2 IMAGE true", 125, "RLIMIT_WINGS"),
        ("--env-file /no/such/file IMAGE true", 125, "/no/such/file: [Errno 2] No such file or directory"),
    ],
)
def test_failed_launch(shared_daemon: Daemon, engine: PrivateEngine, arguments: str, code: int, words: str) -> None:
    """What the engine refuses gives its own words and docker run's exit code; chips and container are gone at once."""
    given = [IMAGE if argument == "IMAGE" else argument for argument in shlex.split(arguments)]
    done = shared_daemon.cli("container", "run", "-n", "4", *given)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert done.stdout == ""
    check_nothing_is_left(shared_daemon, engine)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--ulimit nofile IMAGE", "--ulimit nofile: the form is NAME=SOFT[:HARD]"),
        ("--ulimit nofile=many IMAGE", "--ulimit nofile=many: the form is NAME=SOFT[:HARD]"),
        ("-e AWS_NEURON_VISIBLE_DEVICES=0 IMAGE", "AWS_NEURON_VISIBLE_DEVICES"),
        ("--label io.neurond.lease=mine IMAGE", "--label io.neurond.lease=mine"),
        ("-e NEURON_RT_VISIBLE_CORES=30 IMAGE", "NEURON_RT_VISIBLE_CORES=30 names cores outside the lease"),
        ("-e NEURON_RT_VISIBLE_CORES=a IMAGE", "is not a core list"),
        ("-e =x IMAGE", "'=x' is no environment variable"),
        ("--core-numbering both IMAGE", "--core-numbering"),
        ("--gpus all IMAGE", "--gpus"),
        ("--device /dev/neuron0 IMAGE", "--device"),
        ("--privileged IMAGE", "--privileged"),
        ("--device-cgroup-rule 'c 4:* rwm' IMAGE", "--device-cgroup-rule"),
        ("--restart sometimes IMAGE", "--restart"),
        ("--runtime neuron IMAGE", "--runtime"),
        ("--rmm IMAGE", "--rmm"),
        ("--volum /a:/b IMAGE", "--volum"),
        ("/dev/neuron1 IMAGE", "/dev/neuron1 stands where the image should"),
        ("", "run which image?"),
        ("--chips 4-7 IMAGE", "not allowed with"),
        ("--no-wait --wait 5 IMAGE", "not allowed with"),
    ],
)
def test_wrong_usage(shared_daemon: Daemon, engine: PrivateEngine, arguments: str, words: str) -> None:
    """What makes no sense, or goes round the ledger, is named and refused with 2; no container was ever made."""
    given = [IMAGE if argument == "IMAGE" else argument for argument in shlex.split(arguments)]
    done = shared_daemon.cli("container", "run", "-n", "1", *given)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert done.stdout == ""
    check_nothing_is_left(shared_daemon, engine)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("IMAGE true", 2, "-n"),
        ("-n 0 IMAGE true", 2, "at least 1"),
        ("-n 3 IMAGE true", 2, "3"),
        ("--chips 16 IMAGE", 66, "16"),
    ],
)
def test_impossible_wish(shared_daemon: Daemon, engine: PrivateEngine, arguments: str, code: int, words: str) -> None:
    """Chips that could never be had are refused before anything is made."""
    given = [IMAGE if argument == "IMAGE" else argument for argument in arguments.split()]
    done = shared_daemon.cli("container", "run", *given)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    check_nothing_is_left(shared_daemon, engine)


@pytest.mark.parametrize("owner", ["neurond", "docker"])
def test_name_that_is_taken(shared_daemon: Daemon, engine: PrivateEngine, owner: str) -> None:
    """A name that another container has gives 125, and leaves that container alone."""
    if owner == "neurond":
        first = launch(shared_daemon, "-n", "1", "--name", "taken", *STUBBORN)
    else:
        options = ["--detach", "--network", "none", "--name", "taken"]
        first = engine.docker("run", *options, *STUBBORN).stdout.strip()
    before = shared_daemon.leases()
    done = shared_daemon.cli("container", "run", "-n", "1", "--name", "taken", *STUBBORN)
    assert done.returncode == 125
    assert 'The container name "/taken" is already in use' in done.stderr
    assert is_running(engine, first)
    assert shared_daemon.leases() == before
    assert ours(engine) <= {first}


def test_two_at_once_of_one_name(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """Of two launches of the same name at the same time, one wins and lives on, the other leaves nothing."""
    for number in range(5):
        name = f"twin{number}"
        twins = [shared_daemon.spawn("container", "run", "-d", "-n", "1", "--name", name, *STUBBORN) for _ in range(2)]
        outputs = [twin.communicate(timeout=30)[0].strip() for twin in twins]
        assert sorted(twin.returncode for twin in twins) == [0, 125]
        (winner,) = filter(None, outputs)
        assert is_running(engine, winner)
        assert [lease["container_id"] for lease in shared_daemon.leases()] == [winner]
        assert ours(engine) == {winner}
        assert shared_daemon.cli("container", "stop", "--time", "0", name).returncode == 0
        engine.docker("rm", "--force", winner)


FAILING: list[tuple[str, set[int]]] = [
    ("container run {one} --pull never no-such:1", {125}),
    ("container run {one} localhost:1/no-such:1", {125}),
    ("container run {one} -v /etc/passwd:/bin {image} true", {125}),
    ("container run {one} --name taken {image} true", {125}),
    ("container run {one} --memory much {image} true", {2}),
    ("container run {one} --privileged {image} true", {2}),
    ("container run {all} {image} no-such-command", {127, 75}),
    ("container run {one} -d {image} no-such-command", {127}),
    ("container run {one} {image} /bin", {126}),
    ("container run {one} -u nobody-at-all {image} true", {125}),
    ("container run {one} --network no-such-network {image} true", {125}),
    ("docker run {one} --pull=never no-such:1", {125}),
    ("docker run {one} -v /etc:relative {image} true", {125}),
    ("docker run {one} --name taken {image} true", {125}),
    ("docker run {one} --no-such-flag=1 {image} true", {125}),
    ("docker run {one} --privileged {image} true", {2}),
    ("docker run {one} --rm {image} no-such-command", {127}),
    ("docker run {one} --rm {image} /bin", {126}),
    ("docker run {all} --rm {image} no-such-command", {127, 75}),
]
"""Launches that fail, and their exit codes; with {all} it may also be that the chips are in use."""
KILLED = [
    (f"{verb} {{one}} --rm {more} {{image}} true", number)
    for verb in ("container run", "docker run --network none")
    for more in ("", "-d")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
]
"""Launches whose command is killed at some moment; what it has started by then ends by itself."""
LAUNCHES = 100
AT_A_TIME = 4


def launched_by_neurond(engine: PrivateEngine, container: str) -> bool:
    """Tell whether neurond made a container itself: then it carries the name that it was given."""
    return bool(inspect(engine, container)["Config"]["Labels"].get("io.neurond.name"))


def test_many_failures(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """Failing over and over, in every way, several at a time, uses nothing up: no chip, no lease, no container."""
    engine.docker("run", "--detach", "--network", "none", "--name", "taken", *STUBBORN)
    words = {"one": "-n 1 --wait 1m", "all": "--all --no-wait", "image": IMAGE}
    env = {"DOCKER_HOST": engine.url, "PATH": engine.programs}
    random_ = random.Random(4)

    def fail(line: str, codes: set[int]) -> None:
        done = shared_daemon.cli(*line.format(**words).split(), env=env)
        assert done.returncode in codes, (line, done.returncode, done.stderr)
        assert done.stderr

    def be_killed(line: str, number: signal.Signals) -> None:
        process = shared_daemon.spawn(*line.format(**words).split(), env=env)
        time.sleep(random_.random() / 2)
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        ways = cycle([*(partial(fail, *way) for way in FAILING), *(partial(be_killed, *way) for way in KILLED)])
        for done in [pool.submit(way) for way in islice(ways, LAUNCHES)]:
            done.result()
    wait_until_free(shared_daemon)
    eventually(lambda: not any(launched_by_neurond(engine, container) for container in ours(engine)), SOON)
    left = ours(engine) - ours(engine, "--filter", "status=created")
    assert not left, "but for what a docker that was killed had not started yet"
    assert shared_daemon.cli("check").stdout == ""
    assert shared_daemon.cli("run", "--all", "--no-wait", "--", "true").returncode == 0


@pytest.mark.parametrize(
    "verb", [("run", "-n", "1", IMAGE, "true"), ("ls",), ("stop", "any"), ("logs", "any")], ids=lambda verb: verb[0]
)
def test_no_engine(make_daemon: Callable[..., Daemon], verb: tuple[str, ...]) -> None:
    """Without an engine, container verbs say where it was looked for, and processes can be leased to as ever."""
    daemon = make_daemon("trn1.32xlarge", "unix:///no/such/engine.sock")
    done = daemon.cli("container", *verb)
    assert done.returncode != 0
    assert "the Docker Engine at unix:///no/such/engine.sock does not answer" in done.stderr
    assert "is it installed and running?" in done.stderr
    assert daemon.all_free()
    assert daemon.cli("run", "--all", "--no-wait", "--", "true").returncode == 0
