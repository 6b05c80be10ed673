"""What is in the packages."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.packages.builds import NEW, OLD, Packages, build

pytestmark = pytest.mark.timeout(300)

PROGRAMS = {"/usr/bin/neurond", "/usr/libexec/docker/cli-plugins/docker-neurond"}
WANTED = {
    *PROGRAMS,
    "/etc/neurond/neurond.toml",
    "/opt/neurond/pyvenv.cfg",
    "/usr/lib/systemd/system/neurond.service",
    "/usr/lib/systemd/system/neurond.socket",
    "/usr/lib/sysusers.d/neurond.conf",
    "/usr/lib/tmpfiles.d/neurond.conf",
    "/usr/lib/udev/rules.d/60-neurond.rules",
    "/usr/share/bash-completion/completions/neurond",
    "/usr/share/fish/vendor_completions.d/neurond.fish",
    "/usr/share/man/man1/neurond-run.1.gz",
    "/usr/share/man/man1/neurond.1.gz",
    "/usr/share/man/man5/neurond.toml.5.gz",
    "/usr/share/neurond/udev/60-neurond-enforced.rules",
}
MORE = {
    "deb": {"/usr/share/doc/neurond/copyright", "/usr/share/zsh/vendor-completions/_neurond"},
    "rpm": {"/usr/lib/systemd/system-preset/90-neurond.preset", "/usr/share/zsh/site-functions/_neurond"},
}
OWN = re.compile(r"/opt/neurond/lib/python3\.\d+/site-packages/")


def said(*command: str | Path) -> str:
    """Return what a command says."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def listed(packages: Packages, kind: str) -> dict[str, tuple[str, str]]:
    """Return the files of a package: mode as ls writes it and owner, by path."""
    if kind == "rpm":
        lines = said(
            "rpm",
            "-qp",
            "--qf",
            "[%{FILEMODES:perms} %{FILEUSERNAME}/%{FILEGROUPNAME} %{FILENAMES}\\n]",
            packages.rpm(NEW),
        )
        return {place: (mode, owner) for mode, owner, place in (line.split(" ", 2) for line in lines.splitlines())}
    rows = (line.split(None, 5) for line in said("dpkg-deb", "--contents", packages.deb(NEW)).splitlines())
    return {row[5][1:].partition(" -> ")[0].rstrip("/"): (row[0], row[1]) for row in rows}


@pytest.mark.parametrize("kind", ["deb", "rpm"])
def test_files_modes_and_owners(packages: Packages, kind: str) -> None:
    """All is root's and writable by root alone, only programs can be run, and nothing that is wanted is missing."""
    files = listed(packages, kind)
    assert (WANTED | MORE[kind]) - files.keys() == set()
    assert {owner for _, owner in files.values()} == {"root/root"}
    plain = {"drwxr-xr-x", "-rw-r--r--"}
    odd = {place for place, (mode, _) in files.items() if mode not in plain and not mode.startswith("l")}
    assert odd == PROGRAMS
    assert {files[program][0] for program in PROGRAMS} == {"-rwxr-xr-x"}


@pytest.mark.parametrize("kind", ["deb", "rpm"])
def test_every_module_is_compiled(packages: Packages, kind: str) -> None:
    """Each module comes with its bytecode, and no tests or sources of compiled modules come along."""
    files = listed(packages, kind)
    modules = {place for place in files if OWN.match(place) and place.endswith(".py")}
    compiled = {re.sub(r"__pycache__/(\w+)\.cpython-3\d+\.pyc$", r"\1.py", place) for place in files}
    assert len(modules) > 300
    assert modules - compiled == set()
    assert {place for place in files if re.search(r"/tests/|\.(pyx|pxd|c|h|pyi)$", place)} == set()


def test_what_the_packages_say_of_themselves(packages: Packages) -> None:
    """Versions rise, a release candidate comes before its release, and the interpreter is the distribution's own."""
    deb = said("dpkg-deb", "--field", packages.deb(NEW), "Version", "Depends", "Recommends", "Architecture")
    python = {"debian12": "python3.11", "ubuntu24.04": "python3.12"}[packages.distribution]
    assert f"Depends: {python}, " in deb
    assert "Recommends: docker.io | " in deb
    assert "Architecture: amd64" in deb
    said(
        "dpkg",
        "--compare-versions",
        said("dpkg-deb", "--field", packages.deb(OLD), "Version").strip(),
        "lt",
        f"{NEW}-1~deb12",
    )
    said("dpkg", "--compare-versions", f"{NEW}-1~deb12", "lt", "0.9-1~deb12")
    rpm = packages.rpm(NEW)
    assert said("rpm", "-qp", "--qf", "%{VERSION}-%{RELEASE}.%{ARCH}", rpm) == f"{NEW}-1.amzn2023.x86_64"
    assert "python3.11" in said("rpm", "-qp", "--requires", rpm).splitlines()
    assert "docker" in said("rpm", "-qp", "--recommends", rpm).splitlines()
    assert said("rpm", "-qpc", rpm) == "/etc/neurond/neurond.toml\n"
    assert said("dpkg-deb", "--info", packages.deb(NEW), "conffiles") == "/etc/neurond/neurond.toml\n"


def test_two_builds_have_the_same_bytes(packages: Packages, tmp_path: Path) -> None:
    """A package can be made again by anybody who wants to know what is in it."""
    build(tmp_path, "--version", NEW, packages.distribution, "amzn2023")
    assert next(tmp_path.glob("*.deb")).read_bytes() == packages.deb(NEW).read_bytes()
    assert next(tmp_path.glob("*.rpm")).read_bytes() == packages.rpm(NEW).read_bytes()
