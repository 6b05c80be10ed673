"""config, and the files of settings: what they may hold, what is said of the rest, which value counts, and why."""

import json
import os
import string
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from neurond.settings import texts
from neurond.settings.sources import DEFAULT, LARGEST_FILE, Finding, Read, Reader, lines_of, sources_of
from neurond.settings.table import KEYS, Settings
from tests.daemon.support import NOBODY, NOGROUP
from tests.harness import NEUROND, Daemon

README = Path(__file__).parents[2] / "README.md"


def read(path: Path) -> Read:
    """Read one file of settings."""
    reader = Reader()
    reader.read_file(path)
    return reader.outcome()


def findings(tmp_path: Path, text: str | bytes) -> list[str]:
    """Return what is said of a file that holds this, without its name."""
    path = tmp_path / "neurond.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [str(finding).removeprefix(f"{path}") for finding in read(path).findings]


def config(*arguments: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Run `neurond config` where no daemon answers."""
    nowhere = {"NEUROND_HOST": "unix:///nowhere/neurond.sock"}
    command = [*NEUROND, "config", *arguments]
    return subprocess.run(
        command, env=os.environ | nowhere | dict(env or {}), capture_output=True, text=True, timeout=60, check=False
    )


def test_serve_has_no_address_to_call() -> None:
    """The verb serve calls no daemon, so the option for its address is refused rather than ignored."""
    done = subprocess.run(
        [*NEUROND, "serve", "-H", "unix:///x"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "-H" in done.stderr) == (2, True)


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('\nlog_levl = "info"', ':2: there is no key "log_levl"; did you mean log_level?'),
        ('stuck-after = "1m"', ':1: there is no key "stuck-after"; did you mean stuck_after?'),
        ("zzz = 1", ':1: there is no key "zzz"; possible are runtime_dir, simulate, docker, '),
        ('\n[log]\nlevel = "info"', ':2: there is no table "log": keys stand by themselves, as in stuck_after'),
        ('log.level = "info"', ':1: there is no table "log": keys stand by themselves'),
        ("[[docker]]", ":1: docker = [{}]: an address such as"),
        ('log_level = "dbug"', '"dbug": "debug", "info", "warning" or "error" is possible; did you mean debug?'),
        ("log_level = 3", ':1: log_level = 3: "debug", "info", "warning" or "error" is possible'),
        ('simulate = "trn1.33xlarge"', "did you mean trn1.32xlarge?"),
        ('docker = "docker.sock"', ':1: docker = "docker.sock": an address is of the form unix:///var/run/docker.sock'),
        ('cdi_dir = "run/cdi"', ':1: cdi_dir = "run/cdi": an absolute path, or "" for nowhere is possible, in quotes'),
        (f'runtime_dir = "/{"x" * 100}"', "would have a path of 114 bytes, and 107 are possible"),
        ('group = "two words"', ':1: group = "two words": the name of a group is possible'),
        ("stop_conflicts = 1", ":1: stop_conflicts = 1: true or false is possible, without quotes"),
        ('stuck_after = "30x"', ':1: stuck_after = "30x": a time from "0.1s" to "1d" is possible, such as 30s'),
        ("stuck_after = 0", ':1: stuck_after = 0: a time from "0.1s" to "1d" is possible'),
        ("stuck_after = nan", ':1: stuck_after = NaN: a time from "0.1s" to "1d" is possible'),
        ("stuck_after = true", ':1: stuck_after = true: a time from "0.1s" to "1d" is possible, or a number'),
        ("stuck_after = 1979-05-27", ':1: stuck_after = "1979-05-27": a time from "0.1s" to "1d" is possible'),
        ("most_waiting = 0", ":1: most_waiting = 0: a whole number from 1 to 65536 is possible"),
        ("most_waiting = 1.5", ":1: most_waiting = 1.5: a whole number from 1 to 65536 is possible"),
        (f"most_waiting = 0x{'f' * 5000}", ":1: most_waiting = a number of very many digits: a whole number"),
        (f"most_waiting = {'9' * 5000}", ": has a number or a nesting that is too large to be meant"),
        (f"docker = {'[' * 5000}", ": has a number or a nesting that is too large to be meant"),
        ('log_level = "info"\nlog_level = "info"', ":2: is no TOML: cannot overwrite a value"),
        ("\n\ngroup = ml", ':3: is no TOML: invalid value (a text stands in quotes, as in log_level = "info")'),
        ("\nlog_level = info\n", ":2: is no TOML: expected newline or end of document after a statement (a text"),
        ("docker = \n\n", ":1: is no TOML: invalid value"),
        ('docker = "x', ":1: is no TOML: unterminated string"),
        (b'# x\ngroup = "\xff"', ":2: is no UTF-8 text"),
        (b"#" * (LARGEST_FILE + 1), ": is larger than 64 KiB, and surely not meant"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line_and_what_is_possible(
    tmp_path: Path, text: str | bytes, said: str
) -> None:
    """One thing that is wrong is one sentence, with the line, what is there, and what could be."""
    (found,) = findings(tmp_path, text)
    assert said in found


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    """What is wrong in several files, the environment and the command line is all said, in the order of reading."""
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "neurond.toml").write_text('log_level = "x"\nmost_waiting = -1\n')
    (tmp_path / "conf.d/2.toml").write_text("nothing = 1\n")
    (tmp_path / "conf.d/10.toml").write_text("= 1\n")
    (tmp_path / "conf.d/.hidden.toml").write_text("= 1\n")
    (tmp_path / "conf.d/other.toml~").write_text("= 1\n")
    env = {"NEUROND_SERVE_GROUP": "a b", "NEUROND_SERVE_LOG_LEVEL": "debug"}
    found = sources_of(f"{tmp_path}/neurond.toml", {"stuck_after": "never"}, env).read().findings
    assert [finding.where.removeprefix(f"{tmp_path}/") for finding in found] == [
        "neurond.toml:1",
        "neurond.toml:2",
        "conf.d/10.toml:1",
        "conf.d/2.toml:1",
        "NEUROND_SERVE_GROUP='a b'",
        "--stuck-after never",
    ]


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe", "NUL"])
def test_what_is_no_file(tmp_path: Path, kind: str) -> None:
    """A file that was asked for and is none is a finding, and nobody waits for the other end of a pipe."""
    path = tmp_path / "neurond.toml"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "NUL":
        path = tmp_path / "a\0b"
    (finding,) = read(path).findings
    assert finding.where == str(path)
    assert finding.sentence.startswith(("cannot be read: ", "is not a file"))


FROM_ROOT = "and root only takes settings from root"


@pytest.mark.root
@pytest.mark.parametrize(
    ("mode", "owner", "said"),
    [
        (0o755, (0, 0), ""),
        (0o775, (0, 0), ""),
        (0o755, (NOBODY, NOGROUP), f"belongs to nobody, {FROM_ROOT}: chown root"),
        (0o775, (0, NOGROUP), f"can be written by others (mode 0775), {FROM_ROOT}: chmod go-w"),
        (0o757, (0, 0), f"can be written by others (mode 0757), {FROM_ROOT}: chmod go-w"),
    ],
)
@pytest.mark.parametrize("what", ["neurond.toml", "conf.d", "conf.d/a.toml"])
def test_root_takes_settings_from_root_only(
    tmp_path: Path, what: str, mode: int, owner: tuple[int, int], said: str
) -> None:
    """Who could write a file, or put one into conf.d, could have root's daemon do things: such are refused."""
    (tmp_path / "conf.d").mkdir(mode=0o755)
    for name in ("neurond.toml", "conf.d/a.toml"):
        (tmp_path / name).write_text('log_level = "debug"\n')
    os.chown(tmp_path / what, *owner)
    (tmp_path / what).chmod(mode)
    found = sources_of(f"{tmp_path}/neurond.toml", {}, {}).read().findings
    assert found == ([Finding(f"{tmp_path}/{what}", said)] if said else [])


# -- what counts ------------------------------------------------------------------------------------------------------


def test_what_is_nearer_counts(tmp_path: Path) -> None:
    """The command line counts more than the environment, then conf.d by name, the file, the default; each is named."""
    (tmp_path / "conf.d").mkdir()
    names = ["docker_look_every", "look_every", "start_grace", "restart_grace", "stuck_after"]
    for depth, path in enumerate(("neurond.toml", "conf.d/10.toml", "conf.d/9.toml"), 1):
        lines = [f"{name} = {depth}\n" for name in names[: 6 - depth]]
        (tmp_path / path).write_text("# a comment\n" + "".join(lines))
    env = {f"NEUROND_SERVE_{name.upper()}": "4s" for name in names[:2]} | {"NEUROND_SERVE_STUCK_AFTER": ""}
    found = sources_of(str(tmp_path / "neurond.toml"), {names[0]: "5s"}, env).read()
    assert found.findings == []
    assert [(getattr(found.settings, name), found.origins[name]) for name in [*names, "group"]] == [
        (5, "command line --docker-look-every"),
        (4, "environment NEUROND_SERVE_LOOK_EVERY"),
        (3, f"{tmp_path}/conf.d/9.toml:4"),
        (2, f"{tmp_path}/conf.d/10.toml:5"),
        (1, f"{tmp_path}/neurond.toml:6"),
        ("neuron", DEFAULT),
    ]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("stuck_after", '"1h30m"', 5400.0),
        ("stuck_after", "90", 90.0),
        ("stuck_after", "0.5", 0.5),
        ("most_waiting", "7", 7),
        ("stop_conflicts", "true", True),
        ("cdi_dir", '""', ""),
        ("simulate", '"trn1.32xlarge*2"', "trn1.32xlarge*2"),
        ("group", '"domain users@example.com"'.replace(" ", "-"), "domain-users@example.com"),
    ],
)
def test_values_are_typed_and_written_as_they_are_read(tmp_path: Path, name: str, text: str, value: object) -> None:
    """Each kind of value is read as what it is, and what is written of it is read as the same."""
    path = tmp_path / "neurond.toml"
    for written in (text, KEYS[name].kind.write(value)):
        path.write_text(f"{name} = {written}\n")
        found = read(path)
        assert found.findings == []
        assert getattr(found.settings, name) == value
        assert type(getattr(found.settings, name)) is type(value)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("yes", True), ("No", False), ("off", False)])
def test_flags_of_the_environment(text: str, value: object) -> None:
    """A flag can be given in the words that people use in the environment."""
    found = sources_of("/dev/null", {}, {"NEUROND_SERVE_STOP_CONFLICTS": text}).read()
    assert (found.findings, found.settings.stop_conflicts) == ([], value)


def test_lines_are_those_of_the_statements() -> None:
    """The line of a key is that where its statement begins, whatever stands in texts, lists and tables before it."""
    text = 'a = """\nb = 1\n"""\n\n# b = 2\n  "b" = [\n1, # ]\n  2]\nc.d = {x = "]"}\n'
    text += "e = '''\n[t]\n'''\n[t]\na = 1\nf = 1\n"
    assert lines_of(text) == {"a": 1, "b": 6, "c": 9, "e": 10, "t": 13}


# -- whatever a file holds --------------------------------------------------------------------------------------------

NAMES = st.sampled_from([*KEYS, "log", "a.b", '"x y"', "log_levl"]) | st.text(string.ascii_letters, min_size=1)
VALUES = st.one_of(
    st.sampled_from(['"info"', "true", "1e400", "nan", "-inf", "0x1f", "1979-05-27T07:32:00Z"]),
    st.sampled_from(["[[]]", "{a = 1}", '"1h"', "0.001", "-0"]),
    st.integers().map(str),
    st.floats().map(str),
    st.text().map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.text(st.characters(exclude_characters="'", exclude_categories=["Cs"])).map(lambda text: f"'''{text}'''"),
    st.lists(st.integers()).map(lambda numbers: "[\n" + ",\n".join(map(str, numbers)) + "\n]"),
)
STATEMENTS = st.one_of(
    st.tuples(NAMES, VALUES).map(" = ".join),
    st.sampled_from(["", "# x", "[log]", "[[a]]", "[", '"""', "=", "\0", "\ufeff", "\r"]),
    st.text(max_size=20),
)
FILES = st.lists(STATEMENTS, max_size=12).map(lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass"))


@hypothesis_settings(deadline=None)  # the machine may be busy
@given(FILES | st.binary(max_size=200))
def test_any_file_is_taken_or_refused_by_its_lines(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Whatever a file holds, it is settings or findings; these name lines that are there, in sentences of one line."""
    path = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    path.write_bytes(data)
    found = read(path)
    for finding in found.findings:
        where, _, line = finding.where.removeprefix(str(path)).partition(":")
        assert where == ""
        assert line == "" or 1 <= int(line) <= data.count(b"\n") + 1
        assert finding.sentence
    for name, origin in found.origins.items():
        if origin != DEFAULT:
            line = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")[int(origin.rpartition(":")[2]) - 1].decode()
            assert line.split("=")[0].strip() == name
            value = getattr(found.settings, name)
            assert KEYS[name].kind.read(tomllib.loads(f"x = {KEYS[name].kind.write(value)}")["x"]) == value


# -- the command ------------------------------------------------------------------------------------------------------


def test_example_is_the_defaults(tmp_path: Path) -> None:
    """What --example prints sets nothing; with all comments taken off its keys, it sets each to its default."""
    done = config("--example")
    assert (done.returncode, done.stderr) == (0, "")
    path = tmp_path / "neurond.toml"
    path.write_text(done.stdout)
    assert tomllib.loads(done.stdout) == {}
    lines = [line[1:] if line.partition(" ")[0][1:] in KEYS else line for line in done.stdout.splitlines()]
    path.write_text("\n".join(lines))
    found = read(path)
    assert (found.findings, found.settings) == ([], Settings())
    assert DEFAULT not in found.origins.values()


def test_readme_has_the_keys() -> None:
    """The table of README is the one that decides."""
    assert texts.markdown() in README.read_text("utf-8")


def test_check_says_what_is_wrong_in_these_files(tmp_path: Path) -> None:
    """`config --check FILE…` takes no daemon: 0 if nothing is wrong, 1 with every finding on stderr."""
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text('log_level = "debug"\n')
    bad.write_text("log_level = 1\nx = 1\n")
    done = config("--check", str(good))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{good}: nothing wrong\n", "")
    done = config("--check", str(good), str(bad))
    assert (done.returncode, done.stdout) == (1, "")
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == [f"{bad}:1", f"{bad}:2"]


def test_check_reads_what_a_daemon_would(tmp_path: Path) -> None:
    """Without files, `config --check` reads those that a daemon in this environment would read, and the environment."""
    (tmp_path / "neurond.toml").write_text("")
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d/x.toml").write_text("x = 1\n")
    env = {"NEUROND_SERVE_CONFIG": f"{tmp_path}/neurond.toml", "NEUROND_SERVE_DOCKER": "x"}
    done = config("--check", env=env)
    assert done.returncode == 1
    assert f"{tmp_path}/conf.d/x.toml:1: there is no key" in done.stderr
    assert "NEUROND_SERVE_DOCKER=x: an address is of the form" in done.stderr
    assert config("--check", "--config", "/dev/null").returncode == 0


def test_without_a_daemon_it_is_what_one_would_start_with(tmp_path: Path) -> None:
    """If no daemon answers, that is said, and the files are read; with --config nobody is asked at all."""
    path = tmp_path / "neurond.toml"
    path.write_text('\ngroup = "ml"\n')
    done = config(env={"NEUROND_SERVE_CONFIG": str(path)})
    assert done.returncode == 0
    assert f'group = "ml"  # {path}:2' in " ".join(done.stdout.split(" " * 2)).replace("   ", " ").replace(
        "   ", " "
    ) or (any(line.split() == ["group", "=", '"ml"', "#", f"{path}:2"] for line in done.stdout.splitlines()))
    assert tomllib.loads(done.stdout).keys() == KEYS.keys()
    assert "neurond does not answer at /nowhere/neurond.sock" in done.stderr
    assert "these are the settings that it would start with" in done.stderr
    quiet = config("--config", str(path))
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, done.stdout, "")
    printed = json.loads(config("--config", str(path), "-j").stdout)
    rows = {row["key"]: row for row in printed["settings"]}
    assert (rows["group"]["value"], rows["group"]["origin"]) == ("ml", f"{path}:2")
    assert (rows["stuck_after"]["value"], rows["stuck_after"]["origin"]) == (30.0, "default")


@pytest.mark.parametrize("arguments", [("x.toml",), ("--check", "--example"), ("--config",)])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    """Wrong usage is exit code 2."""
    done = config(*arguments)
    assert (done.returncode, done.stdout) == (2, "")


def test_the_daemon_that_runs_is_asked(daemon: Daemon) -> None:
    """With a daemon, `config` prints what it has in force, whatever files and variables the caller has."""
    env = {"NEUROND_SERVE_CONFIG": "/nowhere", "NEUROND_SERVE_GROUP": "other"}
    done = daemon.cli("config", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    printed: dict[str, Any] = tomllib.loads(done.stdout)
    assert (printed["simulate"], printed["group"]) == ("trn1.32xlarge", "neuron")
    assert printed["runtime_dir"] == str(daemon.directory)
    reply = json.loads(daemon.cli("config", "--json").stdout)
    assert reply["pid"] == daemon.pid
    assert reply == daemon.call("ListSettings")
    rows = {row["key"]: row["origin"] for row in reply["settings"]}
    assert (rows["simulate"], rows["group"]) == ("command line --simulate", "default")
