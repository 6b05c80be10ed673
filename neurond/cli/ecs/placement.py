"""Whether a task may run on this host: placement constraints, instance requirements, platform.

A constraint is an expression in the query language of ECS clusters. What it asks about this host is answered; what only
a cluster knows (a zone, an attribute of one's own) is unknown, and the answer with it, unless the rest decides: a task
is refused only where it is sure that it is not meant for this host.
"""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from neurond.catalog import look_up
from neurond.cli.ecs.text import BadTaskFile, joined, short

LONGEST, DEEPEST = 2000, 40
"""Characters of an expression, and parentheses within each other, that are looked at."""
MOST_REPEATS, REPEATED_GROUP = 6, re.compile(r"\)[*+{]")
"""What a regular expression may have without taking for ever to fail: such a one is not tried."""
ACCELERATORS = {
    "Inferentia": "inferentia",
    "Inferentia2": "inferentia2",
    "Trainium1": "trainium",
    "Trainium2": "trainium2",
}
"""Names that EC2's instance requirements give the chips of the catalog."""
ARCHITECTURES = {"x86_64": "X86_64", "aarch64": "ARM64"}
"""ECS's name of what the kernel calls the machine."""


@dataclass(frozen=True, slots=True)
class Host:
    """What a task may ask about a host: its EC2 instance type (or "unknown"), and the kernel's name of the machine."""

    instance_type: str
    machine: str

    def attributes(self) -> dict[str, str]:
        """Return the attributes that the ECS agent would give this host, as far as they are known."""
        machine = {"aarch64": "arm64"}.get(self.machine, self.machine)
        found = {"ecs.os-type": "linux", "ecs.os-family": "LINUX", "ecs.cpu-architecture": machine}
        if self.instance_type not in {"", "unknown"}:
            found["ecs.instance-type"] = self.instance_type
        return found


def check_host(document: Mapping[str, Any], where: str, host: Host | None) -> list[str]:
    """Check that a task definition may run on this host; return notes on what can't be checked. Raises BadTaskFile."""
    found = []
    compatible = document.get("requiresCompatibilities") or []
    if compatible and not set(compatible) - {"FARGATE"}:
        raise BadTaskFile(joined(where, "requiresCompatibilities"), "FARGATE has no Neuron chips: add EC2")
    for number, constraint in enumerate(document.get("placementConstraints") or ()):
        here = f"{joined(where, 'placementConstraints')}[{number}].expression"
        found += _constraint(constraint.get("expression", ""), here, host)
    found += _requirements(document.get("instanceRequirements") or {}, joined(where, "instanceRequirements"), host)
    return found + _platform(document.get("runtimePlatform") or {}, joined(where, "runtimePlatform"), host)


def _constraint(expression: str, where: str, host: Host | None) -> list[str]:
    if host is None:
        return [f"{where}: not checked, as no daemon answers that knows this host"]
    attributes = host.attributes()
    answer = evaluate(expression, attributes)
    if answer is None:
        return [f"{where}: not checked, as this host can't tell: {short(expression)}"]
    if not answer:
        named = [name for name in attributes if name in expression] or list(attributes)
        here = ", ".join(f"{name} {attributes[name]}" for name in named)
        raise BadTaskFile(where, f"the task asks for a host with {expression}, and this one has {here}")
    return []


def _requirements(wanted: Mapping[str, Any], where: str, host: Host | None) -> list[str]:
    if not wanted:
        return []
    if host is None or host.instance_type in {"", "unknown"}:
        return [f"{where}: not checked, as the type of this host is not known"]
    mine = host.instance_type
    found = []
    allowed, excluded = wanted.get("allowedInstanceTypes"), wanted.get("excludedInstanceTypes") or ()
    if allowed and not any(_like(mine, pattern) for pattern in allowed):
        sentence = f"the task asks for {', '.join(allowed)}, and this host is a {mine}"
        raise BadTaskFile(f"{where}.allowedInstanceTypes", sentence)
    if any(_like(mine, pattern) for pattern in excluded):
        sentence = f"the task excludes {', '.join(excluded)}, and this host is a {mine}"
        raise BadTaskFile(f"{where}.excludedInstanceTypes", sentence)
    makers = wanted.get("acceleratorManufacturers")
    if makers and "amazon-web-services" not in makers:
        sentence = f"the task asks for chips of {', '.join(makers)}, and those here are of amazon-web-services"
        raise BadTaskFile(f"{where}.acceleratorManufacturers", sentence)
    known = look_up(mine)
    names, count = wanted.get("acceleratorNames"), wanted.get("acceleratorCount")
    if (names or count) and not known.known:
        found.append(f"{where}: accelerators are not checked, as {mine} is not in the catalog")
    elif names and ACCELERATORS.get(known.chip, known.chip) not in names:
        sentence = f"the task asks for {', '.join(names)}, and a {mine} has {ACCELERATORS.get(known.chip, known.chip)}"
        raise BadTaskFile(f"{where}.acceleratorNames", sentence)
    elif count and not count.get("min", 0) <= known.chips <= count.get("max", known.chips):
        least, most = count.get("min", 0), count.get("max", "any number")
        sentence = f"the task asks for {least} to {most}, and a {mine} has {known.chips}"
        raise BadTaskFile(f"{where}.acceleratorCount", sentence)
    return found


def _like(name: str, pattern: str) -> bool:
    """Tell whether a name is like a pattern in which * is the only sign."""
    return fnmatchcase(name, re.sub(r"[\[?]", r"[\g<0>]", pattern))


def _platform(wanted: Mapping[str, Any], where: str, host: Host | None) -> list[str]:
    system, architecture = wanted.get("operatingSystemFamily"), wanted.get("cpuArchitecture")
    if system and system != "LINUX":
        raise BadTaskFile(f"{where}.operatingSystemFamily", f"the task asks for {system}, and this host has LINUX")
    if not architecture:
        return []
    if host is None:
        return [f"{where}.cpuArchitecture: not checked, as no daemon answers that knows this host"]
    mine = ARCHITECTURES.get(host.machine, host.machine)
    if architecture != mine:
        sentence = f"the task asks for {architecture}, and this host has {mine}"
        raise BadTaskFile(f"{where}.cpuArchitecture", sentence)
    return []


# -- the query language -----------------------------------------------------------------------------------------------


class Unreadable(Exception):
    """The expression is not of the language as we know it."""


def evaluate(expression: str, attributes: Mapping[str, str]) -> bool | None:
    """Return whether a host with these attributes is meant; None if that can't be told."""
    if len(expression) > LONGEST:
        return None
    try:
        return Query(expression, attributes).answer()
    except Unreadable:
        return None


OPERATORS = {
    "equals": "==",
    "not_equals": "!=",
    "exists": "exists",
    "not_exists": "!exists",
    "in": "in",
    "not_in": "!in",
    "matches": "=~",
    "not_matches": "!~",
}
OPERATOR = re.compile(r"\s*(==|!=|=~|!~|>=|<=|>|<|!exists\b|!in\b|[a-z_]+)")
SUBJECT = re.compile(r"\s*([A-Za-z][\w.:/-]*)")
WORD = re.compile(r"\s*([^\s()\[\],&|!]+)")
LIST = re.compile(r"\s*\[([^\[\]]*)\]")


class Query:
    """One expression, read from left to right."""

    def __init__(self, text: str, attributes: Mapping[str, str]) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.attributes = attributes

    def answer(self) -> bool | None:
        """Return the answer of the whole text. Raises Unreadable."""
        result = self._any()
        if self.text[self.at :].strip():
            raise Unreadable
        return result

    def _any(self) -> bool | None:
        answers = [self._all()]
        while self._take(r"\|\||or\b"):
            answers.append(self._all())
        return True if True in answers else None if None in answers else False

    def _all(self) -> bool | None:
        answers = [self._one()]
        while self._take(r"&&|and\b"):
            answers.append(self._one())
        return False if False in answers else None if None in answers else True

    def _one(self) -> bool | None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable
        try:
            if self._take(r"!|not\b"):
                answer = self._one()
                return None if answer is None else not answer
            if not self._take(r"\("):
                return self._comparison()
            answer = self._any()
            if not self._take(r"\)"):
                raise Unreadable
            return answer
        finally:
            self.depth -= 1

    def _comparison(self) -> bool | None:
        subject = self._match(SUBJECT)
        operator = self._match(OPERATOR)
        operator = OPERATORS.get(operator, operator)
        negated = operator.startswith("!")
        value = self.attributes.get(subject.removeprefix("attribute:")) if subject.startswith("attribute:") else None
        answer: bool | None
        if operator in {"exists", "!exists"}:
            return None if value is None else not negated
        if operator in {"in", "!in"}:
            wanted = [item.strip() for item in self._match(LIST).split(",")]
            answer = value in wanted
        elif operator in {"=~", "!~"}:
            answer = _matches(self._pattern(), value or "")
        elif operator in {"==", "!="}:
            answer = value == self._match(WORD)
        else:  # an order, which none of our attributes has, or an operator that we don't know
            self._match(WORD)
            return None
        return None if value is None or answer is None else answer != negated

    def _pattern(self) -> str:
        """Return a regular expression: up to a space, or to a parenthesis that it has not opened itself."""
        start = self.at = self.at + len(self.text[self.at :]) - len(self.text[self.at :].lstrip())
        depth = 0
        while self.at < len(self.text) and not self.text[self.at].isspace():
            depth += {"(": 1, ")": -1}.get(self.text[self.at], 0)
            if depth < 0:
                break
            self.at += 1
        return self.text[start : self.at]

    def _take(self, token: str) -> bool:
        found = re.compile(rf"\s*({token})").match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found is not None

    def _match(self, what: re.Pattern[str]) -> str:
        found = what.match(self.text, self.at)
        if not found:
            raise Unreadable
        self.at = found.end()
        return found[1]


def _matches(pattern: str, value: str) -> bool | None:
    """Tell whether a value matches a regular expression of Java as a whole; None if Python does not have that one."""
    if sum(map(pattern.count, "*+?{")) > MOST_REPEATS or REPEATED_GROUP.search(pattern):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # given where Java means another thing: sets within sets
            return re.fullmatch(pattern, value) is not None
    except (re.error, OverflowError, RecursionError, Warning):
        return None
