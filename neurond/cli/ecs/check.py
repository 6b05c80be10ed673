"""A task definition against the table of fields: no unknown field, none that is refused, and each of its type."""

import difflib
import re
from typing import Any

from neurond.cli.ecs.fields import CAPABILITY, FIELDS, MOST, OBJECTS, Field
from neurond.cli.ecs.text import BadTaskFile, joined

PLACEHOLDER = re.compile(r"\$\{|\{\{|<[A-Za-z_-]+>")
"""What a template leaves open: `${...}`, `{{...}}` or `<ACCOUNT>`."""


def checked(document: Any, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return a task definition without what is not given in truth, and notes. Raises BadTaskFile.

    What asks for nothing (null, and of a refused field false, [] and {}) is taken as not given, as
    describe-task-definition and the console print such fields. All that is left is of the type that the table says.
    """
    found: list[str] = []
    return _object(document, where, "", found), found


def _object(value: Any, where: str, pattern: str, found: list[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadTaskFile(where, f"{kind_of(value)} stands where an object {{…}} belongs")
    fields = OBJECTS[pattern]
    result = {}
    for key, item in value.items():
        here = joined(where, key)
        field = fields.get(key)
        if field is None:
            raise BadTaskFile(here, unknown(key, pattern))
        if item is None or field.verdict == "ignored":
            continue
        if field.verdict == "refused":
            if item is False or item in ([], {}):
                continue
            raise BadTaskFile(here, f"not supported: {field.why}")
        result[key] = _value(item, field, here, joined(pattern, key), found)
        if field.verdict == "noted" and item not in ("", [], {}):
            found.append(f"{here}: {field.why}")
    for key, field in fields.items():
        if field.required and key not in result:
            raise BadTaskFile(joined(where, key), "this is missing")
    return result


def _value(value: Any, field: Field, where: str, pattern: str, found: list[str]) -> Any:
    match field.kind:
        case "text" | "path":
            return _text(value, field, where)
        case "number":
            return _number(value, field, where)
        case "flag" if not isinstance(value, bool):
            raise BadTaskFile(where, f"{kind_of(value)} stands where true or false belongs")
        case "map":
            return _map(value, field, where)
        case "object" if pattern in OBJECTS:
            return _object(value, where, pattern, found)
        case "texts" | "objects":
            return _list(value, field, where, pattern, found)
    return value


def _map(value: Any, field: Field, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise BadTaskFile(where, f"{kind_of(value)} stands where an object {{…}} belongs")
    given = {key: item for key, item in value.items() if item is not None}
    return {_text(key, field, where): _text(item, field, joined(where, key)) for key, item in given.items()}


def _list(value: Any, field: Field, where: str, pattern: str, found: list[str]) -> list[Any]:
    if not isinstance(value, list):
        raise BadTaskFile(where, f"{kind_of(value)} stands where a list […] belongs")
    if not field.least <= len(value) <= field.most:
        limits = f"at least {field.least}" if field.most == MOST else f"{field.least} to {field.most}"
        raise BadTaskFile(where, f"it has {len(value)} entries, and {limits} belong here")
    each = [(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if field.kind == "texts":
        return [_text(item, field, here) for item, here in each]
    return [_object(item, here, f"{pattern}[]", found) for item, here in each]


def _number(value: Any, field: Field, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        hint = f": write {value}, without quotes" if isinstance(value, str) and value.isdecimal() else ""
        raise BadTaskFile(where, f"{kind_of(value)} stands where a whole number belongs{hint}")
    if not field.least <= value <= field.most:
        raise BadTaskFile(where, f"{value} is not possible: {field.least} to {field.most} is")
    return value


def _text(value: Any, field: Field, where: str) -> str:
    if not isinstance(value, str):
        hint = f': write "{value}", in quotes' if isinstance(value, int) and not isinstance(value, bool) else ""
        raise BadTaskFile(where, f"{kind_of(value)} stands where a text belongs{hint}")
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
        raise BadTaskFile(where, "it has a character that no text has (a NUL, or half of a pair)")
    if field.choices and value not in field.choices:
        right = next((choice for choice in field.choices if choice.lower() == value.lower()), "")
        hint = f"ECS writes it {right}" if right else f"possible: {', '.join(field.choices)}"
        raise BadTaskFile(where, f"{value!r} is not possible; {hint}")
    if field.kind == "path":
        return _path(value, where)
    if field.form and PLACEHOLDER.search(value):
        raise BadTaskFile(where, f"{value!r} still has a placeholder in it: fill it in first")
    if field.form and not re.fullmatch(field.form, value):
        hint = f": write {value.upper().removeprefix('CAP_')}" if field.form == CAPABILITY else f" ({field.form})"
        raise BadTaskFile(where, f"{value!r} is not of the form that ECS has{hint}")
    return value


def _path(value: str, where: str) -> str:
    if PLACEHOLDER.search(value):
        raise BadTaskFile(where, f"{value!r} still has a placeholder in it: fill it in first")
    if not value.startswith("/"):
        raise BadTaskFile(where, f"{value!r} is no absolute path: it must begin with /")
    parts = value.rstrip("/").split("/")[1:]
    if {"", ".", ".."} & set(parts):
        raise BadTaskFile(where, f"{value!r} must be a plain path, without .. or // in it")
    if ":" in value:
        raise BadTaskFile(where, f"{value!r} has a colon, which Docker takes for the end of the path")
    return "/" + "/".join(parts)


def kind_of(value: Any) -> str:
    """Say what kind of JSON value this is."""
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    return "null" if value is None else "a list" if isinstance(value, list) else "an object"


def unknown(key: str, pattern: str) -> str:
    """Say what is wrong with a key that no field has."""
    names = list(OBJECTS[pattern])
    alike = {name.lower(): name for name in names}
    same = alike.get(key.replace("_", "").replace("-", "").lower())
    if same and key[:1].isupper():
        return f"this is how CloudFormation writes it: here it is {same}, as aws ecs register-task-definition takes it"
    near = [same] if same else difflib.get_close_matches(key.lower()[:100], alike, 1, 0.7)
    if near:
        return f"ECS has no such field here: did you mean {alike.get(near[0], near[0])}?"
    elsewhere = next((path for path in FIELDS if path.rpartition(".")[2] == key), None)
    return "ECS has no such field here" + (f": it belongs to {elsewhere}" if elsewhere else "")
