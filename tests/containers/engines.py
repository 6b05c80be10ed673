"""Docker Engines newer than the host's, made of Debian's packages and run beside it.

Nothing is installed. The packages of a newer Debian are unpacked into a folder, and the programs in it are told, in
their ELF headers, to take the C library and all others from there. So they run in the host's own mount namespace, like
the host's Engine: they see every device node and every directory of a test at once. (A chroot does not: on a host
without systemd mounts are private, and the tmpfs with the simulated nodes of a daemon would never appear in it.)
"""

import fcntl
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness import PrivateEngine

SUITES = {"26": "trixie", "28": "forky"}
"""The Debian that has this Engine; once forky has a newer one, the first use of 28 says so."""
RELEASE = os.environ.get("NEUROND_TEST_ENGINE")
"""The Engine that all tests of containers are to use, a key of SUITES; without it the host's own."""
MIRROR = "http://deb.debian.org/debian"
FOLDER = Path(os.environ.get("NEUROND_ENGINES") or "/var/cache/neurond-engines").absolute()
"""Where engines are kept, 240 MB each; may be removed at any time that no test runs."""
PROGRAMS = (
    "sbin/dockerd",
    "bin/docker",
    "bin/docker-init",
    "bin/containerd",
    "bin/containerd-shim-runc-v2",
    "sbin/runc",
)
LIBRARIES = "usr/lib/x86_64-linux-gnu"
LOADER = "usr/lib64/ld-linux-x86-64.so.2"
PATIENCE = 300.0
"""Seconds for downloading 90 MB and unpacking them; 8 were seen."""


class NewerEngine(PrivateEngine):
    """A newer Engine with CDI on, or off; it watches `cdi`, and no other directory, for specs.

    The docker command is that of the same release: the host's 20.10 takes a CDI name for a path.
    """

    def __init__(self, directory: Path, release: str, *, cdi: bool = True) -> None:
        super().__init__(directory)
        self.programs = f"{programs_of(release)}:{self.programs}"
        self.cdi.mkdir()
        configuration = directory / "daemon.json"  # instead of the host's own
        configuration.write_text(json.dumps({"features": {"cdi": cdi}, "cdi-spec-dirs": [str(self.cdi)]}))
        self.options = [f"--config-file={configuration}"]


def engine_in(directory: Path) -> PrivateEngine:
    """Make the engine that all tests of containers are to use."""
    return NewerEngine(directory, RELEASE) if RELEASE else PrivateEngine(directory)


@functools.cache
def programs_of(release: str) -> Path:
    """Return the directory with the programs of a release; it is made if it is missing, or was left half made."""
    tree = FOLDER / release
    programs = tree / "bin"
    whole = tree / "whole"
    with _alone(FOLDER / "lock"):
        if not whole.exists() or whole.read_text() != str(tree):  # the programs have the path in them
            shutil.rmtree(tree, ignore_errors=True)
            _unpack(SUITES[release], tree)
            _move_programs(tree, programs)
            version = _run(str(programs / "dockerd"), "--version")
            assert f" {release}." in version, f"Debian {SUITES[release]} has another Engine than {release}: {version}"
            whole.write_text(str(tree))
    return programs


def _unpack(suite: str, tree: Path) -> None:
    stale = "--aptopt=Acquire::Check-Valid-Until false"  # a mirror that lags behind is as good
    wanted = "--include=docker.io,docker-cli"  # and what they depend on; no maintainer script runs
    _run("mmdebstrap", "--quiet", "--variant=extract", wanted, stale, suite, str(tree), MIRROR)


def _move_programs(tree: Path, programs: Path) -> None:
    """Move the few programs that are needed to a directory of their own, and drop the others: they would not run."""
    programs.mkdir()
    libraries = ["--set-interpreter", str(tree / LOADER), "--force-rpath", "--set-rpath", str(tree / LIBRARIES)]
    for name in PROGRAMS:
        program = Path(shutil.copy(tree / "usr" / name, programs))
        if program.name != "docker-init":  # static
            _run("patchelf", *libraries, str(program))
    for rest in ("usr/bin", "usr/sbin", "usr/share", "usr/libexec", "var", "etc", "dev", "tmp"):
        shutil.rmtree(tree / rest, ignore_errors=True)


def _run(*command: str) -> str:
    # The lock is handed on: what outlives a killed test run keeps the next one out.
    done = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, f"{command[0]}: {done.stderr}"
    return done.stdout


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.set_inheritable(file.fileno(), True)
        yield
