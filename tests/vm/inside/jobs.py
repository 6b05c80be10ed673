"""Processes on leased chips, where the nodes are open to all and where the rule of the package shuts them."""

from .kit import OPEN_ALL, Job, chips, expect, leases, mode_of, numbers, opened_in, opens, run, until


def open_nodes_make_leases_advisory() -> str:
    """With the driver's 0666 a member of neuron leases 4 chips and could open all, as `neurond ps` says."""
    job = Job("job", "-n", "4")
    expect(len(job.chips()) == 4, f"its lease has {numbers(job.chips())}")
    level = leases()["job"]["enforcement"]
    expect(level == "advisory", f"the lease is said to be enforced by {level}")
    expect(len(job.opens()) == 16, f"it could open {numbers(job.opens())}")
    return f"chips {numbers(job.chips())} leased, advisory"


def the_rule_shuts_the_nodes() -> str:
    """The enforced rule, chosen by the commands that it names, makes the nodes 0660 root:neuron."""
    run("ln", "-s", "/usr/share/neurond/udev/60-neurond-enforced.rules", "/etc/udev/rules.d/")
    run("udevadm", "control", "--reload")
    run("udevadm", "trigger", "--settle", "--subsystem-match=neuron_device")
    run("systemctl", "restart", "neurond")
    modes = {mode_of(chip["node"]) for chip in chips().values()}
    expect(modes == {"root:neuron 0660"}, f"nodes are {modes}")
    until("a member without a lease opens none", lambda: not opens("member"))
    return "all 16 nodes root:neuron 0660, and a member without a lease can open none"


def a_member_opens_exactly_its_chips() -> str:
    """A member of neuron leases 4 chips, opens these and no other, and none after the end of the lease."""
    job = Job("job", "-n", "4")
    opened = job.opens()
    expect(len(opened) == 4, f"it could open {numbers(opened)}")
    expect(opened == job.chips(), f"its lease has {numbers(job.chips())}, it could open {numbers(opened)}")
    level = leases()["job"]["enforcement"]
    expect(level == "acl", f"the lease is said to be enforced by {level}")
    job.end()
    after = opens("member")
    expect(not after, f"after its end {numbers(after)} can be opened")
    return f"opened {numbers(opened)} of 16, and none after the end"


def a_stranger_is_refused() -> str:
    """Who is not in the group neuron can lease nothing, and open nothing."""
    said = run("neurond", "run", "-n", "1", "--", "true", code=77, user="stranger")
    opened = opens("stranger")
    expect(not opened, f"it can open {numbers(opened)}")
    return f"77: {said}"


def run_enforce_confines_root() -> str:
    """`run --enforce` as root runs in a scope of the real systemd that opens its chips and no other, for good."""
    job = Job("job", "-n", "4", "--enforce", user="root")
    opened = job.opens()
    expect(opened == job.chips(), f"its lease has {numbers(job.chips())}, it could open {numbers(opened)}")
    level = leases()["job"]["enforcement"]
    expect(level == "cgroup", f"the lease is said to be enforced by {level}")
    scope = run("cat", f"/proc/{leases()['job']['pid']}/cgroup")
    expect(scope.endswith(".scope"), f"it is in {scope}")
    run("systemctl", "daemon-reload")
    join = f"echo $$ >/sys/fs/cgroup{scope.removeprefix('0::')}/cgroup.procs"
    opened = opened_in(run("sh", "-c", f"{join}\n{OPEN_ALL}"))
    expect(opened == job.chips(), f"after systemctl daemon-reload it can open {numbers(opened)}")
    job.end()
    return f"opened {numbers(opened)} of 16, in {scope.rpartition('/')[2]}"
