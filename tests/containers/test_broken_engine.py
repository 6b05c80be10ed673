"""An engine that fails on one container, or whose news are broken: all others are followed as ever."""

import pytest

from tests.containers import proxy
from tests.containers.proxy import Breaker, Proxy
from tests.containers.support import IMAGE, SOON, STUBBORN, launch, wait_until_free
from tests.harness import Daemon, PrivateEngine, eventually

pytestmark = pytest.mark.docker

EVENTS = r"^GET /v[\d.]+/events"
LONG = 20.0
"""Seconds that the engine hangs: more than neurond waits for an answer."""


def inspection_of(container: str) -> str:
    """Return the pattern of requests that ask about this container."""
    return rf"^GET /v[\d.]+/containers/{container}/json"


@pytest.mark.parametrize("breaker", [proxy.fails, proxy.hangs(LONG), proxy.hangs_up], ids=["500", "hangs", "hangs up"])
def test_one_that_can_not_be_asked_about(
    proxied: Daemon, between: Proxy, engine: PrivateEngine, breaker: Breaker
) -> None:
    """While one container can't be inspected, its chips stay leased, and the end of another is noticed soon."""
    sick = launch(proxied, "--chips", "0-3", *STUBBORN)
    sound = launch(proxied, "--chips", "4-7", *STUBBORN)
    asked = between.times(inspection_of(sick))
    between.set(inspection_of(sick), breaker)
    eventually(lambda: between.times(inspection_of(sick)) > asked)
    engine.docker("kill", sound)
    eventually(lambda: [row["container_id"] for row in proxied.leases()] == [sick], SOON)
    assert proxied.cli("container", "run", "--chips", "0", "--no-wait", IMAGE, "true").returncode == 75
    engine.docker("kill", sick)
    asked = between.times(inspection_of(sick))
    eventually(lambda: between.times(inspection_of(sick)) > asked)
    assert [row["chips"] for row in proxied.leases()] == [[0, 1, 2, 3]], "not known to have ended"
    between.set(inspection_of(sick), None)
    wait_until_free(proxied, 2 * SOON)


def test_a_start_while_one_hangs(proxied: Daemon, between: Proxy, engine: PrivateEngine) -> None:
    """The daemon starts within 30 s while a container can't be inspected, keeps its chips, and ends those of others."""
    sick = launch(proxied, "--chips", "0-3", *STUBBORN)
    sound = launch(proxied, "--chips", "4-7", *STUBBORN)
    over = launch(proxied, "--chips", "8-11", *STUBBORN)
    proxied.kill()
    engine.docker("kill", over)
    between.set(inspection_of(sick), proxy.hangs(LONG))
    proxied.start()  # within PATIENCE, which is 30 s
    assert {row["container_id"] for row in proxied.leases() if row["state"] == "active"} == {sick, sound}
    between.set(inspection_of(sick), None)


@pytest.mark.parametrize("hanging", ["engine", "container"])
def test_a_stranger_is_remembered_while_it_hangs(
    proxied: Daemon, between: Proxy, engine: PrivateEngine, hanging: str
) -> None:
    """A daemon that starts while the engine can't be asked gives nobody the chip that a stranger's container had."""
    node = proxied.directory / "sim/dev/neuron9"
    options = ["--detach", "--network=none", f"--device={node}:/dev/neuron9"]
    stranger = engine.docker("run", *options, *STUBBORN).stdout.strip()
    eventually(lambda: proxied.states()[9] == "foreign")
    proxied.kill()
    questions = "^GET " if hanging == "engine" else inspection_of(stranger)
    between.set(questions, proxy.hangs(LONG))
    proxied.start()
    assert proxied.states()[9] == "foreign"
    assert proxied.cli("run", "--chips", "9", "--no-wait", "--", "true").returncode == 75
    between.set(questions, None)
    engine.docker("kill", stranger)
    wait_until_free(proxied, 2 * SOON)


def test_a_stranger_is_seen_while_another_hangs(proxied: Daemon, between: Proxy, engine: PrivateEngine) -> None:
    """A stranger's container is seen to have a chip while a container of ours can't be inspected."""
    sick = launch(proxied, "--chips", "0-3", *STUBBORN)
    between.set(inspection_of(sick), proxy.hangs(LONG))
    node = proxied.directory / "sim/dev/neuron9"
    engine.docker("run", "-d", "--network=none", f"--device={node}", *STUBBORN)
    eventually(lambda: proxied.states()[9] == "foreign", 2 * SOON)
    between.set(inspection_of(sick), None)


def test_a_container_that_is_not_removed(proxied: Daemon, between: Proxy, engine: PrivateEngine) -> None:
    """While the engine hangs on the removal of one that was launched with --rm, the ends of others are noticed."""
    launch(proxied, "--rm", "--name", "sick", "--chips", "0-3", *STUBBORN)
    sound = launch(proxied, "--chips", "4-7", *STUBBORN)
    between.set("^DELETE ", proxy.hangs(120))
    engine.docker("kill", "sick")
    eventually(lambda: between.times("^DELETE "))
    engine.docker("kill", sound)
    wait_until_free(proxied)
    proxied.kill()
    proxied.start()
    assert proxied.all_free()


EVENT = b'{"status":"die","id":"0123","Type":"container","Action":"die"}\n'


def break_news(between: Proxy, breaker: Breaker) -> None:
    """Have the event stream broken from now on."""
    eventually(lambda: between.times(EVENTS))
    asked = between.times(EVENTS)
    between.set(EVENTS, breaker)
    between.cut()
    eventually(lambda: between.times(EVENTS) > asked)


@pytest.mark.parametrize(
    "breaker",
    [
        proxy.streams(EVENT, EVENT[:20]),
        proxy.streams(*[EVENT] * 1000),
        proxy.streams(b"<html>this is no JSON</html>\n"),
        proxy.streams(b"\xff\xfe\x00 [1, 2\n", b'"a string"\n', b"null\n", b"7\n"),
        proxy.streams(),
        proxy.hangs_up,
        proxy.fails,
        proxy.hangs(3600),
    ],
    ids=[
        "cut in a message",
        "a thousand times the same",
        "no JSON",
        "other JSON",
        "ends at once",
        "hangs up",
        "500",
        "silent",
    ],
)
def test_news_that_are_broken(proxied: Daemon, between: Proxy, engine: PrivateEngine, breaker: Breaker) -> None:
    """Whatever becomes of the engine's event stream, again and again, the ends of containers are noticed."""
    break_news(between, breaker)
    for _ in range(2):
        container = launch(proxied, "-n", "4", *STUBBORN)
        engine.docker("kill", container)
        wait_until_free(proxied)
    assert proxied.process is not None
    assert proxied.process.poll() is None


def test_the_news_are_heard_again(proxied: Daemon, between: Proxy, engine: PrivateEngine) -> None:
    """When the event stream works again after many failures, the end of a container is noticed by it, and at once."""
    break_news(between, proxy.streams(EVENT[:20]))
    eventually(lambda: between.times(EVENTS) >= 4)
    between.set(EVENTS, None)
    asked = between.times(EVENTS)
    eventually(lambda: between.times(EVENTS) > asked)
    for _ in range(3):
        container = launch(proxied, "-n", "4", *STUBBORN)
        engine.docker("kill", container)
        wait_until_free(proxied, 4.0)  # less than the daemon takes to look of its own accord
