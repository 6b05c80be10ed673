"""Files that are no task definition, fields that are none, and the table of those that are."""

import json
from pathlib import Path
from typing import Any

import pytest

from neurond.cli.ecs.fields import FIELDS, OBJECTS, markdown
from neurond.cli.ecs.text import BadTaskFile, parse
from neurond.cli.taskfile import read_task
from tests.cli.test_taskfile import FILES, Object, container, definition, read, refusal, refused

README = Path(__file__).parents[2] / "README.md"


def text_refusal(data: bytes) -> str:
    """Return the sentence by which a text is refused."""
    with pytest.raises(BadTaskFile) as caught:
        read_task(data)
    return str(caught.value)


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("terraform.tf", "line 1, column 1: this is Terraform (HCL), and a task is read as JSON"),
        ("snippet.json", "line 7, column 13: something was left out here (...)"),
        ("commented.json", "line 2, column 24: JSON has no comments"),
        (
            "pod.yaml",
            "line 1, column 1: this is a Kubernetes file, which neurond does not run: use neurond container run",
        ),
        (
            "compose.yaml",
            "line 1, column 1: this is a compose file, which neurond does not run: use an ECS task definition",
        ),
        ("template.json", "Family: this is how CloudFormation writes it: here it is family"),
    ],
)
def test_samples_of_other_files(name: str, sentence: str) -> None:
    """What people bring by mistake is named, with line and column where it is no JSON."""
    assert text_refusal((FILES / name).read_bytes()).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "line 1, column 1: the file is empty"),
        (" \n ", "line 2, column 2: the file is empty"),
        ("{", "line 1, column 2: the text ends in the middle"),
        ('{"family": "a', "line 1, column 12: this is no JSON: unterminated string"),
        ('{"family": "a",}', "line 1, column 16: there is a comma too many before this }"),
        ('{"family": ["a",]}', "line 1, column 17: there is a comma too many before this ]"),
        ("{'family': 'a'}", "line 1, column 2: a text is in double quotes in JSON"),
        ('{"family": "a" /* b */}', "line 1, column 16: JSON has no comments"),
        ("# a\n{}", "line 1, column 1: JSON has no comments"),
        ('{\n  family = "a"\n}', "line 2, column 3: this is Terraform (HCL)"),
        ('{"family" = "a"}', "line 1, column 11: this is Terraform (HCL)"),
        ("family: a\n", "line 1, column 1: this is YAML"),
        ('{"family": "a"} {}', "line 1, column 17: this is no JSON: extra data"),
        ('{"family": NaN}', "it has a number that is none: NaN is no JSON"),
        ('{"cpu": 1' + "0" * 5000 + "}", "it has a number that is none: Exceeds the limit"),
        ("[" * 100_000, "it is nested too deep"),
        ('{"a":' * 100_000, "it is nested too deep"),
        ("null", "null is no task definition"),
        ("7", "the number 7 is no task definition"),
        ("[]", "a list stands where"),
        ('{"apiVersion": "v1", "kind": "Pod"}', "this is a Kubernetes object, which neurond does not run: use"),
        ('{"services": {}}', "this is a compose file, which neurond does not run: use"),
        ('{"Resources": {}}', "this is a CloudFormation template"),
        ('{"taskDefinition": "train:3"}', "taskDefinition: it only names a task definition"),
        ('{"cluster": "c", "taskDefinition": {}}', "cluster: no such field beside taskDefinition"),
        ('{"taskDefinition": []}', "taskDefinition: a list stands where an object"),
        ("{}", "family: this is missing"),
    ],
)
def test_texts_that_are_refused(text: str, sentence: str) -> None:
    """A text that is no task definition is refused with a sentence, and never with a traceback."""
    assert text_refusal(text.encode()).startswith(sentence)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"\xff", "it is no UTF-8 text: byte 0 is 0xff"),
        ("{}".encode("utf-16"), "it is UTF-16 text, as PowerShell writes it"),
        (b" " * (1 << 20) + b"{}", "it is longer than 1 MiB"),
    ],
)
def test_bytes_that_are_refused(data: bytes, sentence: str) -> None:
    """Bytes that are no text, or too many, are refused with a sentence."""
    assert text_refusal(data).startswith(sentence)


def test_a_byte_order_mark_is_no_hindrance() -> None:
    """Windows editors begin UTF-8 files with one."""
    assert read_task(b"\xef\xbb\xbf" + json.dumps(definition()).encode()).plan["name"] == "job"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"family": "a", "family": "b"}', "family"),
        ('{"tags": [{}, {"a": {"b": 1, "c": 2, "b": 1}}]}', "tags[1].a.b"),
        ('{"": 1, "": 2}', ""),
    ],
)
def test_a_key_given_twice_is_refused(text: str, path: str) -> None:
    """Of two values for a key neither is chosen in silence, wherever it is."""
    sentence = "this key is given twice: keep one of the two"
    assert text_refusal(text.encode()) == (f"{path}: {sentence}" if path else sentence)


def test_many_keys_given_twice_take_no_time() -> None:
    """The whole of a file of a MiB may be one object."""
    with pytest.raises(BadTaskFile):
        parse(b"{" + b",".join(b'"%d":0' % (n // 2) for n in range(80_000)) + b"}")


def test_sentences_are_short() -> None:
    """A key or a value of a MiB is not printed as a whole."""
    assert len(refusal(definition(**{"x" * 900_000: 1}))) < 1000
    assert len(refused(image="x y" * 300_000)) < 1000


# -- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (
            definition(containerDefinition=[]),
            "containerDefinition: ECS has no such field here: did you mean containerDefinitions?",
        ),
        (
            definition(container_definitions=[]),
            "container_definitions: ECS has no such field here: did you mean containerDefinitions?",
        ),
        (definition(zzz=1), "zzz: ECS has no such field here"),
        (definition(image="x"), "image: ECS has no such field here: it belongs to containerDefinitions[].image"),
        (
            definition(container(Memory=5)),
            "containerDefinitions[0].Memory: this is how CloudFormation writes it: here it is memory",
        ),
        (
            definition(container(linuxParameters={"devices": [{"hostpath": "/dev/neuron0"}]})),
            "containerDefinitions[0].linuxParameters.devices[0].hostpath: ECS has no such field here: did you mean",
        ),
        (
            definition(container(dependsOn=[{"containerName": "a", "when": "x"}])),
            "containerDefinitions[0].dependsOn[0].when: ",
        ),
    ],
)
def test_unknown_fields_are_refused(document: Object, sentence: str) -> None:
    """A field that ECS does not have is refused with its path, and with the one that was meant if one is like it."""
    assert refusal(document).startswith(sentence)


def around(path: str, value: Any) -> Object:
    """Return a task definition that has this value at a path of the table."""
    document = definition()
    place: Any = document
    *parents, last = path.split(".")
    for parent in parents:
        key = parent.removesuffix("[]")
        place = place.setdefault(key, [{}])[0] if parent.endswith("[]") else place.setdefault(key, {})
    place[last] = value
    return document


def fields(verdict: str) -> list[str]:
    """Return the paths of the table with this verdict."""
    return [path for path, field in FIELDS.items() if field.verdict == verdict]


def at(path: str) -> str:
    """Return a path of the table as it is in a file with one of each."""
    return path.replace("[]", "[0]")


@pytest.mark.parametrize("path", fields("refused"))
def test_fields_that_are_refused(path: str) -> None:
    """A field that the table refuses is refused with the table's reason, unless it asks for nothing."""
    asked = refusal(around(path, [{"x": 1}]))
    assert asked == f"{at(path)}: not supported: {FIELDS[path].why}"
    nothings: tuple[Any, ...] = (None, False, [], {})
    for nothing in nothings:
        with_nothing = around(path, nothing)
        try:
            read(with_nothing)
        except BadTaskFile as error:
            assert error.where != at(path)  # noqa: PT017 - another field may be missing beside it


EXAMPLES: dict[str, Any] = {"text": "x", "number": 9, "object": {"x": 1}, "any": {"x": 1}}


@pytest.mark.parametrize("path", fields("noted"))
def test_fields_that_are_noted(path: str) -> None:
    """A field that the table notes changes nothing, and is told with the table's words."""
    document = around(path, EXAMPLES[FIELDS[path].kind])
    assert f"{at(path)}: {FIELDS[path].why}" in read(document).notes
    plain = around(path, None)
    assert read(document).plan == read(plain).plan


@pytest.mark.parametrize("path", fields("ignored"))
def test_fields_that_are_ignored(path: str) -> None:
    """A field that the table ignores may hold anything, without a note."""
    documents = [around(path, value) for value in ({"x": [1]}, None)]
    for document in documents:
        if "portMappings" in path:
            document["containerDefinitions"][0]["portMappings"][0]["containerPort"] = 80
    with_field, without = map(read, documents)
    assert with_field == without
    assert with_field.notes == []


@pytest.mark.parametrize("path", fields("supported"))
def test_fields_that_are_supported_have_a_type(path: str) -> None:
    """A value of another type than the table's is refused with its path: nothing is taken that is not understood."""
    field = FIELDS[path]
    assert field.kind != "any"
    wrong: Any = 1.5 if field.kind != "number" else "x"
    sentence = refusal(around(path, wrong))
    assert sentence.startswith(f"{at(path)}: the ")


def test_the_table_is_whole() -> None:
    """Every object of the table is a field of another, and every list or object that is supported has its fields."""
    for path in OBJECTS:
        if path:
            assert FIELDS[path.removesuffix("[]")].kind == ("objects" if path.endswith("[]") else "object")
    for path, field in FIELDS.items():
        if field.verdict == "supported" and field.kind in {"object", "objects"}:
            assert path + ("[]" if field.kind == "objects" else "") in OBJECTS


def test_readme_has_the_table() -> None:
    """The table of README is the one that decides."""
    assert markdown() in README.read_text("utf-8")


def test_every_field_is_in_the_markdown() -> None:
    """The printed table leaves no field and no reason out."""
    lines = markdown().splitlines()
    for where, found in OBJECTS.items():
        for key, field in found.items():
            (line,) = [
                text
                for text in lines
                if text.startswith(f"| {f'`{where}`' if where else 'the task'} | {field.verdict} |")
            ]
            assert f"`{key}`" in line
            assert field.why in line


def test_reasons_are_given() -> None:
    """What is not supported has a reason."""
    assert all(field.why or field.verdict == "supported" for field in FIELDS.values())


def test_the_samples_are_all_used() -> None:
    """No sample lies about."""
    text = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_task*.py"))
    assert all(path.name in text for path in FILES.iterdir())


def test_an_object_where_a_list_belongs() -> None:
    """One container without its list is refused with a sentence."""
    document = {"family": "job", "containerDefinitions": container()}
    assert refusal(document) == "containerDefinitions: an object stands where a list […] belongs"
    assert refused(dependsOn={}) == "dependsOn: an object stands where a list […] belongs"
