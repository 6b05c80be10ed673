"""The service: what it finds, and what becomes of it."""

from inside.kit import chips, expect, load_module, mode_of, run, until


def chips_are_there_as_soon_as_the_module_is() -> str:
    """The daemon runs before the module is loaded, and has all chips as soon as they are there."""
    load_module()
    until("neurond has 16 chips", lambda: len(chips()) == 16)
    told = run("neurond", "host", "describe")
    expect('"trn1.32xlarge"' in told, f"the instance type is not told: {told}")
    linked = {tuple(chip["connected_to"]) for chip in chips().values()}
    expect((1, 3, 4, 12) in linked, f"the links are {linked}")
    mode = mode_of("/dev/neuron0")
    expect(mode == "root:root 0600", f"without a rule of the driver or of ours, a node is {mode}")
    return f"16 chips of a trn1.32xlarge, linked as a torus, nodes {mode}"


def other_instance_type_is_known() -> str:
    """On an inf2.48xlarge it finds 12 chips, linked as a ring."""
    load_module("chips=12")
    until("neurond has 12 chips", lambda: len(chips()) == 12)
    told = run("neurond", "host", "describe")
    expect('"inf2.48xlarge"' in told, f"the instance type is not told: {told}")
    links = chips()[0]["connected_to"]
    expect(links == [1, 11], f"chip 0 is linked to {links}")
    return f"12 chips of an inf2.48xlarge, linked as a ring"
