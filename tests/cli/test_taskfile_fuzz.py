"""Task files made up at random: there is a plan or a sentence, and never anything else.

The ordinary run tries few; NEUROND_TEST_LONG=1 tries many more.
"""

import copy
import json
import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neurond.cli.ecs.fields import FIELDS
from neurond.cli.ecs.placement import evaluate
from neurond.cli.ecs.text import BadTaskFile
from neurond.cli.taskfile import read_task
from tests.cli.test_taskfile import FILES, TRN1

LONG = os.environ.get("NEUROND_TEST_LONG") == "1"
BUDGET = settings(
    max_examples=20_000 if LONG else 100, deadline=None, suppress_health_check=list(HealthCheck), database=None
)

pytestmark = pytest.mark.timeout(6 * 3600 if LONG else 120)

SAMPLES = [json.loads((FILES / name).read_text("utf-8")) for name in ("train.json", "serve.json", "described.json")]
KEYS = sorted({part.removesuffix("[]") for path in FIELDS for part in path.split(".")})
WORDS = [
    "",
    "ALL",
    "/",
    "/dev/neuron0",
    "..",
    "START",
    "tcp",
    "host",
    "read",
    "NeuronDevice",
    "\0",
    "\ud800",
    "${X}",
    "0",
]

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    | st.sampled_from(WORDS)
)  # fmt: skip
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=6)
    ),
    max_leaves=20,
)


def plan_or_sentence(data: bytes) -> dict[str, Any] | str:
    """Read a file, and check what comes: a plan that can be sent, or a sentence."""
    try:
        read = read_task(data, TRN1)
    except BadTaskFile as error:
        sentence = str(error)
        assert sentence
        assert "Traceback" not in sentence
        return sentence
    json.dumps(read.plan, ensure_ascii=False).encode()
    assert len({"count", "chips", "all"} & read.plan.keys()) <= 1
    for container in read.plan["containers"]:
        if isinstance(container["chips"], list):
            assert {chip["chip"] for chip in container["chips"]} <= set(read.plan["chips"])
        assert not any("/dev/neuron" in device.split(":")[0] for device in container["options"].get("devices", ()))
        assert read.plan.get("all") or "privileged" not in container["options"]
    return read.plan


@BUDGET
@given(tree=trees)
def test_any_json(tree: Any) -> None:
    """Any JSON is a plan or refused."""
    plan_or_sentence(json.dumps(tree).encode())


@BUDGET
@given(containers=st.lists(st.dictionaries(st.sampled_from(KEYS), trees, max_size=4), max_size=3), more=trees)
def test_any_containers(containers: list[dict[str, Any]], more: Any) -> None:
    """Any container definitions are a plan or refused."""
    named = [{"name": f"c{number}", "image": "i"} | entry for number, entry in enumerate(containers)]
    document = {"family": "job", "containerDefinitions": named}
    plan_or_sentence(json.dumps(document | more if isinstance(more, dict) else document).encode())


def places(tree: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return each place in a tree: a container of values, and a key of it."""
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        found.append((tree, key))
        if isinstance(tree[key], dict | list):
            places(tree[key], found)
    return found


@BUDGET
@given(sample=st.sampled_from(SAMPLES), seed=st.integers(0, 2**32), value=trees | st.sampled_from([[], {}]))
def test_mutated_samples(sample: Any, seed: int, value: Any) -> None:
    """A sample in which something is replaced, removed, doubled or renamed is a plan or refused."""
    tree = copy.deepcopy(sample)
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 3)):
        if not (found := places(tree, [])):
            break
        place, key = chance.choice(found)
        match chance.randrange(4):
            case 0:
                place[key] = copy.deepcopy(value)
            case 1:
                del place[key]
            case 2 if isinstance(place, list):
                place.append(copy.deepcopy(place[key]))
            case _ if isinstance(place, dict):
                place[chance.choice(KEYS)] = place.pop(key)
    plan_or_sentence(json.dumps(tree).encode())


@BUDGET
@given(sample=st.sampled_from(sorted(FILES.iterdir())), seed=st.integers(0, 2**32), noise=st.binary(max_size=4))
def test_broken_text(sample: Any, seed: int, noise: bytes) -> None:
    """A file in which bytes are replaced or cut is a plan or refused."""
    data = bytearray(sample.read_bytes())
    chance = random.Random(seed)
    at = chance.randrange(len(data))
    data[at : at + chance.randint(0, 8)] = noise
    plan_or_sentence(bytes(data[: chance.randint(at, len(data))] if chance.random() < 0.3 else data))


@BUDGET
@given(data=st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes(data: bytes) -> None:
    """Any bytes are a plan or refused; few are a plan."""
    assert isinstance(plan_or_sentence(data), str)


TOKENS = [
    "attribute:ecs.instance-type", "attribute:x", "task:group", "==", "!=", "=~", "in", "!in", "exists", "and", "or",
    "not", "!", "&&", "||", "(", ")", "[", "]", ",", "a", "trn1.*", "trn1.32xlarge", " ", ">", "${x}",
]  # fmt: skip


@BUDGET
@given(tokens=st.lists(st.sampled_from(TOKENS) | st.text(max_size=3), max_size=20), between=st.sampled_from(["", " "]))
def test_any_expression(tokens: list[str], between: str) -> None:
    """Any expression is true, false or unknown."""
    assert evaluate(between.join(tokens), TRN1.attributes()) in {True, False, None}
