"""`docker neurond …`: the wrapper as a plugin of the real docker command line."""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from neurond import __version__
from tests.cli.fakes import Wrapper, added, run

DOCKERS = sorted({path for path in map(shutil.which, ("/usr/bin/docker", "/usr/local/bin/docker", "docker")) if path})
CODE = "import sys; sys.path.insert(0, {path!r}); from neurond.cli.docker import plugin; sys.exit(plugin())"


class Plugin:
    """The plugin where docker looks for it; `docker` is the real command line, which the plugin does not find."""

    def __init__(self, directory: Path, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        self.script = directory / "docker-neurond"
        root = str(Path(__file__).parent.parent.parent)
        self.script.write_text(f"#!{sys.executable}\n{CODE.format(path=root)}\n")
        self.script.chmod(0o755)
        plugins = directory / "config/cli-plugins"
        plugins.mkdir(parents=True)
        (plugins / "docker-neurond").symlink_to(self.script)
        self.env = wrapper.env | {"DOCKER_CONFIG": str(directory / "config")}

    def called(self, command: Sequence[str]) -> str:
        """Return what a command prints that goes well."""
        done = run(command, self.env)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def plugin(tmp_path: Path, wrapper: Wrapper) -> Plugin:
    """Give the plugin, with the docker that it calls replaced by a recorder."""
    return Plugin(tmp_path, wrapper)


def test_the_plugin_says_what_it_is(plugin: Plugin) -> None:
    """Docker asks each plugin for its metadata."""
    told = json.loads(plugin.called([str(plugin.script), "docker-cli-plugin-metadata"]))
    assert told.pop("ShortDescription")
    assert told == {"SchemaVersion": "0.1.0", "Vendor": "neurond", "Version": __version__}


@pytest.mark.parametrize("docker", DOCKERS)
def test_docker_lists_the_plugin(plugin: Plugin, docker: str) -> None:
    """`docker --help` has it among the commands."""
    assert "Run containers on leased AWS Neuron chips" in plugin.called([docker, "--help"])


@pytest.mark.parametrize("docker", DOCKERS)
@pytest.mark.parametrize("words", [["neurond", "--help"], ["neurond"], ["help", "neurond"]])
def test_the_plugin_has_a_help(plugin: Plugin, docker: str, words: list[str]) -> None:
    """However docker is asked for the help of the plugin, it is neurond's."""
    assert "usage: neurond VERB" in plugin.called([docker, *words])


@pytest.mark.parametrize("docker", DOCKERS)
@pytest.mark.parametrize("verb", ["run", "create"])
def test_the_plugin_runs_containers(plugin: Plugin, docker: str, verb: str) -> None:
    """`docker neurond run` is `neurond docker run`, with the options of docker itself passed on."""
    options = ["--log-level", "debug"]
    plugin.called([docker, *options, "neurond", verb, "-n", "1", "-it", "image", "sh", "-c", "a  b"])
    assert plugin.wrapper.recorder.argv == [*options, verb, *added(0), "-it", "image", "sh", "-c", "a  b"]


@pytest.mark.parametrize("docker", DOCKERS)
def test_the_exit_code_comes_through(plugin: Plugin, docker: str) -> None:
    """That of the container, and neurond's own."""
    plugin.env["RECORDER_EXITS"] = "37"
    assert run([docker, "neurond", "run", "-n", "1", "image"], plugin.env).returncode == 37
    plugin.wrapper.daemon.errors["Acquire"] = ("NoCapacity", {"message": "none free"})
    assert run([docker, "neurond", "run", "-n", "1", "image"], plugin.env).returncode == 75


@pytest.mark.parametrize("docker", DOCKERS)
def test_the_other_verbs_are_neuronds(plugin: Plugin, docker: str) -> None:
    """`docker neurond env` is `neurond env`, and so are all that are not docker's."""
    assert "export NEUROND_LEASE='ab12-3'" in plugin.called([docker, "neurond", "env", "ab12-3"])
    done = run([docker, "neurond", "no-such-verb"], plugin.env)
    assert (done.returncode, done.stderr) == (2, "neurond: no verb 'no-such-verb' (neurond --help lists them)\n")
