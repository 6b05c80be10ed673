"""The life of a .deb on a host: installed, used, upgraded under load, taken back, removed, purged."""

import json
import re

import pytest

from tests.harness import eventually
from tests.packages.builds import NEW, OLD, Packages
from tests.packages.machine import Machine

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

ENFORCED = "/usr/share/neurond/udev/60-neurond-enforced.rules"


def install(machine: Machine, packages: Packages, version: str) -> None:
    """Install a version, over what is there."""
    machine.run("dpkg", "--install", machine.bring(packages.deb(version)))


def test_it_comes_and_goes_and_leaves_nothing(machine: Machine, packages: Packages) -> None:
    """After a purge the host is what it was: no file, no unit, no node of other mode, nothing in /run."""
    machine.shell("mknod -m 666 /dev/neuron0 c 240 0; echo 666 >/run/driver-rule")
    before = machine.changes()
    install(machine, packages, NEW)
    assert machine.run("neurond", "--version") == f"neurond {NEW}\n"
    assert "active" in machine.run("neurond", "run", "-n", "4", "--", "sh", "-c", "echo active $NEUROND_CHIPS")
    wants = "/etc/systemd/system/multi-user.target.wants/neurond.service"
    assert machine.run("readlink", wants).endswith("/systemd/system/neurond.service\n")
    machine.run("ln", "-s", ENFORCED, "/etc/udev/rules.d/")
    machine.shell("chgrp neuron /dev/neuron0; chmod 660 /dev/neuron0")
    machine.shell("echo '# mine' >/etc/neurond/conf.d/50-mine.toml")
    machine.shell(
        "for compiled in /opt/neurond/lib/python3.*/site-packages/*/__pycache__; do touch $compiled/new.pyc; done"
    )
    machine.run("dpkg", "--purge", "neurond")
    assert machine.run("stat", "-c", "%a %U %G", "/dev/neuron0") == "666 root root\n"
    machine.shell("[ ! -e /run/neurond ] && [ ! -e /run/cdi/neurond.json ] && [ ! -e /run/neurond.sock ]")
    assert "neurond" not in machine.run("ps", "-eo", "args")
    assert machine.changes() == before


def test_nodes_go_back_to_the_kernels_default(machine: Machine, packages: Packages) -> None:
    """Where the driver has no rule of its own, a node that was shut to all but group neuron is root's alone again."""
    install(machine, packages, NEW)
    machine.shell("mknod /dev/neuron0 c 240 0; chgrp neuron /dev/neuron0; chmod 660 /dev/neuron0")
    machine.run("dpkg", "--remove", "neurond")
    assert machine.run("stat", "-c", "%a %U %G", "/dev/neuron0") == "600 root root\n"


def test_upgrade_under_load_and_back(machine: Machine, packages: Packages) -> None:
    """A job and its lease outlive an upgrade and a downgrade; who waits is told; the new daemon is the new version."""
    install(machine, packages, OLD)
    job = machine.start("neurond", "run", "-n", "8", "--name", "job", "--", "sleep", "600")
    eventually(lambda: "job" in machine.run("neurond", "ps"))
    lease = machine.run("neurond", "ps", "-q")
    for version, other in ((NEW, OLD), (OLD, NEW)):
        waiting = machine.start("neurond", "run", "-n", "16", "--", "true")
        eventually(lambda: "queued" in machine.run("neurond", "ps"))
        install(machine, packages, version)
        told, _ = waiting.communicate(timeout=30)
        assert waiting.returncode == 69, told
        assert machine.run("neurond", "ps", "-q") == lease
        assert json.loads(machine.run("neurond", "version", "-j"))["daemon"]["version"] == version
        assert other not in machine.run("neurond", "--version")
        assert (
            machine.run("neurond", "run", "-n", "8", "--no-wait", "--", "echo", "and others go on")
            == "and others go on\n"
        )
    assert job.poll() is None
    machine.run("pkill", "sleep")
    job.communicate(timeout=30)
    eventually(lambda: machine.run("neurond", "ps", "-q") == "")


def test_removal_leaves_jobs_alone(machine: Machine, packages: Packages) -> None:
    """A removal stops the daemon and nothing else; installed again, neurond knows the lease."""
    install(machine, packages, NEW)
    job = machine.start("neurond", "run", "-n", "4", "--", "sleep", "600")
    lease = eventually(lambda: machine.run("neurond", "ps", "-q"))
    machine.run("dpkg", "--remove", "neurond")
    assert job.poll() is None
    assert "serve" not in machine.run("ps", "-eo", "args")
    machine.run("test", "-e", "/etc/neurond/neurond.toml")
    install(machine, packages, NEW)
    assert machine.run("neurond", "ps", "-q") == lease
    machine.run("pkill", "sleep")
    job.communicate(timeout=30)


def test_what_the_admin_changed_stays(machine: Machine, packages: Packages) -> None:
    """An upgrade keeps a changed file of settings, a disabled service and the enforced rule."""
    install(machine, packages, OLD)
    machine.shell(f"echo '# mine' >>/etc/neurond/neurond.toml; ln -s {ENFORCED} /etc/udev/rules.d/")
    machine.run("rm", "/etc/systemd/system/multi-user.target.wants/neurond.service")  # systemctl disable
    install(machine, packages, NEW)
    assert machine.run("tail", "-n1", "/etc/neurond/neurond.toml") == "# mine\n"
    machine.run("test", "!", "-e", "/etc/systemd/system/multi-user.target.wants/neurond.service")
    machine.run("test", "-e", "/etc/udev/rules.d/60-neurond-enforced.rules")


def test_in_a_chroot(machine: Machine, packages: Packages) -> None:
    """Where neither systemd nor udev runs, as while an image is made, it installs, is enabled, and goes again."""
    machine.without_systemd()
    before = machine.changes()
    install(machine, packages, OLD)
    install(machine, packages, NEW)
    machine.run("test", "-L", "/etc/systemd/system/sockets.target.wants/neurond.socket")
    machine.shell("getent group neuron")
    assert "Before=docker.service" in machine.run("cat", "/usr/lib/systemd/system/neurond.service")
    machine.run("dpkg", "--purge", "neurond")
    machine.run("test", "!", "-e", "/run/systemctl.log")
    assert machine.changes() == before


def test_scripts_can_run_twice(machine: Machine, packages: Packages) -> None:
    """An interrupted installation is carried on by running the scripts again."""
    install(machine, packages, NEW)
    scripts = "/var/lib/dpkg/info/neurond."
    machine.run(f"{scripts}postinst", "configure", "")
    machine.run("cp", f"{scripts}postrm", "/tmp/postrm")
    for _ in range(2):
        machine.run(f"{scripts}prerm", "remove")
    machine.run("dpkg", "--purge", "neurond")
    for verb in ("remove", "purge", "purge"):
        machine.run("/tmp/postrm", verb)
    install(machine, packages, NEW)
    assert machine.run("neurond", "run", "-n", "1", "--", "echo", "there") == "there\n"


def test_without_bytecode_it_is_compiled_at_installation(machine: Machine, packages: Packages) -> None:
    """A package that was built without an interpreter of its version compiles its modules on the host."""
    file = machine.bring(packages.deb(NEW))
    machine.shell(
        f"cd /tmp && dpkg-deb -R {file} tree && find tree -name __pycache__ -exec rm -r {{}} + && "
        "sed -i /__pycache__/d tree/DEBIAN/md5sums && dpkg-deb -Znone -b tree bare.deb"
    )
    before = machine.changes()
    machine.run("dpkg", "--install", "/tmp/bare.deb")
    machine.shell("ls /opt/neurond/lib/python3.*/site-packages/neurond/cli/__pycache__/run.*.pyc")
    machine.run("dpkg", "--purge", "neurond")
    assert machine.changes() == before


def test_plugin_man_pages_and_completion_from_where_they_are(machine: Machine, packages: Packages) -> None:
    """Docker finds its plugin, man its pages and bash its completion, without a network and without settings."""
    install(machine, packages, NEW)
    plugin = machine.run("/usr/libexec/docker/cli-plugins/docker-neurond", "docker-cli-plugin-metadata")
    assert json.loads(plugin)["Version"] == NEW
    assert "neurond*" in machine.run("docker", "--help")
    installed = machine.run("dpkg", "--listfiles", "neurond").splitlines()
    pages = [place for place in installed if place.endswith(".gz")]
    assert len(pages) > 20
    for page in pages:
        assert machine.shell(f"zcat {page} | grep -c '^.SH NAME$'") == "1\n"
    offered = machine.run("bash", "-c", COMPLETE, "bash", "neurond", "container", "run", "--mem")
    assert offered.split() == ["--memory", "--memory-reservation"]
    job = machine.start("neurond", "run", "-n", "4", "--", "sleep", "600")
    lease = eventually(lambda: machine.run("neurond", "ps", "-q"))
    assert machine.run("bash", "-c", COMPLETE, "bash", "neurond", "release", "") == lease
    machine.run("pkill", "sleep")
    job.communicate(timeout=30)


COMPLETE = """
. /usr/share/bash-completion/completions/neurond
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
$(complete -p neurond | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_the_command_begins_at_once(machine: Machine, packages: Packages) -> None:
    """The launcher loads no more of Python than it must: no site module, nothing compiled anew, nothing heavy."""
    install(machine, packages, NEW)
    said = machine.shell("head -n1 /usr/bin/neurond")
    assert re.fullmatch(r"#!/opt/neurond/bin/python -IS\n", said)
    said = machine.shell("/opt/neurond/bin/python -IS -v /usr/bin/neurond run -n 1 -- true 2>&1")
    loaded = set(re.findall(r"^import '([\w.]+)'", said, re.MULTILINE))
    assert {"neurond.cli", "neurond.cli.run", "neurond.client"} <= loaded
    assert loaded & {"site", "argparse", "socket", "typing", "asyncio", "structlog", "docker"} == set()
    assert "wrote" not in said
    ours = re.findall(r"^# code object from '(/opt/[^']+)'", said, re.MULTILINE)
    assert [place for place in ours if place.endswith(".py")] == []
