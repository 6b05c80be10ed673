"""neurond doctor, on made-up hosts: directories for /, and real sockets for the daemon and the Engine."""

import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neurond import __version__
from neurond.cli.doctor import examine, exit_code, service, with_settings
from neurond.cli.doctor.findings import Finding, Host
from neurond.host import journal
from neurond.settings.table import Settings
from tests.harness import Daemon

BOOT = "11111111-2222-3333-4444-555555555555"
RULE = 'SUBSYSTEM=="neuron_device", KERNEL=="neuron[0-9]*", GROUP:="neuron", MODE:="0660"\n'
STOCK = 'KERNEL=="neuron*", MODE="0666"\n'


class World:
    """A host that is as it should be, until a test changes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.about: dict[str, Any] = {"version": __version__, "simulated": False, "journal_problem": None}
        self.answers: dict[str, Any] = {
            "/info": {"ServerVersion": "28.0.1", "CDISpecDirs": ["/etc/cdi", "/run/cdi"], "Runtimes": {"runc": {}}},
            "/containers/json": [{"Id": "c1"}],
            "/containers/c1/json": {"Name": "/trainer", "HostConfig": {"Privileged": False}},
        }
        for path, text in {
            "sys/module/neuron/version": "2.30.2.0\n",
            "sys/class/dmi/id/product_name": "inf1.6xlarge\n",
            "etc/group": "root:x:0:\nneuron:x:4242:ann\n",
            "etc/udev/rules.d/99-neurond.rules": RULE,
            "usr/lib/udev/rules.d/neuron-udev.rules": STOCK,
            "etc/systemd/system/multi-user.target.wants/neurond.service": "",
            "run/systemd/system/x": "",
            "run/systemd/timesync/synchronized": "",
            "run/cdi/neurond.json": "{}",
            "proc/1/comm": "systemd\n",
            "proc/sys/kernel/random/boot_id": BOOT + "\n",
        }.items():
            self.write(path, text)
        for index in range(4):
            self.write(f"sys/class/neuron_device/neuron{index}/dev", f"239:{index}\n")
            self.write(f"dev/neuron{index}", "").chmod(0o660)
        self.host = Host(root, root / "run/neurond.sock", root / "run/docker.sock", "ann", 1000, frozenset({4242}))
        journal.Journal(root / "run", BOOT).start(0, [])

    def write(self, path: str, text: str) -> Path:
        """Write a file of the host."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def remove(self, path: str) -> "World":
        """Remove a file of the host."""
        (self.root / path).unlink()
        return self

    def drop(self, *indexes: int) -> "World":
        """Take chips away from the kernel."""
        for index in indexes:
            self.remove(f"sys/class/neuron_device/neuron{index}/dev")
            (self.root / f"sys/class/neuron_device/neuron{index}").rmdir()
        return self

    def rename(self, old: str, new: str) -> None:
        """Rename something on the host."""
        (self.root / old).rename(self.root / new)

    def nodes(self, mode: int) -> "World":
        """Give all nodes a mode."""
        for node in (self.root / "dev").iterdir():
            node.chmod(mode)
        return self

    def become(self, **changes: Any) -> "World":
        """Ask as somebody else, or where something else is set."""
        self.host = replace(self.host, **changes)
        return self

    def look(self) -> list[Finding]:
        """Run the checks, with a daemon and an Engine that answer."""
        with self.serving():
            return examine(self.host)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Play the daemon and the Engine."""
        world = self

        class Neurond(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.request.recv(4096)
                self.wfile.write(json.dumps({"parameters": world.about}).encode() + b"\0")

        class Docker(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                path = self.rfile.readline().split()[1].decode()
                body = json.dumps(world.answers.get(path, {"message": "no such thing"})).encode()
                status = b"200 OK" if path in world.answers else b"404 Not Found"
                self.wfile.write(b"HTTP/1.0 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)

        servers = [
            socketserver.UnixStreamServer(str(path), handler)
            for path, handler in ((self.host.daemon, Neurond), (self.host.docker, Docker))
        ]
        self.host.daemon.chmod(0o660)
        if os.geteuid() == 0:
            os.chown(self.host.daemon, -1, 4242)
        threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for server, thread in zip(servers, threads, strict=True):
                server.shutdown()
                thread.join()
                server.server_close()
                Path(str(server.server_address)).unlink(missing_ok=True)


@pytest.fixture
def world(run_dir: Path) -> World:
    """Give a good host."""
    return World(run_dir)


Change = Callable[[World], object]
CASES: dict[str, tuple[Change, str, str, str]] = {
    "driver not loaded": (lambda w: w.remove("sys/module/neuron/version"), "driver", "error", "not loaded"),
    "too few chips": (
        lambda w: w.drop(3),
        "chips", "error", "3 chips (0-2), an inf1.6xlarge should have 4",
    ),
    "a hole": (
        lambda w: w.drop(1),
        "chips", "warning", "holes: no chip 1",
    ),
    "unknown type": (lambda w: w.write("sys/class/dmi/id/product_name", "trn9.large"), "chips", "warning", "not known"),
    "no type at all": (
        lambda w: w.drop(0, 1, 2, 3).write("sys/class/dmi/id/product_name", "KVM"),
        "chips", "error", "no chips, and KVM is no instance type",
    ),
    "no node": (lambda w: w.remove("dev/neuron2"), "nodes", "error", "chip 2 has no node"),
    "advisory": (
        lambda w: w.remove("etc/udev/rules.d/99-neurond.rules").nodes(0o666),
        "nodes", "warning", "MODE 0666 (/usr/lib/udev/rules.d/neuron-udev.rules:1)",
    ),
    "rule not applied": (lambda w: w.nodes(0o666), "nodes", "warning", "the rule that wins says 0660 (/etc/udev"),
    "not final": (
        lambda w: w.write("etc/udev/rules.d/99-neurond.rules", RULE.replace(":=", "=")),
        "nodes", "warning", "the rule that wins says 0666 (/usr/lib",
    ),
    "other version": (lambda w: w.about.update(version="0.0.0"), "daemon", "warning", "the daemon has version 0.0.0"),
    "journal full": (lambda w: w.about.update(journal_problem="disk full"), "daemon", "error", "granted: disk full"),
    "no group": (lambda w: w.write("etc/group", "root:x:0:\n"), "group", "warning", "no group neuron"),
    "must log in": (lambda w: w.become(gids=frozenset({1})), "group", "warning", "session began before"),
    "no member": (lambda w: w.become(user="bob", gids=frozenset({1})), "group", "warning", "bob is not in group"),
    "unit off": (
        lambda w: w.remove("etc/systemd/system/multi-user.target.wants/neurond.service"),
        "unit", "warning", "not enabled",
    ),
    "kept aside": (lambda w: w.write("run/journal.20260101T000000.1", ""), "journal", "warning", "was kept aside"),
    "no journal of ours": (lambda w: w.write("run/journal", "hello"), "journal", "error", "is not neurond's"),
    "newer journal": (
        lambda w: w.write("run/journal", '00000000 {"journal":99,"boot":"x"}\n'), "journal", "error", "format 99",
    ),
    "other boot": (lambda w: journal.Journal(w.root / "run", "x").start(0, []), "journal", "warning", "another boot"),
    "no clock": (lambda w: w.remove("run/systemd/timesync/synchronized"), "clock", "warning", "keep the clock"),
    "chrony": (
        lambda w: w.remove("run/systemd/timesync/synchronized").write("proc/9/comm", "chronyd"),
        "clock", "unseen", "chronyd",
    ),
    "CDI off": (lambda w: w.answers["/info"].update(CDISpecDirs=[]), "cdi", "warning", "CDI is off"),
    "CDI elsewhere": (lambda w: w.answers["/info"].update(CDISpecDirs=["/opt"]), "cdi", "warning", "/opt only"),
    "no CDI file": (lambda w: w.remove("run/cdi/neurond.json"), "cdi", "warning", "there is no /run/cdi/neurond.json"),
    "runtime": (lambda w: w.answers["/info"].update(Runtimes={"neuron": {}}), "hook", "warning", "the runtime neuron"),
    "default runtime": (lambda w: w.answers["/info"].update(DefaultRuntime="neuron"), "hook", "error", "default"),
    "hook": (
        lambda w: w.write("opt/aws/neuron/bin/oci_neuron_hook_wrapper.sh", ""), "hook", "warning", "hook is installed",
    ),
    "daemon.json": (lambda w: w.write("etc/docker/daemon.json", "{,}"), "docker", "error", "is no JSON"),
    "privileged": (
        lambda w: w.answers["/containers/c1/json"]["HostConfig"].update(Privileged=True),
        "privileged", "warning", "every chip: trainer",
    ),
    "device plugin": (
        lambda w: w.write("var/lib/kubelet/device-plugins/neuron.sock", ""), "others", "error", "neuron.sock",
    ),
    "DRA driver": (
        lambda w: w.write("var/lib/kubelet/plugins/neuron.aws.com/x", ""), "others", "error", "neuron.aws.com",
    ),
    "kubelet": (lambda w: w.write("proc/9/comm", "kubelet"), "others", "warning", "kubelet runs here"),
    "ECS agent": (lambda w: w.write("proc/9/comm", "amazon-ecs-init"), "others", "warning", "ECS agent runs"),
    "slurmd": (lambda w: w.write("proc/9/comm", "slurmd"), "others", "warning", "slurmd runs here"),
    "a wrong setting": (lambda w: w.become(wrong=("x.toml:1: no key",)), "settings", "error", "x.toml:1: no key"),
    "a setting not read": (lambda w: w.become(unread=("x.toml: denied",)), "settings", "unseen", "x.toml: denied"),
    "a setting that waits": (lambda w: w.become(pending=("docker (x:1)",)), "settings", "warning", "docker (x:1)"),
    "another group": (lambda w: w.become(settings=Settings(group="ml")), "group", "warning", "no group ml"),
    "no member of another group": (
        lambda w: w.become(settings=Settings(group="ml")).write("etc/group", "ml:x:7:\n"),
        "group", "warning", "ann is not in group ml",
    ),
    "names elsewhere": (
        lambda w: w.become(settings=Settings(cdi_dir="/x/cdi")), "cdi", "warning", "from /etc/cdi, /run/cdi only",
    ),
    "Docker elsewhere": (
        lambda w: w.become(settings=Settings(docker="tcp://1.2.3.4:2375")), "docker", "unseen", "tcp://1.2.3.4:2375",
    ),
    "Docker fails": (
        lambda w: w.answers.update({"/containers/json": {"message": "no db"}}), "docker", "unseen", "no sense",
    ),
    "something else answers": (lambda w: w.about.clear(), "daemon", "warning", "has version unknown"),
    "shipped rule": (
        lambda w: w.nodes(0o666).write("usr/share/neurond/udev/60-neurond-enforced.rules", ""),
        "nodes", "warning", "leases are advisory",
    ),
    "hidden processes": (lambda w: w.rename("proc/1", "proc/2"), "others", "unseen", "/proc"),
}  # fmt: skip


@pytest.mark.root
def test_a_good_host_is_fine(world: World) -> None:
    """On a host that is as it should be each area is fine, and the exit code is 0."""
    found = world.look()
    assert [finding for finding in found if finding.severity != "fine"] == []
    assert exit_code(found) == 0


@pytest.mark.parametrize("case", CASES)
def test_each_finding(world: World, case: str) -> None:
    """What is wrong is found, with a fix and the exit code of its severity, and is not found on a good host."""
    change, area, severity, words = CASES[case]

    def shown() -> list[Finding]:
        found = world.look()
        hits = [one for one in found if (one.area, one.severity) == (area, severity) and words in one.text]
        assert not hits or exit_code(found) >= {"unseen": 0, "warning": 1, "error": 2}[severity]
        return hits

    assert shown() == []
    change(world)
    (hit,) = shown()
    assert hit.fix


def test_a_rule_that_is_masked_counts_for_nothing(world: World) -> None:
    """An empty file in /etc takes the place of the driver's rule of the same name."""
    world.remove("etc/udev/rules.d/99-neurond.rules")
    world.nodes(0o600)
    world.write("etc/udev/rules.d/neuron-udev.rules", "")
    (finding,) = [one for one in world.look() if one.area == "nodes"]
    assert (finding.severity, "rules: none" in finding.text) == ("fine", True)


def test_disk_and_socket(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little space or too few inodes are errors, as is a socket that anybody may open."""
    with world.serving():
        world.host.daemon.chmod(0o666)
        (open_to_all,) = service.socket_rights(world.host)
    assert (open_to_all.severity, "0666" in open_to_all.text) == ("error", True)
    for limit, words in (("LEAST_SPACE", "KiB left"), ("LEAST_INODES", "inodes left")):
        assert [one.severity for one in service.room(world.host)] == ["fine"]
        with monkeypatch.context() as patch:
            patch.setattr(service, limit, 1 << 80)
            (full,) = service.room(world.host)
        assert (full.severity, words in full.text) == ("error", True)


def test_a_container_that_goes_meanwhile(world: World) -> None:
    """A container that has gone before it is looked at is passed over, and the privileged one after it is found."""
    world.answers["/containers/json"] = [{"Id": "gone"}, {"Id": "c1"}]
    world.answers["/containers/c1/json"]["HostConfig"]["Privileged"] = True
    found = [one for one in world.look() if one.severity != "fine"]
    assert [one.text for one in found] == ["privileged containers can open every chip: trainer"]


def test_a_socket_of_somebody_else(world: World) -> None:
    """A socket that belongs neither to root nor to the caller is an error: its owner could answer anything."""
    world.host.daemon.touch(0o660)
    world.become(uid=os.geteuid() + 1)
    found = [one for one in service.socket_rights(world.host) if "who may answer" in one.text]
    assert [one.severity for one in found] == (["error"] if os.geteuid() else [])
    if os.geteuid() == 0:
        os.chown(world.host.daemon, 4711, 4242)
        (strange, _) = service.socket_rights(world.host)
        assert (strange.severity, "user 4711" in strange.text) == ("error", True)


@pytest.mark.root
def test_a_daemon_of_an_ordinary_user(world: World) -> None:
    """Who runs a daemon of his own may use it, though he is in no group and others can't call it."""
    with world.serving():
        os.chown(world.host.daemon, 1000, 1000)
        world.host.daemon.chmod(0o600)
        world.become(gids=frozenset({1000}), user="bob")
        found = examine(world.host)
    assert [one.severity for one in found if one.area in {"socket", "group"}] == ["fine", "fine"]


def test_settings_of_files_and_of_the_daemon(world: World, daemon: Daemon, tmp_path: Path) -> None:
    """Files are read, and what is wrong in them is named; where a daemon answers, what it has in force counts."""
    file = tmp_path / "neurond.toml"
    file.write_text('group = "ml"\nlog_levl = "info"\n')
    environment = {"NEUROND_SERVE_CONFIG": str(file)}
    alone = with_settings(world.host, environment)
    assert alone.settings.group == "ml"
    assert [wrong.partition(";")[0] for wrong in alone.wrong] == [f'{file}:2: there is no key "log_levl"']
    asked = with_settings(replace(world.host, daemon=daemon.socket), environment)
    assert (asked.settings.simulate, asked.wrong) == ("trn1.32xlarge", alone.wrong)


def test_nobody_answers(world: World) -> None:
    """Without daemon and Engine both are named, and all else is still looked at."""
    found = {one.area: one for one in examine(world.host)}
    assert found["daemon"].severity == "error"
    assert found["docker"].severity == "warning"
    assert found["chips"].severity == "fine"


def test_never_hangs(world: World) -> None:
    """A daemon and an Engine that take the call and are silent are errors after a few seconds."""
    with socket.socket(socket.AF_UNIX) as daemon, socket.socket(socket.AF_UNIX) as docker:
        for listener, path in ((daemon, world.host.daemon), (docker, world.host.docker)):
            listener.bind(str(path))
            listener.listen()
        began = time.monotonic()
        found = [one for one in examine(world.host) if "does not answer" in one.text or "silent" in one.text]
        assert time.monotonic() - began < 15
    assert [(one.area, one.severity) for one in found] == [("daemon", "error"), ("docker", "error")]


@pytest.mark.root
def test_what_an_ordinary_user_may_not_see(world: World) -> None:
    """A user without rights is told what was not seen; nothing of it is said to be fine."""
    with world.serving():
        world.write("var/lib/kubelet/device-plugins/neuron.sock", "")
        (world.root / "var/lib/kubelet/device-plugins").chmod(0o700)
        world.root.chmod(0o755)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            areas = {one.area: one.severity for one in examine(replace(world.host, uid=65534))}
            os.write(write, json.dumps(areas).encode())
            os._exit(0)
        os.close(write)
        os.waitpid(pid, 0)
        areas = json.loads(os.read(read, 1 << 16))
        os.close(read)
    assert {areas[area] for area in ("daemon", "journal", "others")} == {"unseen"}


def test_against_a_daemon(daemon: Daemon) -> None:
    """The verb itself answers as text and as JSON, with a daemon on a simulated host."""
    command = [sys.executable, "-m", "neurond", "doctor", "-H", f"unix://{daemon.socket}"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert f"the daemon answers, version {__version__}" in text.stdout
    assert "simulated" in text.stdout
    found = json.loads(subprocess.run([*command, "-j"], capture_output=True, timeout=30, check=False).stdout)
    severities = {one["severity"] for one in found}
    assert text.returncode == (2 if "error" in severities else 1 if "warning" in severities else 0)
