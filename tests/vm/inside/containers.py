"""Containers on leased chips, under Docker with cgroup v2 and systemd's driver."""

import json
from pathlib import Path

from .kit import Container, expect, leases, numbers, restart_docker, run, state_of, until


def a_container_opens_exactly_its_chips() -> str:
    """It opens its chips and no other, also by nodes of its own, after a daemon-reload and a `docker update` too."""
    cgroup = run("docker", "info", "--format={{.CgroupVersion}} {{.CgroupDriver}}")
    expect(cgroup == "2 systemd", f"Docker says that its cgroups are {cgroup}")
    container = Container("box", "-n", "4")
    own = container.chips()
    expect(len(own) == 4, f"its lease has {numbers(own)}")
    exactly(container, own, "at its start")
    run("systemctl", "daemon-reload")
    exactly(container, own, "after systemctl daemon-reload")
    run("docker", "update", "--cpus=1.5", "box")
    exactly(container, own, "after docker update --cpus")
    run("systemctl", "daemon-reload")
    exactly(container, own, "after one more daemon-reload")
    return (
        f"opened {numbers(own)} of 16, four times (Docker {run('docker', 'version', '--format={{.Server.Version}}')})"
    )


def exactly(container: Container, own: set[int], when: str) -> None:
    """Raise Failed unless a container can open just these chips."""
    opened = container.opens()
    expect(opened == own, f"{when} it could open {numbers(opened)}, and has {numbers(own)}")


def docker_restart_ends_containers_and_leases() -> str:
    """Without live-restore a restart of Docker ends a container with its lease, unless Docker starts it again."""
    Container("box", "-n", "4")
    again = Container("again", "-n", "4", "--restart", "on-failure")
    lease, own = leases()["again"]["lease"], again.chips()
    restart_docker()
    until("the container that nobody starts again has no lease", lambda: "box" not in leases())
    until("the other one runs again", again.lives)
    until("its lease is active", lambda: leases().get("again", {}).get("state") == "active")
    expect(leases()["again"]["lease"] == lease, f"its lease was {lease}, is {leases()['again']}")
    exactly(again, own, "after the restart of Docker")
    return f"box and its lease ended; again runs again with {lease} on {numbers(own)}"


def live_restore_keeps_containers_and_leases() -> str:
    """With live-restore a restart of Docker leaves a container, its lease and its device filter as they are."""
    have_live_restore(on=True)
    try:
        container = Container("box", "-n", "4")
        lease, own = leases()["box"]["lease"], container.chips()
        pid = run("docker", "inspect", "--format={{.State.Pid}}", "box")
        restart_docker()
        expect(run("docker", "inspect", "--format={{.State.Pid}}", "box") == pid, "its process is another one")
        exactly(container, own, "after the restart of Docker")
        expect(leases()["box"]["lease"] == lease, f"its lease was {lease}, is {leases()['box']}")
        container.end()
        until("its chips are free", lambda: all(state_of(chip) == "free" for chip in own))
    finally:
        have_live_restore(on=False)
    return f"the same process with {lease} on {numbers(own)}, and free after its end"


def have_live_restore(*, on: bool) -> None:
    """Switch it on or off, for which Docker needs no restart."""
    Path("/etc/docker").mkdir(exist_ok=True)
    Path("/etc/docker/daemon.json").write_text(json.dumps({"live-restore": on}))
    run("systemctl", "reload", "docker")
    answer = "--format={{.LiveRestoreEnabled}}"
    until("Docker has taken it", lambda: run("docker", "info", answer) == str(on).lower())
