"""The checks that are no tests of behaviour, run as tests so that one command is the whole check."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vm.inside import main as stages

REPOSITORY = Path(__file__).parent.parent
SHELL_SCRIPTS = (
    "packaging/build",
    "packaging/demo",
    "packaging/lock",
    "packaging/vm-test",
    "tests/vm/image/finish",
    "tests/vm/image/prepare",
    "packaging/setup.sh",
    "packaging/test",
    ".ci/run",
)


def check(*command: str) -> None:
    """Run a command, and fail with its output."""
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    """The code follows the rules of pyproject.toml."""
    check(sys.executable, "-m", "ruff", "check", ".")


def test_code_is_formatted() -> None:
    """The code is formatted as ruff formats it."""
    check(sys.executable, "-m", "ruff", "format", "--check", ".")


@pytest.mark.timeout(300)
def test_mypy_finds_nothing() -> None:
    """All code is typed, strictly."""
    check(sys.executable, "-m", "mypy")


def test_imports_point_inward() -> None:
    """The layers are as pyproject.toml draws them."""
    check(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")


def test_codespell_finds_nothing() -> None:
    """Words are spelled right."""
    check(sys.executable, "-m", "codespell_lib")


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_shell_scripts_parse(script: str) -> None:
    """Shell scripts are whole."""
    check("bash", "-n", script)


def test_units_are_valid(tmp_path: Path) -> None:
    """Systemd takes the units as they are, but for the path of the command, which is not installed here."""
    for name in ("neurond.service", "neurond.socket"):
        unit = REPOSITORY / "systemd" / name
        text = unit.read_text().replace("/usr/bin/neurond", sys.executable)
        (tmp_path / unit.name).write_text(text)
    check("systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir())))


def test_the_service_is_confined() -> None:
    """The unit gives away little of the host, as systemd counts it (10 is all, a bare unit has 9.6); in tenths."""
    check("systemd-analyze", "security", "--offline=true", "--threshold=25", "systemd/neurond.service")


SCRIPTS_OF_PACKAGES = sorted((REPOSITORY / "packaging" / "files").glob("*/*"))


@pytest.mark.parametrize("script", SCRIPTS_OF_PACKAGES, ids=lambda script: f"{script.parent.name}-{script.name}")
def test_scripts_of_packages_parse(script: Path) -> None:
    """What the packages run at installation and removal is whole for a plain shell."""
    check("sh", "-n", str(script))


def test_top_of_the_repository_is_tidy() -> None:
    """Only what belongs there lies at the top."""
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    top = {path.partition("/")[0] for path in tracked.splitlines()}
    wanted = {"pyproject.toml", "neurond", "systemd", "tests", "packaging", "README.md"}
    assert {name for name in top if not name.startswith(".")} <= wanted


NAMED = re.compile(r"`([^`\s]*test_\w+\.py)(?:::)?([^`\s]*)`")
"""A test, or a file of tests, in a document: its path below tests/, and what it is called in there."""


def names_in(file: Path) -> set[str]:
    """Return the names of all tests in a file; of a class, those of its methods too, as Class::method."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("document", ["README.md", "tests/README.md"])
def test_tests_that_are_named_exist(document: str) -> None:
    """What a document says of where a promise is held can be found there."""
    named = NAMED.findall((REPOSITORY / document).read_text())
    assert named
    there = {path: names_in(REPOSITORY / "tests" / path) for path, _ in named if (REPOSITORY / "tests" / path).exists()}
    missing = [f"{path}::{name}" for path, name in named if path not in there or (name and name not in there[path])]
    assert missing == []


def test_every_check_of_the_machine_is_run() -> None:
    """Each check below tests/vm/inside is in STAGES: a function without arguments that returns what it saw."""
    modules = [
        importlib.import_module(f"tests.vm.inside.{name}")
        for name in ("containers", "hotplug", "installing", "jobs", "service")
    ]
    run = {check for boots in stages.STAGES.values() for checks in boots for check in checks}
    for module in modules:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not inspect.signature(function).parameters:
                returns = inspect.signature(function).return_annotation
                assert returns is not str or function in run, f"{module.__name__}.{name} is in no stage"
