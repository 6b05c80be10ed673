"""doctor: each kind of finding on a host that shows it, and none of them on a good one. A host is a tree of files."""

import json
import os
import socket
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

from neurond.cli.doctor import examine, line, nodes, others, state, udevrules, verdict
from neurond.cli.doctor.asking import ask_daemon, ask_docker
from neurond.cli.doctor.host import Answer, Finding, Host
from neurond.host import journal
from neurond.settings.sources import Finding as BadSetting
from neurond.settings.table import Settings
from tests.daemon.support import NOBODY
from tests.harness import NEUROND, Daemon

BOOT = "6f1c2a4e-0000-4000-8000-000000000001"
RULE = 'SUBSYSTEM=="neuron_device", KERNEL=="neuron[0-9]*", GROUP:="neuron", MODE:="0660"\n'
VENDOR = 'KERNEL=="neuron*", MODE="0666"\n'
MINE = os.getegid()


def write(host: Host, path: str, text: str) -> None:
    """Write a file of a host."""
    file = host.path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def docker(**info: Any) -> Answer:
    """Return what a good Docker answers, with something else in its info."""
    about = {"CDISpecDirs": ["/etc/cdi", "/run/cdi"], "Runtimes": {"runc": {}}, **info}
    return Answer({"version": {"Version": "27.5.1"}, "info": about, "containers": []})


def container(name: str, *, privileged: bool) -> Answer:
    """Return what Docker answers with one container."""
    content = docker().content
    assert content is not None
    return Answer({**content, "containers": [{"Name": f"/{name}", "HostConfig": {"Privileged": privileged}}]})


def daemon(**about: Any) -> Answer:
    """Return what a good daemon answers; it simulates its chips, as files stand for nodes here."""
    return Answer({"version": "1.0", "simulated": True, "journal_problem": None, "named": 1, **about})


@pytest.fixture
def good(tmp_path: Path) -> Host:
    """Make a host on which nothing is wrong: an inf2.24xlarge with its six chips."""
    settings = Settings()
    host = Host(
        root=tmp_path,
        chips=tmp_path,
        groups=frozenset({MINE}),
        version="1.0",
        settings=settings,
        daemon=daemon(),
        docker=docker(),
        synchronised=True,
        free=(1 << 30, 100000),
    )
    write(host, "/etc/group", f"root:x:0:\nneuron:x:{MINE}:\ndocker:x:{MINE}:\n" if MINE else GROUPS)
    write(host, "/sys/module/neuron/version", "2.30.2.0\n")
    write(host, "/proc/modules", "neuron 290816 0 - Live 0x0000000000000000 (OE)\n")
    write(host, "/proc/1/comm", "systemd\n")
    write(host, "/proc/sys/kernel/random/boot_id", BOOT + "\n")
    write(host, "/etc/modules-load.d/neuron.conf", "neuron\n")
    write(host, "/sys/class/dmi/id/product_name", "inf2.24xlarge\n")
    for index in range(6):
        host.path(f"/sys/class/neuron_device/neuron{index}").mkdir(parents=True)
        write(host, f"/dev/neuron{index}", "")
        host.path(f"/dev/neuron{index}").chmod(0o660)
    write(host, "/etc/udev/rules.d/99-neurond.rules", RULE)
    write(host, "/lib/udev/rules.d/neuron-udev.rules", VENDOR)
    write(host, "/usr/lib/systemd/system/neurond.service", "")
    wants = host.path("/etc/systemd/system/multi-user.target.wants")
    wants.mkdir(parents=True)
    (wants / "neurond.service").symlink_to("/usr/lib/systemd/system/neurond.service")
    write(host, "/run/cdi/neurond.json", '{"kind": "neurond.io/lease"}')
    header(host, state.FORMAT, BOOT)
    return host


GROUPS = "neuron:x:0:\ndocker:x:0:\n"
"""The tests run as root: the files are root's."""


def header(host: Host, version: int, boot: str) -> None:
    """Write a journal of which only the header matters."""
    write(host, "/run/neurond/journal", f"00000000 {json.dumps({'journal': version, 'boot': boot, 'seq': 0})}\n")


def worse(findings: list[Finding]) -> list[Finding]:
    """Return what is not fine."""
    return [finding for finding in findings if finding.severity != "fine"]


def test_a_good_host_is_fine(good: Host) -> None:
    """On a host without a fault nothing but good is said, and the exit code is 0."""
    findings = list(examine(good))
    assert worse(findings) == []
    assert verdict(findings) == 0


Change = Callable[[Host], Host | None]


def removing(path: str) -> Change:
    """Take a file of the host away."""
    return lambda host: host.path(path).unlink()


def writing(path: str, text: str) -> Change:
    """Write a file of the host."""
    return lambda host: write(host, path, text)


def being(**values: Any) -> Change:
    """Have another host in some values."""
    return lambda host: replace(host, **values)


def all_of(*changes: Change) -> Change:
    """Change one thing after the other."""

    def change(host: Host) -> Host:
        for one in changes:
            host = one(host) or host
        return host

    return change


def real(*changes: Change) -> Change:
    """Have a daemon that does not simulate, and more changes."""
    return all_of(being(daemon=daemon(simulated=False)), *changes)


def without_module(host: Host) -> None:
    """Unload the driver."""
    host.path("/sys/module/neuron/version").unlink()
    host.path("/sys/module/neuron").rmdir()


FAULTS = {
    "no daemon": (being(daemon=Answer(None, "neurond does not answer")), "error", "neurond does not answer"),
    "daemon refuses": (being(daemon=Answer(None, "not you", refused=True)), "unseen", "not you"),
    "other version": (being(daemon=daemon(version="0.9")), "warning", "the daemon is version 0.9"),
    "paused": (being(daemon=daemon(journal_problem="no room")), "error", "no room"),
    "bad setting": (being(bad_settings=(BadSetting("a.toml:3", "no key"),)), "error", "a.toml:3: no key"),
    "no socket": (writing("/run/neurond/neurond.sock", ""), "error", "is not a socket"),
    "no unit": (real(removing("/usr/lib/systemd/system/neurond.service")), "warning", "has no neurond.service"),
    "not enabled": (
        real(removing("/etc/systemd/system/multi-user.target.wants/neurond.service")),
        "warning",
        "not enabled",
    ),
    "no driver": (real(without_module), "error", "module neuron is not loaded"),
    "loading": (real(writing("/proc/modules", "neuron 1 0 - Unloading 0x0\n")), "warning", "neuron is unloading"),
    "strange version": (real(writing("/sys/module/neuron/version", "?\n")), "warning", "version reads '?'"),
    "not at boot": (real(removing("/etc/modules-load.d/neuron.conf")), "warning", "at boot"),
    "hole": (lambda host: host.path("/sys/class/neuron_device/neuron2").rmdir(), "error", "2 of them between others"),
    "unknown type": (writing("/sys/class/dmi/id/product_name", "t3.micro"), "warning", "t3.micro is no instance type"),
    "too many": (writing("/sys/class/dmi/id/product_name", "inf2.xlarge"), "warning", "6 chips are there"),
    "no node": (removing("/dev/neuron3"), "error", "has chip 3, but there is no node"),
    "not a device": (real(), "error", "is not a character device"),
    "advisory": (lambda host: host.path("/dev/neuron3").chmod(0o666), "warning", "leases are advisory"),
    "rule loses": (
        real(writing("/etc/udev/rules.d/99-neurond.rules", RULE.replace(":=", "="))),
        "warning",
        "99-neurond.rules:1 (mode 0660) loses to /lib/udev/rules.d/neuron-udev.rules:1 (mode 0666)",
    ),
    "no such group": (real(writing("/etc/group", "docker:x:0:\n")), "error", "names the group neuron"),
    "doubtful rule": (
        real(writing("/etc/udev/rules.d/98-a.rules", 'KERNEL=="neuron*", ENV{X}=="1", MODE="0600"')),
        "unseen",
        "98-a.rules:1 applies depends",
    ),
    "no group": (writing("/etc/group", "docker:x:0:\n"), "warning", "/etc/group has no group neuron"),
    "not a member": (
        all_of(writing("/etc/group", "neuron:x:4711:bob\ndocker:x:0:\n"), being(uid=1000, user="ann")),
        "warning",
        "ann is not in the group neuron",
    ),
    "log in again": (
        all_of(writing("/etc/group", "neuron:x:4711:bob,ann\ndocker:x:0:\n"), being(uid=1000, user="ann")),
        "warning",
        "ann was added to the group neuron, but",
    ),
    "no docker": (being(docker=Answer(None, "silent for 5 s")), "warning", "Docker does not answer: silent for 5 s"),
    "docker refuses": (being(docker=Answer(None, "not you", refused=True)), "unseen", "privileged containers: not you"),
    "no CDI": (being(docker=docker(CDISpecDirs=[])), "warning", "(CDI) are off"),
    "CDI elsewhere": (being(docker=docker(CDISpecDirs=["/etc/cdi"])), "warning", "where Docker does not look"),
    "no CDI file": (removing("/run/cdi/neurond.json"), "warning", "but no /run/cdi/neurond.json"),
    "bad CDI file": (writing("/run/cdi/neurond.json", "{"), "error", "/run/cdi/neurond.json is damaged"),
    "runtime": (being(docker=docker(Runtimes={"neuron": {}})), "warning", "Docker has the runtime neuron:"),
    "runtime in file": (
        writing("/etc/docker/daemon.json", '{"runtimes": {"neuron": {}}, "default-runtime": "neuron"}'),
        "warning",
        "the runtime neuron, by default",
    ),
    "bad daemon.json": (writing("/etc/docker/daemon.json", "{"), "error", "daemon.json is no JSON"),
    "privileged": (being(docker=container("box", privileged=True)), "warning", "container box is privileged"),
    "device plugin": (
        writing("/var/lib/kubelet/device-plugins/neuron.sock", ""),
        "error",
        "device-plugins/neuron.sock",
    ),
    "DRA": (writing("/var/lib/kubelet/plugins/neuron.aws.com/dra.sock", ""), "error", "plugins/neuron.aws.com"),
    "slurmd": (writing("/proc/77/comm", "slurmd\n"), "warning", "slurmd runs here"),
    "slurmd with chips": (
        all_of(
            writing("/proc/77/comm", "slurmd\n"), writing("/etc/slurm/gres.conf", "Name=gpu File=/dev/neuron[0-15]")
        ),
        "error",
        "gres.conf gives out the same chips",
    ),
    "ECS": (writing("/proc/78/comm", "amazon-ecs-init\n"), "warning", "the ECS agent runs here"),
    "ECS container": (being(docker=container("ecs-agent", privileged=False)), "warning", "the ECS agent runs here"),
    "hidepid": (
        all_of(removing("/proc/1/comm"), lambda host: host.path("/proc/1").rmdir(), being(uid=1000)),
        "unseen",
        "hidepid",
    ),
    "no directory": (being(free=None), "unseen", "/run/neurond is not there"),
    "little room": (being(free=(1 << 20, 9999)), "warning", "1 MiB and 9999 inodes"),
    "few inodes": (being(free=(1 << 30, 9)), "warning", "9 inodes free"),
    "full": (being(free=(0, 9999)), "error", "0 MiB"),
    "kept aside": (writing("/run/neurond/journal.20261201T000000.000000001", ""), "warning", "were kept aside"),
    "no journal": (writing("/run/neurond/journal", "hello\n"), "error", "is not a journal"),
    "newer journal": (lambda host: header(host, 99, BOOT), "error", "the journal has format 99"),
    "other boot": (lambda host: header(host, 1, "x"), "warning", "of another boot"),
    "clock": (being(synchronised=False), "warning", "the clock is not synchronised"),
    "clock unknown": (being(synchronised=None), "unseen", "whether the clock"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(good: Host, name: str) -> None:
    """Each fault gives its finding, with a fix, and the exit code that goes with it."""
    change, severity, sentence = FAULTS[name]
    findings = list(examine(change(good) or good))
    found = [one for one in findings if sentence in one.sentence]
    assert {one.severity for one in found} == {severity}, worse(findings)
    assert found[0].fix
    assert found[0].fix in line(found[0])
    assert verdict(found) == (2 if severity == "error" else 1)


AS_NOBODY = f"""
import getpass, grp, http.client, os, sys
import neurond.catalog, neurond.cli.doctor.asking
neurond.catalog.names()
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
sys.exit(neurond.cli.main(sys.argv[1:]))
"""
"""What is imported is so before: nobody may not read it where it lies."""


@contextmanager
def running_daemon(directory: Path) -> Iterator[Daemon]:
    """Run a daemon on a simulated host."""
    daemon = Daemon(directory).start()
    try:
        yield daemon
    finally:
        daemon.stop()


def socket_at(host: Host, mode: int) -> None:
    """Put a socket where the daemon's is."""
    path = host.path("/run/neurond/neurond.sock")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))
    path.chmod(mode)


def test_the_socket_is_for_the_group(good: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket of the right mode and group is fine, another mode or group is said."""
    monkeypatch.chdir(good.path("/run/neurond"))
    socket_at(good, 0o660)
    assert worse(list(examine(good))) == []
    write(good, "/etc/group", f"neuron:x:4711:\ndocker:x:{MINE}:\n")
    assert any("it should be neuron's" in one.sentence for one in examine(good))
    good.path("/run/neurond/neurond.sock").chmod(0o666)
    assert any("it should be 0660" in one.sentence for one in examine(good))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (0o600, "root")),
        ({"/lib/udev/rules.d/neuron-udev.rules": VENDOR}, (0o666, "root")),
        ({"/lib/udev/rules.d/n.rules": VENDOR, "/etc/udev/rules.d/n.rules": "# off\n"}, (0o600, "root")),
        ({"/run/udev/rules.d/n.rules": VENDOR, "/usr/lib/udev/rules.d/n.rules": RULE}, (0o666, "root")),
        ({"/lib/udev/rules.d/n.rules": VENDOR, "/etc/udev/rules.d/9.rules": RULE}, (0o660, "neuron")),
        ({"/lib/udev/rules.d/9.rules": VENDOR, "/etc/udev/rules.d/n": RULE}, (0o666, "root")),
        ({"/etc/udev/rules.d/1.rules": 'SUBSYSTEM=="neuron*", \\\n GROUP="neuron"\n'}, (0o660, "neuron")),
        ({"/etc/udev/rules.d/1.rules": 'SUBSYSTEM!="tty", GOTO="e"\n' + VENDOR + 'LABEL="e"\n'}, (0o600, "root")),
        ({"/etc/udev/rules.d/1.rules": 'KERNEL=="tty*|neuron?", MODE="0640"\n'}, (0o640, "root")),
        (
            {"/etc/udev/rules.d/1.rules": 'ACTION=="remove", MODE="0640"\nKERNEL=="nvidia*", MODE="0666"'},
            (0o600, "root"),
        ),
    ],
)
def test_rules_count_as_udev_counts_them(tmp_path: Path, files: dict[str, str], expected: tuple[int, str]) -> None:
    """Order of names, precedence of directories, final assignments, jumps and patterns are as in udev(7)."""
    host = Host(root=tmp_path)
    for path, text in files.items():
        write(host, path, text)
    assert udevrules.evaluate(host).expected == expected


def test_a_link_to_dev_null_switches_a_rule_off(tmp_path: Path) -> None:
    """The vendor's rule does not count when its name is masked in /etc."""
    host = Host(root=tmp_path)
    write(host, "/lib/udev/rules.d/n.rules", VENDOR)
    host.path("/etc/udev/rules.d").mkdir(parents=True)
    host.path("/etc/udev/rules.d/n.rules").symlink_to("/dev/null")
    assert udevrules.evaluate(host).mode is None


@pytest.mark.root
def test_nodes_that_differ_from_the_rules_are_named(good: Host) -> None:
    """A node whose mode is not what the rules say is named with the way to apply them; an equal one is not."""
    host = replace(good, daemon=daemon(simulated=False))
    for index in range(6):
        node = host.path(f"/dev/neuron{index}")
        node.unlink()
        os.mknod(node, 0o020660, os.makedev(4, 48))
        node.chmod(0o660)
    assert worse(list(nodes.nodes(host))) == []
    host.path("/dev/neuron4").chmod(0o600)
    (found,) = worse(list(nodes.nodes(host)))
    assert found.sentence.startswith("nodes of chips 4 are 0600")
    assert found.fix == nodes.TRIGGER


def test_without_leases_there_need_be_no_names(good: Host) -> None:
    """The file of device names is only missed when there are leases, as without any there is none."""
    good.path("/run/cdi/neurond.json").unlink()
    assert worse(list(examine(replace(good, daemon=daemon(named=0))))) == []


def test_the_format_is_that_of_the_journal() -> None:
    """The doctor knows the format that the daemon writes."""
    assert state.FORMAT == journal.VERSION


def test_names_of_processes_fit() -> None:
    """The agent's name is as the kernel shortens it."""
    assert len("amazon-ecs-init") <= others.COMM


def test_a_silent_docker_and_daemon_are_given_up(run_dir: Path) -> None:
    """One who takes the call and says nothing is waited for no longer than it was said."""
    path = run_dir / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        begin = time.monotonic()
        assert "silent for 0.2 s" in ask_docker(f"unix://{path}", 0.2).trouble
        assert "silent for 0.2 s" in ask_daemon(f"unix://{path}", 0.2).trouble
        assert time.monotonic() - begin < 5


def test_docker_is_asked(run_dir: Path) -> None:
    """Version, info and the running containers come over the socket, one answer a connection."""
    answers = {
        "/containers/json": [{"Id": "abc"}],
        "/version": {"Version": "27"},
        "/info": {},
        "/containers/abc/json": {"Name": "/box"},
    }
    path = run_dir / "d"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            for _ in answers:
                connection, _ = listener.accept()
                with connection:
                    body = json.dumps(answers[connection.recv(4096).split()[1].decode()]).encode()
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

        thread = threading.Thread(target=serve)
        thread.start()
        answer = ask_docker(f"unix://{path}")
        thread.join()
    assert answer.content == {"version": {"Version": "27"}, "info": {}, "containers": [{"Name": "/box"}]}


def test_the_verb_looks_at_a_simulated_host(run_dir: Path) -> None:
    """With a daemon that simulates, its chips are looked at; the output is a list with -j."""
    with running_daemon(run_dir) as running:
        command = [*NEUROND, "doctor", "-j", "--config", "/dev/null", "--host", running.address]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode in {0, 1, 2}, done.stderr
        said = [one["sentence"] for one in json.loads(done.stdout)]
    assert "all 16 chips of trn1.32xlarge are there" in said
    assert "the journal is of this boot and format" in said
    assert any(one.startswith("Docker does not answer") and str(run_dir) in one for one in said)


@pytest.mark.root
def test_an_ordinary_user_is_told_what_was_not_seen(run_dir: Path) -> None:
    """As nobody, without a right to the socket, doctor ends with what it has not seen instead of failing."""
    with running_daemon(run_dir) as running:
        command = [sys.executable, "-c", AS_NOBODY, "doctor", "--config", "/dev/null", "--host", running.address]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert "not seen: the daemon: " in done.stdout, done.stdout + done.stderr
    assert "not seen: the journal" in done.stdout
    assert "Traceback" not in done.stderr
