"""Chips that go and come: single ones, by a parameter of the module, and all with it."""

from .kit import (
    PARAMETERS,
    Container,
    Job,
    chips,
    expect,
    leases,
    load_module,
    mode_of,
    numbers,
    opens,
    run,
    state_of,
    until,
)


def a_leased_chip_goes_and_comes_back() -> str:
    """A leased chip that vanishes is lost, and still its lease's; when it is back all is as before."""
    job, container = Job("job", "-n", "4"), Container("box", "-n", "4")
    gone, boxed = min(job.chips()), min(container.chips())
    for chip in (gone, boxed):
        (PARAMETERS / "remove").write_text(str(chip))
        until(f"chip {chip} is lost", lambda chip=chip: state_of(chip) == "lost")  # type: ignore[misc]
    expect(gone in leases()["job"]["lost"], f"the lease does not say that chip {gone} is lost: {leases()['job']}")
    said = run("neurond", "run", "--chips", str(gone), "--no-wait", "--", "true", code=66, user="member")
    for chip in (gone, boxed):
        (PARAMETERS / "add").write_text(str(chip))
        until(f"chip {chip} is its lease's again", lambda chip=chip: state_of(chip) == "leased")  # type: ignore[misc]
    until(f"the node of chip {gone} is shut", lambda: mode_of(f"/dev/neuron{gone}") == "root:neuron 0660")
    until("the job's user can open its chips, and no other", lambda: opens("member") == job.chips())
    opened = container.opens()
    expect(opened == container.chips(), f"the container can open {numbers(opened)}")
    return f"chips {gone} and {boxed} lost ({said!r}), then leased as before, and opened by their holders alone"


def the_module_can_be_reloaded() -> str:
    """The daemon keeps no chip open: without leases the module goes, and comes back with other numbers."""
    before = {chip["device"].partition(":")[0] for chip in chips().values()}
    run("modprobe", "--remove", "neuron")
    until("neurond has no chips", lambda: not chips())
    load_module("major=240")
    until(
        "neurond has 16 chips with their new numbers",
        lambda: [chip["device"] for _, chip in sorted(chips().items())] == [f"240:{minor}" for minor in range(16)],
    )
    job, container = Job("job", "-n", "4"), Container("box", "-n", "4")
    expect(job.opens() == job.chips(), f"a job can open {numbers(job.opens())}")
    opened = container.opens()
    expect(opened == container.chips(), f"a container can open {numbers(opened)}")
    return f"16 chips, of major {', '.join(before)} and then of 240; a job and a container open exactly theirs"
