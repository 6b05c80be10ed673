"""The usual options of `neurond run` are read without argparse, and just as argparse reads them."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurond.cli.run import read, read_plain

WORDS = ["-n", "--count", "1", "4", "-1", "٣", "x", "--no-wait", "--", "-w", "10s", "--name", "--all", "true", "-n1"]


@given(st.lists(st.sampled_from(WORDS), max_size=7))
def test_both_ways_read_the_same(arguments: list[str]) -> None:
    """Whatever is read the short way, argparse reads to the same options."""
    plain = read_plain(arguments)
    if plain is not None:
        options = vars(read(arguments))
        assert {name: getattr(plain, name) for name in options} == options


@pytest.mark.parametrize(
    "arguments",
    [["-n", "1", "--", "true"], ["--count", "16", "--no-wait", "--", "sh", "-c", "exit 3", "--", "-n", "2"]],
)
def test_the_usual_forms_are_read_the_short_way(arguments: list[str]) -> None:
    """What people put in front of a command takes the short way, whatever stands behind `--`."""
    plain = read_plain(arguments)
    assert plain is not None
    assert plain.command == arguments[arguments.index("--") :]


def test_options_from_the_environment_take_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option given as NEUROND_RUN_... is argparse's business."""
    monkeypatch.setenv("NEUROND_RUN_WAIT", "10m")
    assert read_plain(["-n", "1", "--", "true"]) is None


def test_run_begins_without_the_slow_modules() -> None:
    """To lease chips for a command takes none of the modules that take longer to import than all else."""
    script = "import neurond.cli.run, sys; print(*{'argparse', 'socket', 'typing', 'signal'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
