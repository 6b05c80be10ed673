"""The life of an .rpm. Its scripts run by rpm itself, though on Debian: no Amazon Linux can be had here."""

import pytest

from tests.packages.builds import NEW, OLD, Packages
from tests.packages.machine import Machine

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

RPM = ("rpm", "--nodeps", "--force-debian", "--dbpath", "/tmp/rpmdb")
"""Debian's database of packages does not know what an .rpm may depend on."""


def test_it_comes_and_goes_and_leaves_nothing(machine: Machine, packages: Packages) -> None:
    """Units are set by preset and not started; an upgrade restarts what runs, and an erasure leaves nothing."""
    machine.shell("mknod -m 660 /dev/neuron0 c 240 0; echo 666 >/run/driver-rule")
    before = machine.changes()
    machine.run(*RPM, "--install", machine.bring(packages.rpm(OLD)))
    calls = machine.run("cat", "/run/systemctl.log").splitlines()
    assert "--no-reload preset neurond.socket neurond.service" in calls
    assert not [call for call in calls if call.split()[0] in {"start", "restart", "enable"}]
    machine.shell("chgrp neuron /dev/neuron0; [ -x /usr/bin/python3.11 ] && neurond --version || true")
    machine.shell("echo '# mine' >>/etc/neurond/neurond.toml; : >/run/systemctl.log")
    machine.run(*RPM, "--upgrade", machine.bring(packages.rpm(NEW)))
    calls = machine.run("cat", "/run/systemctl.log").splitlines()
    assert calls == ["daemon-reload", "try-restart neurond.service"]
    assert machine.run("tail", "-n1", "/etc/neurond/neurond.toml") == "# mine\n"
    machine.run("test", "-e", "/opt/neurond/bin/python3")
    machine.run(*RPM, "--upgrade", "--oldpackage", machine.bring(packages.rpm(OLD)))
    machine.run(*RPM, "--erase", "neurond")
    assert "--no-reload disable --now neurond.socket neurond.service" in machine.run("cat", "/run/systemctl.log")
    assert machine.run("stat", "-c", "%a %U %G", "/dev/neuron0") == "666 root root\n"
    assert machine.changes() - before == {"+/etc/neurond", "+/etc/neurond/neurond.toml.rpmsave"}


def test_in_a_chroot(machine: Machine, packages: Packages) -> None:
    """Where neither systemd nor udev runs, as while an image is made, all scripts succeed."""
    machine.without_systemd()
    before = machine.changes()
    for version in (OLD, NEW):
        said = machine.run(*RPM, "--upgrade", machine.bring(packages.rpm(version)))
        assert "warning" not in said
    machine.run(*RPM, "--erase", "neurond")
    assert machine.changes() == before
