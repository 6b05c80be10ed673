"""The package: installed, upgraded under load, taken through a reboot, removed and purged."""

import json
import subprocess
from pathlib import Path

from .kit import (
    IMAGE,
    PAYLOAD,
    SOCKET,
    Container,
    Job,
    chips,
    chips_of,
    expect,
    is_active,
    leases,
    leave,
    mode_of,
    numbers,
    opens,
    run,
    until,
)
from .service import same_as

DPKG_SECONDS = 300.0

EARLY = """\
[Unit]
Description=Leases chips before Docker is there
After=neurond.service systemd-modules-load.service
Before=docker.service

[Service]
Type=oneshot
User=member
ExecStart=neurond acquire --chips {chips} --wait 5m --ttl 2h --name early

[Install]
WantedBy=multi-user.target
"""


def install(number: int) -> None:
    """Install one of the two builds."""
    run("dpkg", "--install", str(PAYLOAD / f"packages/{number}.deb"), seconds=DPKG_SECONDS)


def versions() -> tuple[str, str]:
    """Return the versions of the command and of the daemon."""
    told = json.loads(run("neurond", "version", "--json"))
    return told["version"], told["daemon"]["version"]


def package_installs_where_no_chips_are() -> str:
    """It installs while Docker is stopped and the module is not loaded, and its service waits for both."""
    run("systemctl", "stop", "docker.service", "docker.socket")
    install(1)
    until("the service is up", lambda: is_active("neurond"))
    expect(mode_of(str(SOCKET)) == "root:neuron 0660", f"the socket is {mode_of(str(SOCKET))}")
    run("gpasswd", "--add", "member", "neuron")
    said = run("neurond", "run", "-n", "1", "--no-wait", "--", "true", code=75, user="member")
    run("systemctl", "start", "docker")
    run("docker", "import", str(PAYLOAD / "image.tar"), IMAGE)
    return f"active, socket root:neuron 0660; run says {said.partition(':')[2].partition(':')[0].strip()!r}"


def an_upgrade_under_load_keeps_all_leases() -> str:
    """At an upgrade and a downgrade a job and a container keep running and their leases, and who waits is told."""
    job, container = Job("job", "-n", "4"), Container("box", "-n", "4")
    before, first = leases(), versions()
    waiter = subprocess.Popen(
        ["runuser", "-u", "member", "--", "neurond", "run", "-n", "16", "--", "true"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waiter.stderr is not None
    said = waiter.stderr.readline()
    expect("waiting" in said, f"who asks for all 16 is not said to wait, but: {said}")
    install(2)
    same_as(before, job, container)
    second = versions()
    expect(all("second" in version for version in second), f"the versions were {first}, and are {second}")
    try:
        code = waiter.wait(60)
        said = f"{waiter.stderr.read().strip()} ({code})"
        expect(code == 69, f"who waited was told: {said}")
    except subprocess.TimeoutExpired:
        said = "goes on waiting"
        waiter.kill()
    install(1)
    same_as(before, job, container)
    expect(versions() == first, "the older version is not back")
    install(2)
    return f"job and container kept their leases three times; who waited: {said}"


def work_is_left_for_the_reboot() -> str:
    """A job and a container that Docker starts again have chips when the machine goes down."""
    Path("/etc/modules-load.d/neuron.conf").write_text("neuron\n")
    container = Container("again", "-n", "4", "--restart", "on-failure")
    Job("job", "-n", "4")
    own = numbers(container.chips())
    Path("/etc/neurond/conf.d/stop.toml").write_text("stop_conflicts = true\n")
    Path("/etc/systemd/system/early.service").write_text(EARLY.format(chips=own))
    run("systemctl", "enable", "early")
    Path("/var/lib/checks-leases").write_text("\n".join(lease["lease"] for lease in leases().values()))
    leave("the machine goes down under it")
    return f"again on {own}, job on {numbers(chips_of('job'))}; early.service will ask for {own}"


def a_reboot_voids_all_leases() -> str:
    """After a reboot no lease is left; a container that Docker starts again on chips of somebody else is stopped.

    Engines without CDI can't be kept from the start itself: it is `stop_conflicts` that ends it.
    """
    until("the service is up", lambda: is_active("neurond"))
    until("all chips are there", lambda: len(chips()) == 16)
    until("Docker is up", lambda: is_active("docker"))
    until("somebody has leased the chips before", lambda: chips_of("early"))
    old = Path("/var/lib/checks-leases").read_text().split()
    found = leases()
    expect(not [lease for lease in found.values() if lease["lease"] in old], f"a lease of before is there: {found}")
    expect(set(found) == {"early"}, f"there are more leases than early: {found}")

    def not_running() -> bool:
        return run("docker", "inspect", "--format={{.State.Running}}", "again") == "false"

    conflict = ("journalctl", "--boot", "--output=cat", "--identifier=neurond", "NEUROND_EVENT=container.conflict")
    until("Docker has started the container, and neurond has named it", lambda: "again" in run(*conflict, code=None))
    until("the container does not run on the chips of early", not_running)
    said = run(
        "docker", "inspect", "--format={{.State.Status}} ({{.State.Error}}), {{.RestartCount}} restarts", "again"
    )
    modes = {mode_of(chip["node"]) for chip in chips().values()}
    expect(modes == {"root:neuron 0660"}, f"nodes are {modes}")
    expect(opens("member") == chips_of("early"), f"member can open {numbers(opens('member'))}")
    leave("the next check ends it")
    return f"early has {numbers(chips_of('early'))}, the container is {said}"


def the_chips_of_a_released_lease_are_free_again() -> str:
    """After the reboot leases end as before, and the container that was kept off can be started."""
    run("systemctl", "disable", "early")
    run("neurond", "release", leases()["early"]["lease"], user="member")
    until("no chip is leased", lambda: not leases())
    run("docker", "start", "again")
    until("the container has a lease again", lambda: chips_of("again"))
    own = numbers(chips_of("again"))
    run("docker", "rm", "--force", "again")
    until("no chip is leased", lambda: not leases())
    return f"early ended, and again got {own}"


def removal_touches_no_job() -> str:
    """Removing the package leaves a job and a container running, and gives the nodes back to the driver's rule."""
    job, container = Job("job", "-n", "4"), Container("box", "-n", "4")
    run("dpkg", "--remove", "neurond", seconds=DPKG_SECONDS)
    expect(job.lives() and container.lives(), "a job has ended with the package")
    modes = {mode_of(str(node)) for node in Path("/dev").glob("neuron*")}
    expect(modes == {"root:root 0666"}, f"nodes are {modes}")
    lists = run("getfacl", "--skip-base", "--absolute-names", *map(str, Path("/dev").glob("neuron*")))
    expect(not lists, f"access control lists are left: {lists}")
    expect(not Path("/opt/neurond").exists(), "/opt/neurond is left")
    return "job and container live on; nodes root:root 0666, without access control lists"


def a_purge_leaves_nothing() -> str:
    """After a purge there is no file, unit or rule of neurond."""
    run("dpkg", "--purge", "neurond", seconds=DPKG_SECONDS)
    ours = ["-path", "/proc", "-o", "-path", "/sys", "-o", "-path", "/checks", "-o", "-path", "/var/log"]
    found = run("find", "/", "(", *ours, ")", "-prune", "-o", "-name", "*neurond*", "-print")
    expect(not found, f"left: {found}")
    units = run("systemctl", "list-units", "--all", "--plain", "--no-legend", "neurond*")
    expect(not units, f"systemd still knows {units}")
    return "nothing named neurond anywhere on the disk or in /run, and no unit"
