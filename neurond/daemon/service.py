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
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
import uvloop

from neurond import catalog
from neurond.daemon import views
from neurond.daemon.about import About
from neurond.daemon.broker import Broker, Rules
from neurond.daemon.checking import Checking
from neurond.daemon.configuring import Configuring
from neurond.daemon.containers import Containers
from neurond.daemon.discovery import Discovery, Source
from neurond.daemon.fence import Fence
from neurond.daemon.launching import Launching
from neurond.daemon.logs import configure_logs
from neurond.daemon.managing import Managing
from neurond.daemon.points import reach
from neurond.daemon.recovery import recover
from neurond.daemon.requests import Requests
from neurond.daemon.server import Server
from neurond.daemon.tasks import Tasks
from neurond.host import processes, systemd
from neurond.host.cdi import CdiFile
from neurond.host.docker import Engine
from neurond.host.journal import Journal
from neurond.host.rundir import BACKLOG, AlreadyRunning, RunDir
from neurond.host.simulated import Model, SimulatedHost
from neurond.host.sysfs import Sysfs
from neurond.ledger.ledger import Ledger
from neurond.settings.sources import Read, Sources
from neurond.settings.table import Settings, cdi_name

log = structlog.get_logger()

GARBAGE = 10_000
"""How many new objects have the collector of cycles look at the young ones."""


class CannotStart(Exception):
    """A sentence that says why the daemon can't start."""


def serve(sources: Sources, read: Read) -> int:
    """Run the daemon until SIGTERM or SIGINT; return the exit code of the process.

    `read` is what the sources hold now, without findings.
    """
    settings = read.settings
    configure_logs(settings.log_level, settings.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(sources, read))
    except (AlreadyRunning, CannotStart) as error:
        sentence = str(error)
    except OSError as error:
        sentence = f"cannot start in {settings.runtime_dir}: {error.strerror or error}"
        if error.filename and str(error.filename) != settings.runtime_dir:
            sentence += f" ({error.filename})"
    else:
        return 0
    print(f"neurond: {sentence}", file=sys.stderr)  # noqa: T201 - the last word of a command
    return 1


async def _serve(sources: Sources, read: Read) -> None:
    _check_start(read.settings)
    with ExitStack() as undo:
        await _run(sources, read, undo)


async def _run(sources: Sources, read: Read, undo: ExitStack) -> None:
    settings = read.settings
    stop, reload = _signals()
    files = _raise_fd_limit()
    rundir = RunDir(Path(settings.runtime_dir))
    simulated = _simulated(rundir.path, settings.simulate) if settings.simulate else None
    discovery = _discovery(simulated)
    chips, _ = discovery.look()
    ledger = Ledger(discovery.kind.topology, discovery.kind.name, processes.boottime)
    journal = Journal(rundir.path, processes.boot_id())
    undo.callback(journal.close)
    engine, home = Engine(settings.docker), str(rundir.path.resolve())
    recovered = recover(ledger, journal, engine, home, chips)
    rules = Rules(
        lnc=views.lnc_of(discovery.kind, discovery.sysfs.logical_cores()),
        gid=_gid(settings.group),
        engine_gid=_gid(settings.container_group),
        uid=os.geteuid(),
        note=lambda: discovery.note(ledger.chips),
        settings=settings,
    )
    broker = Broker(ledger, journal, rules, recovered.seq)
    fence = Fence(ledger, CdiFile(Path(settings.cdi_dir), cdi_name(home)) if settings.cdi_dir else None)
    broker.before_replies = fence.update
    await broker.start(recovered.events)
    containers = Containers(broker, engine, fence, home)
    await containers.try_to_look()
    await broker.known()
    requests = Requests(broker, home, fence)
    launching = Launching(broker, requests, containers, fence)
    managing = Managing(broker, requests, containers, launching)
    checking = Checking(broker, containers, discovery)
    tasks = Tasks(requests, containers, launching)
    configuring = Configuring(sources, read, os.getpid())
    answering = (requests, launching, tasks, managing, checking, fence, About(broker, simulated, engine), configuring)
    server = Server(answering, broker.begin, broker.commit, files)
    broker.server = server
    server.on_disconnect += [broker.disconnected, managing.disconnected]

    listening = await _listen(server, rundir, rules.gid, undo)
    configuring.apply = partial(_apply, broker, containers, server, rundir)
    configuring.apply(settings)
    running = [
        asyncio.create_task(discovery.follow(broker.take_chips)),
        asyncio.create_task(broker.usage.follow()),
        asyncio.create_task(containers.follow()),
        asyncio.create_task(_pet_watchdog()),
        asyncio.create_task(_reload_whenever(reload, configuring)),
    ]
    reach("start.listening")
    _say_ready(rundir, ledger, discovery.note(ledger.chips))
    try:
        await _until(stop, running)
    finally:
        systemd.notify("STOPPING=1")
        listening.close()
        await _end(running, server)
        broker.commit()
        if not ledger.leases:
            broker.access.give_back()
            if simulated is not None:
                simulated.remove_all()
        log.info("neurond.stopped", leases=len(ledger.leases))


async def _end(running: list["asyncio.Task[None]"], server: Server) -> None:
    """End our tasks and all connections."""
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for connection in list(server.connections):
        connection.abort()
    await asyncio.sleep(0)  # the connections take note


def _apply(broker: Broker, containers: Containers, server: Server, rundir: RunDir, settings: Settings) -> None:
    """Put settings in force, as far as that is possible while we run."""
    configure_logs(settings.log_level, settings.log_format)
    gid, engine_gid = _gid(settings.group), _gid(settings.container_group)
    broker.rules = replace(broker.rules, gid=gid, engine_gid=engine_gid, settings=settings)
    server.limit(settings)
    if gid is None:
        log.warning("config.no_group", group=settings.group, follows="only root may lease chips")
    else:
        try:
            rundir.open_to(gid)
        except OSError as error:
            log.warning("config.socket_kept", error=str(error), follows="the socket keeps the group that it has")
    broker.usage.soon()  # from which on the new periods count
    containers.look_soon()


def _check_start(settings: Settings) -> None:
    """Raise CannotStart for what can be seen to be wrong before anything is touched."""
    if os.geteuid() == 0 and not processes.can_look_into_all():
        blind = "neurond is root but can't look into the processes of others, so it can't tell whether they use chips"
        if not settings.simulate:
            raise CannotStart(f"{blind}: it takes CAP_SYS_PTRACE")
        log.warning("neurond.blind", note=blind, follows="going on, as the chips are simulated")


async def _listen(server: Server, rundir: RunDir, gid: int | None, undo: ExitStack) -> asyncio.Server:
    """Take the socket that systemd hands over, or make one."""
    listener = systemd.activated_socket()
    inode = None
    if listener is None:
        listener = rundir.bind(gid)
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


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return the events of the signals that ask for the end, and for the settings to be read again."""
    stop, reload = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)  # also when a terminal closes, which is no reason to stop
    return stop, reload


async def _reload_whenever(asked: asyncio.Event, configuring: Configuring) -> None:
    """Read the settings again whenever that is asked for; many times at once are one."""
    while True:
        await asked.wait()
        asked.clear()
        configuring.reload()


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
