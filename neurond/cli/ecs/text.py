"""The text of a task definition as a tree of JSON, and a sentence with line and column for what is no JSON.

People bring what they have: a snippet out of Terraform, a page's example with `...` in it, a compose file. Each of
these is known by its beginning or by what stands where the text stops to be JSON, and told what to use instead.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

MOST_BYTES = 1 << 20
"""Longest file that is read. ECS itself takes 64 KiB."""
REGISTER = "aws ecs describe-task-definition --task-definition NAME prints one that is registered"


class BadTaskFile(Exception):
    """The file is refused. `where` is the JSON path of what is wrong, or empty; the text is one sentence."""

    def __init__(self, where: str, sentence: str) -> None:
        where, sentence = short(where), short(sentence)
        super().__init__(f"{where}: {sentence}" if where else sentence)
        self.where = where


class Pairs(dict[str, Any]):
    """A JSON object that remembers a key which it was given twice."""

    twice: str | None = None


def parse(data: bytes) -> Any:
    """Return the tree of a JSON text. Raises BadTaskFile."""
    text = decode(data)
    try:
        tree = json.loads(text, object_pairs_hook=_pairs, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise BadTaskFile("", f"{where}: {_what_is_it(text, error)}") from None
    except RecursionError:
        raise BadTaskFile("", "it is nested too deep to be a task definition") from None
    except ValueError as error:  # a number of thousands of digits, or NaN
        raise BadTaskFile("", f"it has a number that is none: {str(error).partition(';')[0]}") from None
    for where, pairs in _objects(tree):
        if pairs.twice is not None:
            raise BadTaskFile(joined(where, pairs.twice), "this key is given twice: keep one of the two")
    return tree


def decode(data: bytes) -> str:
    """Return the bytes of a file as text. Raises BadTaskFile."""
    if len(data) > MOST_BYTES:
        raise BadTaskFile("", "it is longer than 1 MiB, which no task definition is")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadTaskFile("", "it is UTF-16 text, as PowerShell writes it: save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadTaskFile("", f"it is no UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from None


def joined(where: str, key: str) -> str:
    """Return the JSON path of a key of the object at `where`."""
    return f"{where}.{key}" if where else key


def short(text: str, most: int = 400) -> str:
    """Cut a text out of a file to what a person reads."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def _pairs(pairs: list[tuple[str, Any]]) -> Pairs:
    made = Pairs(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                made.twice = key
            seen.add(key)
    return made


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _objects(tree: Any) -> Iterator[tuple[str, Pairs]]:
    """Yield every object of a tree with its path, with a stack of its own: the tree may be deep."""
    todo = [("", tree)]
    while todo:
        where, value = todo.pop()
        if isinstance(value, Pairs):
            yield where, value
            todo += [(joined(where, key), item) for key, item in value.items()]
        elif isinstance(value, list):
            todo += [(f"{where}[{number}]", item) for number, item in enumerate(value)]


HCL = f"this is Terraform (HCL), and a task is read as JSON: {REGISTER}"
YAML = "this is YAML, and a task is read as JSON"
CLUSTER = "this is a Kubernetes file, which neurond does not run: use neurond container run, or an ECS task definition"
COMPOSE = "this is a compose file, which neurond does not run: use an ECS task definition, or neurond container run"

ANYWHERE = (
    (r"^[ \t]*(resource|module|variable|locals|data|provider|terraform)\b[^\n:]*\{|\bjsonencode\s*\(", HCL),
    (r"^(apiVersion|kind):", CLUSTER),
    (r"^services:", COMPOSE),
    (r"^(family|containerDefinitions|ContainerDefinitions|Resources|AWSTemplateFormatVersion):", YAML),
)
"""What tells other kinds of file, wherever it stands in the text."""

HERE = (
    (r'[\w"]*\s*=|<<', HCL),
    (r"//|/\*|#", "JSON has no comments: take this one out"),
    (r"\.\.\.|…", "something was left out here (...): the whole task definition is needed"),
    (r"'", "a text is in double quotes in JSON, not in single ones"),
    (r"$", "the text ends in the middle"),
)
"""What stands where the text stops to be JSON."""


def _what_is_it(text: str, error: json.JSONDecodeError) -> str:
    """Say what a text is that is no JSON."""
    if not text.strip():
        return "the file is empty"
    here = text[error.pos : error.pos + 80].lstrip()
    for pattern, sentence in ANYWHERE:
        if re.search(pattern, text, re.MULTILINE):
            return sentence
    for pattern, sentence in HERE:
        if re.match(pattern, here):
            return sentence
    if here[0] in "]}" and text[: error.pos].rstrip().endswith(","):
        return f"there is a comma too many before this {here[0]}"
    return f"this is no JSON: {error.msg[:1].lower()}{error.msg[1:]}"
