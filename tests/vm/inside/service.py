"""The service itself: what it finds, what becomes of it, and that nothing of this touches a job."""

import json
from pathlib import Path

from .kit import (
    PARAMETERS,
    Container,
    Job,
    chips,
    expect,
    is_active,
    leases,
    load_module,
    mode_of,
    numbers,
    opens,
    property_of,
    run,
    until,
)


def chips_are_there_as_soon_as_the_module_is() -> str:
    """The daemon runs before the module is loaded, and has all chips as soon as they are there."""
    load_module()
    until("neurond has 16 chips", lambda: len(chips()) == 16)
    expect_type("trn1.32xlarge")
    links = chips()[0]["connected_to"]
    expect(links == [1, 3, 4, 12], f"chip 0 is linked to {links}")
    mode = mode_of("/dev/neuron0")
    expect(mode == "root:root 0666", f"by the driver's rule alone, a node is {mode}")
    return f"16 chips of a trn1.32xlarge, linked as a torus; nodes {mode}"


def other_instance_type_is_known() -> str:
    """On an inf2.48xlarge it finds 12 chips, linked as a ring."""
    load_module("chips=12")
    until("neurond has 12 chips", lambda: len(chips()) == 12)
    expect_type("inf2.48xlarge")
    links = chips()[0]["connected_to"]
    expect(links == [1, 11], f"chip 0 is linked to {links}")
    return "12 chips of an inf2.48xlarge, linked as a ring"


def expect_type(name: str) -> None:
    """Raise Failed if neurond takes this for another instance type than the DMI tables say."""
    told = run("neurond", "host", "describe")
    expect(f'"{name}"' in told, f"the instance type is not told: {told}")


def a_killed_daemon_is_back_with_all_leases() -> str:
    """After a SIGKILL a job and a container live on and have their leases, which end with them."""
    job, container = Job("job", "-n", "4"), Container("box", "-n", "4")
    before, pid = leases(), property_of("neurond", "MainPID")
    run("systemctl", "kill", "--signal=KILL", "neurond")
    until("systemd has started another", lambda: is_active("neurond") and property_of("neurond", "MainPID") != pid)
    same_as(before, job, container)
    job.end()
    container.end()
    states = {chip["state"] for chip in chips().values()}
    expect(states == {"free"}, f"after their end chips are {states}")
    return "job and container lived on with their leases, and all chips were free after their end"


def stop_and_restart_touch_no_job() -> str:
    """`systemctl restart` and `stop` leave a job and a container alone, and a later start has their leases."""
    job, container = Job("job", "-n", "4"), Container("box", "-n", "4")
    before = leases()
    run("systemctl", "restart", "neurond")
    same_as(before, job, container)
    run("systemctl", "stop", "neurond.socket", "neurond.service")
    said = run("neurond", "ls", code=69)
    expect(job.lives() and container.lives(), "a stop of the service ended a job")
    run("systemctl", "start", "neurond.socket", "neurond.service")
    same_as(before, job, container)
    return f"both lived on with their leases; in between ls says {said!r}"


def same_as(before: dict[str, dict[str, object]], job: Job, container: Container) -> None:
    """Raise Failed unless both live, have the leases that they had before and can open just their chips."""
    expect(job.lives(), "the job has ended")
    expect(container.lives(), "the container has ended")
    for name in (job.name, container.name):
        now = leases().get(name)
        expect(now, f"{name} has no lease any more")
        for what in ("lease", "chips", "state"):
            expect(now and now[what] == before[name][what], f"{name}: {what} was {before[name][what]}, is now {now}")
    opened = container.opens()
    expect(opened == container.chips(), f"the container can open {numbers(opened)}")
    until("the job's user can open its chips and no other", lambda: opens("member") == job.chips())


def docker_may_be_stopped() -> str:
    """With Docker stopped, processes lease as ever, and a container is refused in a sentence."""
    run("systemctl", "stop", "docker.service", "docker.socket")
    try:
        job = Job("job", "-n", "4")
        opened = job.opens()
        expect(opened == job.chips(), f"it can open {numbers(opened)}")
        job.end()
        said = run("neurond", "container", "run", "-n", "1", "busybox:checks", "true", code=125)
    finally:
        run("systemctl", "start", "docker")
    container = Container("box", "-n", "1")
    expect(container.lives(), "with Docker back, no container could be started")
    return f"a job had its 4 chips; a container is refused: {said!r}; and runs when Docker is back"


def reload_takes_settings_and_refuses_wrong_ones() -> str:
    """`systemctl reload` reads the settings again; wrong ones fail it, and the daemon goes on with what it has."""
    pid = property_of("neurond", "MainPID")
    run("systemctl", "reload", "neurond")
    wrong = Path("/etc/neurond/conf.d/wrong.toml")
    wrong.write_text("no_such_setting = 1\n")
    try:
        run("systemctl", "reload", "neurond", code=1)
    finally:
        wrong.unlink()
    run("systemctl", "reload", "neurond")
    expect(is_active("neurond") and property_of("neurond", "MainPID") == pid, "the daemon is not the same any more")
    journal = run("journalctl", "--unit=neurond", "--output=cat", "--lines=60")
    expect("no_such_setting" in journal, f"the journal does not say what is wrong: {journal}")
    return "reloaded, refused with the key's name in the journal, reloaded; the same daemon"


def journal_has_what_happened() -> str:
    """`journalctl -t neurond NEUROND_LEASE=ID` has the begin and the end of a lease, and the catalog explains them."""
    job = Job("job", "-n", "4")
    lease = leases()["job"]["lease"]
    job.end()
    query = ("journalctl", "--no-pager", "--identifier=neurond", f"NEUROND_LEASE={lease}")

    def events() -> set[str]:
        lines = run(*query, "--output=json", code=None).splitlines()
        return {json.loads(line).get("NEUROND_EVENT", "") for line in lines if line.startswith("{")}

    until("the journal has both", lambda: {"lease.granted", "lease.ended"} <= events())
    explained = run(*query, "--catalog", "--output=short").splitlines()
    expect(any(line.endswith("Defined-By: neurond") for line in explained), f"the catalog has nothing on {explained}")
    return f"{', '.join(sorted(events()))} of {lease}: {explained[0].partition(': ')[2]!r}"


def the_running_unit_is_confined() -> str:
    """`systemd-analyze security` rates the running service at 2.5 or better, and it has not been near its limits."""
    said = run("systemd-analyze", "security", "--no-pager", "--threshold=25", "neurond.service").splitlines()[-1]
    restarts = property_of("neurond", "NRestarts")
    memory = int(property_of("neurond", "MemoryCurrent")) // 1_000_000
    return f"{said.lstrip('→ ')}; it has {memory} MB, and was restarted {restarts} times in all"


def a_daemon_that_hangs_is_replaced() -> str:
    """A daemon that is stopped in its tracks is replaced by systemd's watchdog, and a job keeps its lease."""
    job = Job("job", "-n", "1")
    before, pid = leases(), property_of("neurond", "MainPID")
    run("systemctl", "kill", "--signal=STOP", "neurond")
    until("systemd has started another", lambda: is_active("neurond") and property_of("neurond", "MainPID") != pid, 300)
    expect(job.lives(), "the job has ended")
    until("the job has its lease", lambda: leases().get("job", {}).get("lease") == before["job"]["lease"])
    why = run("journalctl", "--unit=neurond", "--output=cat", "--grep=atchdog", "--lines=1")
    job.end()
    return f"{why!r}; the job lived on with its lease"


def doctor_finds_nothing_wrong() -> str:
    """On a machine as it should be, `neurond doctor` finds no error, and each warning has a fix."""
    findings = json.loads(run("neurond", "doctor", "--json", code=None))
    worse = [finding for finding in findings if finding["severity"] not in {"fine", "unseen"}]
    errors = [finding["sentence"] for finding in worse if finding["severity"] == "error"]
    expect(not errors, f"it finds {errors}")
    expect(all(finding["fix"] for finding in worse), f"no fix is told for one of {worse}")
    return f"{len(findings)} findings; warnings: {[finding['sentence'] for finding in worse]}"


def doctor_misses_a_chip() -> str:
    """A chip that an instance of this type should have, and is not there, is named by `neurond doctor`."""
    (PARAMETERS / "remove").write_text("5")
    until("neurond has 11 chips", lambda: len(chips()) == 11)
    findings = json.loads(run("neurond", "doctor", "--json", code=None))
    found = [finding["sentence"] for finding in findings if finding["severity"] in {"warning", "error"}]
    expect(any("5" in text and "chip" in text for text in found), f"it says nothing of chip 5, but: {found}")
    (PARAMETERS / "add").write_text("5")
    until("neurond has 12 chips", lambda: len(chips()) == 12)
    return "; ".join(text for text in found if "chip" in text)


def nodes_without_any_rule_are_as_the_kernel_made_them() -> str:
    """Without a rule of the driver, nodes are root's: a member opens its chips alone, and a stop leaves them 0600."""
    Path("/usr/lib/udev/rules.d/neuron-udev.rules").unlink()
    run("udevadm", "control", "--reload")
    run("modprobe", "--remove", "neuron")
    until("neurond has no chips", lambda: not chips())
    load_module("chips=12")
    until("neurond has 12 chips", lambda: len(chips()) == 12)
    job = Job("job", "-n", "1")
    expect(job.opens() == job.chips(), f"it has {numbers(job.chips())} and can open {numbers(job.opens())}")
    job.end()
    run("systemctl", "stop", "neurond.socket", "neurond.service")
    modes = {mode_of(str(node)) for node in Path("/dev").glob("neuron*")}
    run("systemctl", "start", "neurond.socket", "neurond.service")
    expect(modes == {"root:root 0600"}, f"nodes are {modes}")
    return "a member opened just its chip; after a stop all are root:root 0600"
