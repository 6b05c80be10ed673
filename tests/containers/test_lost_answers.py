"""An engine whose answers are lost, late or wrong: what it did is not done twice, and nothing of it is left."""

import signal
import socket
from collections.abc import Callable

import pytest

from tests.containers import proxy
from tests.containers.proxy import Breaker, Proxy
from tests.containers.support import IMAGE, SOON, STUBBORN, held, inspect, is_running, launch, ours, wait_until_free
from tests.harness import PATIENCE, Daemon, PrivateEngine, eventually

pytestmark = pytest.mark.docker

CREATE, START = r"^POST /v[\d.]+/containers/create", r"^POST /v[\d.]+/containers/\w+/start"
REMOVE, PULL = r"^DELETE /v[\d.]+/containers/", r"^POST /v[\d.]+/images/create"


@pytest.mark.parametrize("late", [0.0, 1.5], ids=["at once", "late"])
def test_create_whose_answer_is_lost(proxied: Daemon, between: Proxy, engine: PrivateEngine, late: float) -> None:
    """A launch whose create is not answered has failed: its container never starts, goes, and is made only once."""
    between.lose(CREATE, late)
    done = proxied.cli("container", "run", "-d", "--all", "--name", "job", *STUBBORN)
    assert done.returncode == 125
    assert "does not answer" in done.stderr
    assert proxied.all_free()
    other = proxied.spawn("run", "--all", "--no-wait", "--", "sleep", "600")
    (lease,) = eventually(proxied.leases)
    if late:
        (made,) = eventually(lambda: ours(engine))
        assert made not in engine.docker("ps", "--quiet", "--no-trunc").stdout  # it may have been removed by now
    eventually(lambda: not ours(engine), SOON)
    assert between.times(CREATE) == 1
    assert [row["lease"] for row in proxied.leases()] == [lease["lease"]]
    other.kill()
    other.communicate()
    between.lose(CREATE, None)
    launch(proxied, "--all", *STUBBORN)  # not of that name: docker frees one a moment after its container is gone


def test_start_whose_answer_is_lost(proxied: Daemon, between: Proxy, engine: PrivateEngine) -> None:
    """A container that was started without an answer is removed, and its chips are free when that is said."""
    between.lose(START)
    done = proxied.cli("container", "run", "-d", "--all", *STUBBORN)
    assert done.returncode == 125
    assert proxied.all_free()
    assert not ours(engine)
    assert between.times(START) == 1


def test_start_whose_answer_is_lost_and_that_can_not_be_undone(
    proxied: Daemon, between: Proxy, engine: PrivateEngine
) -> None:
    """A container that may run, and can't be removed, keeps its chips as long as it does run."""
    between.lose(START)
    between.set(REMOVE, proxy.fails)
    done = proxied.cli("container", "run", "-d", "--chips", "4-7", *STUBBORN)
    assert done.returncode == 125
    (container,) = ours(engine)
    assert is_running(engine, container)
    for _ in range(3):
        assert proxied.cli("check").stdout == ""
        assert [(row["container_id"], row["chips"]) for row in proxied.leases()] == [(container, [4, 5, 6, 7])]
    assert proxied.cli("run", "--chips", "4", "--no-wait", "--", "true").returncode == 75
    engine.docker("kill", container)
    wait_until_free(proxied)


@pytest.mark.parametrize("request_", [CREATE, START], ids=["create", "start"])
@pytest.mark.parametrize("breaker", [proxy.fails, proxy.hangs_up], ids=["500", "hangs up"])
def test_launch_that_the_engine_fails(
    proxied: Daemon, between: Proxy, engine: PrivateEngine, request_: str, breaker: Breaker
) -> None:
    """An engine that fails at the creation or the start leaves no container and no chip in use, however often."""
    between.set(request_, breaker)
    for _ in range(3):
        assert proxied.cli("container", "run", "--all", "--no-wait", IMAGE, "true").returncode == 125
        assert proxied.all_free()
        assert not ours(engine)
    between.set(request_, None)
    assert proxied.cli("container", "run", "--all", "--no-wait", IMAGE, "true").returncode == 0


@pytest.mark.parametrize("end", ["client", "daemon"])
def test_a_pull_holds_no_chip(proxied: Daemon, between: Proxy, engine: PrivateEngine, end: str) -> None:
    """While an image is pulled all chips can be had, and who goes away meanwhile leaves nothing."""
    between.set(PULL, proxy.hangs(20))
    pulling = proxied.spawn("container", "run", "--all", "localhost:1/large:1", "true")
    eventually(lambda: between.times(PULL))
    assert proxied.all_free()
    assert proxied.cli("run", "--all", "--no-wait", "--", "true").returncode == 0
    if end == "client":
        pulling.send_signal(signal.SIGINT)
    else:
        assert proxied.stop() == 0
    pulling.communicate(timeout=PATIENCE)
    assert pulling.returncode == (130 if end == "client" else 69)
    if end == "daemon":
        proxied.start()
    assert proxied.all_free()
    assert not proxied.logged("lease.granted")[1:]
    assert not ours(engine)


@pytest.mark.parametrize("status", ["404 Not Found", "409 Conflict"])
def test_removal_that_somebody_else_is_at(proxied: Daemon, between: Proxy, status: str) -> None:
    """A container that is gone, or being removed, is as good as removed: its exit code counts, its chips are free."""

    def says(client: socket.socket) -> bool:
        body = b'{"message": "removal of container is already in progress"}'
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        return True

    between.set(REMOVE, says)
    done = proxied.cli("container", "run", "--rm", "--all", IMAGE, "sh", "-c", "exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    wait_until_free(proxied)
    assert not proxied.logged("container.not_removed")
    between.set(REMOVE, None)


def test_no_exit_code_is_lost(proxied: Daemon, engine: PrivateEngine) -> None:
    """With --rm, too, each exit code arrives, and each lease ends once."""
    for code in (7, 0, 7, 1, 255):
        done = proxied.cli("container", "run", "--rm", "-n", "4", IMAGE, "sh", "-c", f"exit {code}")
        assert (done.returncode, done.stderr) == (code, "")
    wait_until_free(proxied)
    ended = [line["lease"] for line in proxied.logged("lease.ended")]
    assert len(ended) == len(set(ended)) == 5
    assert not ours(engine)


def test_chips_of_a_container_that_is_stopped_are_not_given_before_its_end(
    make_daemon: Callable[..., Daemon], engine: PrivateEngine
) -> None:
    """While a container takes its time to stop, nobody gets its chip; who waits gets it when it has ended."""
    daemon = make_daemon("trn1.2xlarge", engine.url)
    container = launch(daemon, "--all", *STUBBORN)
    stopping = daemon.spawn("container", "stop", "--time", "2", container)
    waiting = daemon.spawn("run", "-n", "1", "--", "echo", "served")
    while is_running(engine, container):
        assert held(daemon) == {0}
        refused = daemon.cli("run", "-n", "1", "--no-wait", "--", "true")
        assert refused.returncode == 75 or not is_running(engine, container)
        assert waiting.poll() is None or not is_running(engine, container)
    assert waiting.communicate(timeout=SOON)[0] == "served\n"
    stopping.communicate(timeout=SOON)
    assert inspect(engine, container)["State"]["ExitCode"] == 137
    engine.docker("rm", container)
