"""Whether a task is meant for this host: constraints, instance requirements, platform."""

import json
from typing import Any

import pytest

from neurond.cli.ecs.placement import Host, evaluate
from neurond.cli.taskfile import read_task
from tests.cli.test_taskfile import Object, container, definition, read, refusal

TRN1 = Host("trn1.32xlarge", "x86_64")
UNKNOWN = Host("unknown", "aarch64")
ATTRIBUTES = TRN1.attributes()

TYPE = "attribute:ecs.instance-type"
ZONE = "attribute:ecs.availability-zone == eu-north-1a"
YES, NO = f"{TYPE} == trn1.32xlarge", f"{TYPE} == inf2.xlarge"


def constrained(expression: str) -> Object:
    """Return a task with a constraint."""
    return definition(placementConstraints=[{"type": "memberOf", "expression": expression}])


# -- the query language -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        (YES, True),
        (NO, False),
        (f"{TYPE}==trn1.32xlarge", True),
        (f"{TYPE} equals trn1.32xlarge", True),
        (f"{TYPE} != trn1.32xlarge", False),
        (f"{TYPE} not_equals inf2.xlarge", True),
        (f"{TYPE} =~ trn1.*", True),
        (f"{TYPE} =~ trn", False),
        (f"{TYPE} matches (trn1|trn2)\\..*", True),
        (f"({TYPE} =~ (trn1|trn2)\\..*)", True),
        (f"{TYPE} !~ inf.*", True),
        (f"{TYPE} not_matches trn.*", False),
        (f"{TYPE} in [trn1.2xlarge, trn1.32xlarge]", True),
        (f"{TYPE} in [trn1.2xlarge,inf2.xlarge]", False),
        (f"{TYPE} in []", False),
        (f"{TYPE} !in [trn1.32xlarge]", False),
        (f"{TYPE} not_in [inf2.xlarge]", True),
        (f"{TYPE} exists", True),
        (f"{TYPE} !exists", False),
        (f"{TYPE} not_exists", False),
        ("attribute:ecs.os-type == linux", True),
        ("attribute:ecs.os-type == windows", False),
        ("attribute:ecs.os-family == LINUX", True),
        ("attribute:ecs.cpu-architecture == x86_64", True),
        (f"{YES} and attribute:ecs.os-type == linux", True),
        (f"{YES} && {NO}", False),
        (f"{YES} || {NO}", True),
        (f"{NO} or {NO}", False),
        (f"not({NO})", True),
        (f"!({YES})", False),
        (f"not {NO} and {YES}", True),
        (f"{NO} and {NO} or {YES}", True),
        (f"{NO} and ({NO} or {YES})", False),
        (f"  ( ( {YES} ) )  ", True),
    ],
)
def test_what_can_be_told(expression: str, answer: bool) -> None:
    """What an expression asks of the attributes of this host is answered."""
    assert evaluate(expression, ATTRIBUTES) is answer


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        (ZONE, None),
        (f"not ({ZONE})", None),
        (f"{ZONE} and {YES}", None),
        (f"{ZONE} and {NO}", False),
        (f"{ZONE} or {YES}", True),
        (f"{ZONE} or {NO}", None),
        ("attribute:stack exists", None),
        ("attribute:stack !exists", None),
        ("attribute:stack in [a, b]", None),
        ("attribute:stack =~ a.*", None),
        ("task:group == database", None),
        ("runningTasksCount > 2", None),
        ("agentVersion >= 1.40.0", None),
        (f"{TYPE} > a", None),
        (f"{TYPE} like trn1", None),
    ],
)
def test_what_only_a_cluster_knows(expression: str, answer: bool | None) -> None:
    """An attribute that this host does not know makes the answer unknown, unless the rest decides."""
    assert evaluate(expression, ATTRIBUTES) is answer


@pytest.mark.parametrize(
    "expression",
    [
        "",
        " ",
        "(",
        ")",
        TYPE,
        f"{TYPE} ==",
        f"{TYPE} == a b",
        f"({YES}",
        f"{YES})",
        f"{YES} and",
        "and",
        "!",
        "==",
        f"{TYPE} in a",
        f"{TYPE} in [a",
        "${CONSTRAINT}",
        f"{TYPE} =~ (",
        f"{TYPE} =~ a{{99999999999}}",
        f"{TYPE} =~ [[a]&&b]",
        f"{TYPE} =~ {'(.*)*' * 15}x",
        f"{TYPE} =~ {'.*' * 50}x",
        "(" * 1000,
        "!" * 1000,
        "x" * 3000,
    ],
)
def test_what_cannot_be_read(expression: str) -> None:
    """An expression that is none, or that goes beyond what a person writes, is unknown, and nothing breaks."""
    assert evaluate(expression, ATTRIBUTES) is None


def test_a_constraint_for_another_host_is_refused_with_both_values() -> None:
    """What the task asks for and what this host has are both said."""
    assert refusal(constrained(NO)) == (
        "placementConstraints[0].expression: the task asks for a host with attribute:ecs.instance-type == inf2.xlarge, "
        "and this one has ecs.instance-type trn1.32xlarge"
    )


def test_a_constraint_for_this_host_is_no_note() -> None:
    """What was checked and holds need not be told."""
    assert read(constrained(YES)).notes == []


@pytest.mark.parametrize(
    ("expression", "host", "why"),
    [
        (ZONE, TRN1, f"not checked, as this host can't tell: {ZONE}"),
        (YES, UNKNOWN, f"not checked, as this host can't tell: {YES}"),
        (YES, None, "not checked, as no daemon answers that knows this host"),
    ],
)
def test_a_constraint_that_is_not_checked_is_noted(expression: str, host: Host | None, why: str) -> None:
    """A constraint is never dropped in silence."""
    assert read(constrained(expression), host).notes == [f"placementConstraints[0].expression: {why}"]


def test_distinct_instance_is_refused() -> None:
    """A task definition has constraints of type memberOf only."""
    document = definition(placementConstraints=[{"type": "distinctInstance"}])
    assert refusal(document).startswith("placementConstraints[0].type: 'distinctInstance' is not possible")


# -- instance requirements --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"allowedInstanceTypes": ["inf*", "trn*"]}, ""),
        ({"allowedInstanceTypes": ["trn1.32xlarge"]}, ""),
        ({"allowedInstanceTypes": []}, ""),
        (
            {"allowedInstanceTypes": ["inf*", "trn2.*"]},
            "the task asks for inf*, trn2.*, and this host is a trn1.32xlarge",
        ),
        ({"allowedInstanceTypes": ["trn1.32xlarg?"]}, "the task asks for trn1.32xlarg?"),
        ({"allowedInstanceTypes": ["[t]rn1*"]}, "the task asks for [t]rn1*"),
        ({"excludedInstanceTypes": ["trn1.*"]}, "the task excludes trn1.*, and this host is a trn1.32xlarge"),
        ({"acceleratorManufacturers": ["amazon-web-services"]}, ""),
        ({"acceleratorManufacturers": ["nvidia"]}, "the task asks for chips of nvidia"),
        ({"acceleratorNames": ["trainium", "trainium2"]}, ""),
        ({"acceleratorNames": ["inferentia2"]}, "the task asks for inferentia2, and a trn1.32xlarge has trainium"),
        ({"acceleratorCount": {"min": 1}}, ""),
        ({"acceleratorCount": {"min": 16, "max": 16}}, ""),
        ({"acceleratorCount": {"max": 4}}, "the task asks for 0 to 4, and a trn1.32xlarge has 16"),
    ],
)
def test_instance_requirements(wanted: dict[str, Any], why: str) -> None:
    """Requirements on type, maker, name and number of chips are held against this host."""
    document = definition(instanceRequirements=wanted)
    if why:
        (name,) = wanted
        assert refusal(document).startswith(f"instanceRequirements.{name}: {why}")
    else:
        assert read(document).notes == []


def test_requirements_that_cannot_be_checked_are_noted() -> None:
    """Without a known type nothing is refused; requirements that are not of chips are noted each."""
    document = definition(instanceRequirements={"acceleratorNames": ["gaudi"], "memoryMiB": {"min": 1}})
    assert read(document, UNKNOWN).notes == [
        "instanceRequirements.memoryMiB: not checked against this host",
        "instanceRequirements: not checked, as the type of this host is not known",
    ]
    assert read(document, Host("trn9.metal", "x86_64")).notes[1] == (
        "instanceRequirements: accelerators are not checked, as trn9.metal is not in the catalog"
    )


# -- platform ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "fine"),
    [
        (["EC2"], True),
        (["MANAGED_INSTANCES"], True),
        (["EXTERNAL"], True),
        (["FARGATE", "EC2"], True),
        ([], True),
        (["FARGATE"], False),
    ],
)
def test_compatibilities(given: list[str], *, fine: bool) -> None:
    """A task for Fargate alone is refused: there are no Neuron chips."""
    document = definition(requiresCompatibilities=given)
    if fine:
        assert read(document).notes == []
    else:
        assert refusal(document) == "requiresCompatibilities: FARGATE has no Neuron chips: add EC2"


def test_compatibility_in_lower_case_is_refused_with_a_hint() -> None:
    """The right spelling is said."""
    assert refusal(definition(requiresCompatibilities=["ec2"])).endswith("'ec2' is not possible; ECS writes it EC2")


@pytest.mark.parametrize(
    ("platform", "host", "sentence"),
    [
        ({"cpuArchitecture": "X86_64"}, TRN1, ""),
        ({"cpuArchitecture": "ARM64"}, UNKNOWN, ""),
        ({"cpuArchitecture": "ARM64"}, TRN1, "cpuArchitecture: the task asks for ARM64, and this host has X86_64"),
        ({"operatingSystemFamily": "LINUX"}, TRN1, ""),
        (
            {"operatingSystemFamily": "WINDOWS_SERVER_2022_CORE"},
            TRN1,
            "operatingSystemFamily: the task asks for WINDOWS_SERVER_2022_CORE, and this host has LINUX",
        ),
    ],
)
def test_platform(platform: dict[str, str], host: Host, sentence: str) -> None:
    """Architecture and system are those of this host, or the task is refused."""
    document = definition(runtimePlatform=platform)
    if sentence:
        assert refusal(document, host) == f"runtimePlatform.{sentence}"
    else:
        assert read(document, host).notes == []


def test_platform_is_noted_where_no_host_is_known() -> None:
    """Without a daemon the architecture is not checked, which is noted."""
    document = definition(container(), runtimePlatform={"cpuArchitecture": "ARM64"})
    (note,) = read_task(json.dumps(document).encode()).notes
    assert note.startswith("runtimePlatform.cpuArchitecture: not checked")
