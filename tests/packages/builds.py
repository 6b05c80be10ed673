"""The packages that the tests look at: two versions for this host's distribution, and of the rpm; built once."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

REPOSITORY = Path(__file__).parent.parent.parent
OLD, NEW = "0.8.1", "0.9~rc1"


@dataclass(frozen=True)
class Packages:
    """Where they are."""

    directory: Path
    distribution: str

    def deb(self, version: str) -> Path:
        """Return the .deb of a version for this host."""
        return next(self.directory.glob(f"neurond_{version}-*.deb"))

    def rpm(self, version: str) -> Path:
        """Return the .rpm of a version."""
        return next(self.directory.glob(f"neurond-{version}-*.rpm"))


def this_distribution() -> str:
    """Return the target of packaging/build that is for this host."""
    said = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    name = said["ID"].strip('"') + said["VERSION_ID"].strip('"')
    assert name in {"debian12", "ubuntu24.04"}, f"the packages are tested on Debian 12 and Ubuntu 24.04, not on {name}"
    return name


def build(directory: Path, *arguments: str) -> str:
    """Run what packaging/build runs; return what it says."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "packaging" / "packages.py", "--output", directory, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_all(shared: Path) -> Packages:
    """Build what is not there yet; several test processes share the directory."""
    directory = shared / "packages"
    distribution = this_distribution()
    with FileLock(shared / "packages.lock"):
        if not (directory / "whole").exists():
            for version in (OLD, NEW):
                build(directory, "--version", version, distribution, "amzn2023")
            (directory / "whole").touch()
    return Packages(directory, distribution)
