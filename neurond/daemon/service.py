"""The daemon from its start to its stop.

The order of the start is a promise: lock, watch udev, enumerate, replay the journal, compare, listen, READY. Nothing is
granted before that. Stopping ends no lease.
"""

import asyncio
import gc
import grp
import os
import resource
import signal
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvloop

from neurond import catalog
from neurond.daemon import views
from neurond.daemon.about import About
from neurond.daemon.broker import Broker, Rules
from neurond.daemon.checking import Checking
from neurond.daemon.containers import Containers
from neurond.daemon.discovery import Discovery, Source
from neurond.daemon.fence import Fence
from neurond.daemon.launching import Launching
from neurond.daemon.logs import configure_logs
from neurond.daemon.managing import Managing
from neurond.daemon.points import reach
from neurond.daemon.recovery import recover
from neurond.daemon.requests import Requests
from neurond.daemon.server import Server, most_connections
from neurond.daemon.tasks import Tasks
from neurond.host import processes, systemd
from neurond.host.cdi import CdiFile
from neurond.host.docker import Engine
from neurond.host.journal import Journal
from neurond.host.rundir import BACKLOG, AlreadyRunning, RunDir
from neurond.host.simulated import Model, SimulatedHost
from neurond.host.sysfs import Sysfs
from neurond.ledger.ledger import Ledger

log = structlog.get_logger()

GARBAGE = 10_000
"""How many new objects have the collector of cycles look at the young ones."""
GROUP, ENGINE_GROUP = "neuron", "docker"


@dataclass(frozen=True, slots=True)
class Options:
    """How `neurond serve` was called."""

    runtime_dir: Path
    simulate: str | None
    engine_url: str
    cdi_dir: Path | None
    stop_conflicts: bool
    log_level: str
    log_json: bool | None


class CannotStart(Exception):
    """A sentence that says why the daemon can't start."""


def serve(options: Options) -> int:
    """Run the daemon until SIGTERM or SIGINT; return the exit code of the process."""
    configure_logs(options.log_level, json=options.log_json)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(options))
    except (AlreadyRunning, CannotStart) as error:
        sentence = str(error)
    except OSError as error:
        sentence = f"cannot start in {options.runtime_dir}: {error.strerror or error}"
        if error.filename and str(error.filename) != str(options.runtime_dir):
            sentence += f" ({error.filename})"
    else:
        return 0
    print(f"neurond: {sentence}", file=sys.stderr)  # noqa: T201 - the last word of a command
    return 1


async def _serve(options: Options) -> None:
    with ExitStack() as undo:
        await _run(options, undo)


async def _run(options: Options, undo: ExitStack) -> None:
    stop = _stop_event()
    most = most_connections(_raise_fd_limit())
    _check_start(options)
    rundir = RunDir(options.runtime_dir)
    simulated = _simulated(rundir.path, options.simulate) if options.simulate else None
    discovery = _discovery(simulated)
    chips, _ = discovery.look()
    ledger = Ledger(discovery.kind.topology, discovery.kind.name, processes.boottime)
    journal = Journal(rundir.path, processes.boot_id())
    undo.callback(journal.close)
    engine, home = Engine(options.engine_url), str(rundir.path.resolve())
    recovered = recover(ledger, journal, engine, home, chips)
    rules = Rules(
        lnc=views.lnc_of(discovery.kind, discovery.sysfs.logical_cores()),
        gid=_gid(GROUP),
        engine_gid=_gid(ENGINE_GROUP),
        uid=os.geteuid(),
        note=lambda: discovery.note(ledger.chips),
    )
    broker = Broker(ledger, journal, rules, recovered.seq)
    fence = Fence(ledger, CdiFile(options.cdi_dir, _file_name(home)) if options.cdi_dir else None)
    broker.before_replies = fence.update
    await broker.start(recovered.events)
    containers = Containers(broker, engine, fence, home, stop_conflicts=options.stop_conflicts)
    await containers.try_to_look()
    await broker.known()
    requests = Requests(broker, home, fence)
    launching = Launching(broker, requests, containers, fence)
    managing = Managing(broker, requests, containers, launching)
    checking = Checking(broker, containers, discovery)
    tasks = Tasks(requests, containers, launching)
    answering = (requests, launching, tasks, managing, checking, fence, About(broker, simulated, engine))
    server = Server(answering, broker.begin, broker.commit, most)
    broker.server = server
    server.on_disconnect += [broker.disconnected, managing.disconnected]

    listening = await _listen(server, rundir, rules, undo)
    running = [
        asyncio.create_task(discovery.follow(broker.take_chips)),
        asyncio.create_task(broker.usage.follow()),
        asyncio.create_task(containers.follow()),
        asyncio.create_task(_pet_watchdog()),
    ]
    reach("start.listening")
    _say_ready(rundir, ledger, discovery.note(ledger.chips))
    try:
        await _until(stop, running)
    finally:
        systemd.notify("STOPPING=1")
        listening.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for connection in list(server.connections):
            connection.abort()
        await asyncio.sleep(0)  # the connections take note
        broker.commit()
        if not ledger.leases:
            broker.access.give_back()
            if simulated is not None:
                simulated.remove_all()
        log.info("neurond.stopped", leases=len(ledger.leases))


def _check_start(options: Options) -> None:
    """Raise CannotStart for what can be seen to be wrong before anything is touched."""
    if options.simulate and not catalog.look_up(options.simulate).known:
        raise CannotStart(f"--simulate {options.simulate}: choose one of {', '.join(catalog.names())}")
    if os.geteuid() == 0 and not processes.can_look_into_all():
        blind = "neurond is root but can't look into the processes of others, so it can't tell whether they use chips"
        if not options.simulate:
            raise CannotStart(f"{blind}: it takes CAP_SYS_PTRACE")
        log.warning("neurond.blind", note=blind, follows="going on, as the chips are simulated")


async def _listen(server: Server, rundir: RunDir, rules: Rules, undo: ExitStack) -> asyncio.Server:
    """Take the socket that systemd hands over, or make one."""
    listener = systemd.activated_socket()
    inode = None
    if listener is None:
        listener = rundir.bind(rules.gid)
        inode = rundir.socket.lstat().st_ino
    undo.callback(rundir.release, inode)
    _collect_seldom()
    return await asyncio.get_running_loop().create_unix_server(server.connection, sock=listener, backlog=BACKLOG)


def _say_ready(rundir: RunDir, ledger: Ledger, note: str | None) -> None:
    log.info(
        "neurond.ready",
        pid=os.getpid(),
        socket=str(rundir.socket),
        instance_type=ledger.instance_type,
        chips=len(ledger.chips),
        leases=len(ledger.leases),
        **({"note": note} if note else {}),
    )
    systemd.notify("READY=1")


async def _until(stop: asyncio.Event, tasks: list["asyncio.Task[None]"]) -> None:
    """Wait for the stop, or for the failure of a task that should run for ever."""
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        if task is not stopping:
            task.result()
    stopping.cancel()


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # a terminal that closes is no reason to stop
    return stop


def _raise_fd_limit() -> int:
    """Allow as many descriptors as the hard limit does; return how many: each client and followed process takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _simulated(runtime_dir: Path, name: str) -> SimulatedHost:
    kind = catalog.look_up(name)
    model = Model(kind.name, kind.chips, kind.cores, kind.chip, kind.connected)
    return SimulatedHost(runtime_dir / "sim", model)


def _discovery(simulated: SimulatedHost | None) -> Discovery:
    source: Source
    if simulated is not None:
        source, sysfs = simulated, Sysfs(simulated.sys, simulated.dev, stand_ins=not simulated.real_nodes)
    else:
        from neurond.host.udev import Udev  # noqa: PLC0415 - a simulated host needs no libudev

        source, sysfs = Udev(), Sysfs()
    return Discovery(source, sysfs, catalog.look_up(sysfs.product_name()))


def _file_name(home: str) -> str:
    """Return a name for a file beside those of other daemons, made of the runtime directory."""
    return "neurond" if home == "/run/neurond" else "neurond-" + home.strip("/").replace("/", "-")


def _gid(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def _collect_seldom() -> None:
    """Tell the collector of cycles that what is there now stays; what a call makes is no cycle."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE, 20, 20)


async def _pet_watchdog() -> None:
    """Tell systemd that the loop turns, three times as often as it wants to know."""
    period = systemd.watchdog_period()
    while True:
        await asyncio.sleep(period / 3 if period else 3600)
        systemd.notify("WATCHDOG=1")
