"""Makes the packages: a tree as it will lie on the host, then nfpm on it. Called by packaging/build.

What is in them depends on nothing but the commit, the lock file and the Python that compiles: the same build gives the
same bytes. The time of all files is that of the last commit, or SOURCE_DATE_EPOCH.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import documents

from neurond import __version__

REPOSITORY = Path(__file__).resolve().parent.parent
FILES = REPOSITORY / "packaging" / "files"
LOCK = REPOSITORY / "packaging" / "requirements-run.txt"
CACHE = REPOSITORY / ".cache"
HOME = "opt/neurond"
NOT_NEEDED = ("*.pyi", "*.pyx", "*.pxd", "*.c", "*.h", "tests", "bin", "__pycache__")
"""What wheels carry that no host needs: what they were compiled from, and tests."""


@dataclass(frozen=True)
class Target:
    """A distribution that a package is made for."""

    name: str
    kind: str
    """deb or rpm"""
    release: str
    """Second part of the package's version: which of them this is, as 1~deb12."""
    python: str
    """Its own interpreter, whose package has the same name, as python3.11."""


TARGETS = (
    Target("debian12", "deb", "1~deb12", "python3.11"),
    Target("ubuntu24.04", "deb", "1~ubuntu24.04", "python3.12"),
    Target("amzn2023", "rpm", "1.amzn2023", "python3.11"),
)

LAUNCHER = """\
#!/{home}/bin/python -IS
# Without the site module, which would search for what this program has no use for, it begins sooner.
import sys

sys.path.append("/{home}/lib/{python}/site-packages")

from {module} import {function}

sys.exit({function}())
"""


def main() -> int:
    """Build what is asked for; return the exit code."""
    parser = argparse.ArgumentParser(prog="packaging/build", description=__doc__.partition("\n")[0])
    names = [target.name for target in TARGETS]
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"deb, rpm, or some of {', '.join(names)} (default: all)"
    )
    parser.add_argument("--version", help="version of the packages (default: that of neurond)")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "dist", help="where to (default: dist/)")
    parser.add_argument("--check", action="store_true", help="build twice, and fail if the bytes differ")
    parser.add_argument("--fetch", action="store_true", help="only download what the packages carry, for a build later")
    options = parser.parse_args()
    for word in options.targets:
        if word not in {"deb", "rpm", *names}:
            parser.error(f"no target {word!r}: there are deb, rpm, {', '.join(names)}")
    version = options.version or __version__
    if not re.fullmatch(r"\d+(\.\d+)*([~+][a-z0-9.]+)?", version):
        parser.error(f"{version!r} is no version such as 1.2, 1.2.3 or 1.3~rc1")
    for target in TARGETS:
        if options.targets and not {target.name, target.kind} & set(options.targets):
            continue
        if options.fetch:
            dependencies(target)
        else:
            package = build(target, version, options.output)
            print(f"{os.path.relpath(package)}  {package.stat().st_size / 1e6:.1f} MB", flush=True)
            if options.check:
                check_again(target, version, package)
    return 0


def check_again(target: Target, version: str, package: Path) -> None:
    """Build once more, and raise SystemExit where the result is another."""
    with tempfile.TemporaryDirectory() as other:
        again = build(target, version, Path(other))
        if again.read_bytes() != package.read_bytes():
            sys.exit(f"two builds of {package.name} differ: compare it with a second one by diffoscope")


def build(target: Target, version: str, output: Path) -> Path:
    """Make one package; return its path."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="neurond-package.") as work:
        root = Path(work) / "root"
        fill(root, target, version)
        config = Path(work) / "nfpm.json"  # JSON is YAML too
        config.write_text(json.dumps(description(root, target, version), indent=1))
        package = output / file_name(target, version)
        nfpm = Path(sys.executable).with_name("nfpm")
        done = subprocess.run(
            [nfpm, "package", "--config", config, "--packager", target.kind, "--target", package],
            env={**os.environ, "SOURCE_DATE_EPOCH": str(int(build_time().timestamp()))},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"nfpm made no package for {target.name}:\n{done.stdout}{done.stderr}")
        return package


def file_name(target: Target, version: str) -> str:
    """Return the name of a package's file, as the tools of its kind have it."""
    if target.kind == "deb":
        return f"neurond_{version}-{target.release}_amd64.deb"
    return f"neurond-{version}-{target.release}.x86_64.rpm"


def build_time() -> datetime:
    """Return the time that all files are given."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    if not seconds:
        command = ["git", "-C", str(REPOSITORY), "log", "-1", "--format=%ct"]
        seconds = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return datetime.fromtimestamp(int(seconds), UTC)


def fill(root: Path, target: Target, version: str) -> None:
    """Lay out the files of a package below a directory as they will lie on the host."""
    site = root / HOME / "lib" / target.python / "site-packages"
    ignore = shutil.ignore_patterns(*NOT_NEEDED)
    shutil.copytree(dependencies(target), site, ignore=ignore)
    shutil.copytree(REPOSITORY / "neurond", site / "neurond", ignore=ignore)
    init = site / "neurond" / "__init__.py"
    init.write_text(init.read_text().replace(__version__, version))
    compile_all(site, target)
    make_environment(root / HOME, target)
    launcher(root / "usr/bin/neurond", target, "neurond.cli", "command")
    launcher(root / "usr/libexec/docker/cli-plugins/docker-neurond", target, "neurond.cli.docker", "plugin")
    for source, place in files_for(target):
        put(source, root / place)
    example = documents.output_of("config", "--example")
    documents.put(root / "etc/neurond/neurond.toml", example.encode())
    documents.write_all(root, target.kind, version, build_time().date().isoformat(), example)
    (root / "etc/neurond/conf.d").mkdir(parents=True)


def files_for(target: Target) -> Iterator[tuple[Path, str]]:
    """Yield the files that are in the package as they are here: where from, where to."""
    for unit in ("neurond.service", "neurond.socket"):
        yield REPOSITORY / "systemd" / unit, f"usr/lib/systemd/system/{unit}"
    catalog = REPOSITORY / "systemd" / "neurond.catalog"  # explains what the journal has
    if catalog.exists():
        yield catalog, f"usr/lib/systemd/catalog/{catalog.name}"
    yield FILES / "sysusers.conf", "usr/lib/sysusers.d/neurond.conf"
    yield FILES / "tmpfiles.conf", "usr/lib/tmpfiles.d/neurond.conf"
    yield FILES / "60-neurond.rules", "usr/lib/udev/rules.d/60-neurond.rules"
    yield FILES / "60-neurond-enforced.rules", "usr/share/neurond/udev/60-neurond-enforced.rules"
    if target.kind == "rpm":
        yield FILES / "preset", "usr/lib/systemd/system-preset/90-neurond.preset"
    else:
        yield FILES / "copyright", "usr/share/doc/neurond/copyright"


def put(source: Path, place: Path) -> None:
    """Copy a file, and make the directories above it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, place)


def launcher(place: Path, target: Target, module: str, function: str) -> None:
    """Write a program that calls a function of neurond."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(LAUNCHER.format(home=HOME, python=target.python, module=module, function=function))
    place.chmod(0o755)


def make_environment(home: Path, target: Target) -> None:
    """Make a virtual environment around the packages, of the distribution's own interpreter."""
    interpreter = f"/usr/bin/{target.python}"
    (home / "bin").mkdir()
    for name in ("python", "python3", target.python):
        (home / "bin" / name).symlink_to(interpreter)
    version = target.python.removeprefix("python")
    (home / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\nexecutable = {interpreter}\n"
    )


def dependencies(target: Target) -> Path:
    """Return a directory with what neurond needs, as the lock file pins it; it is kept for the next build."""
    mark = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    kept = CACHE / f"package-{target.python}-{mark}"
    if not kept.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            command = [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"),
                *("--no-compile", "--require-hashes", "--only-binary=:all:", "--implementation=cp"),
                f"--python-version={target.python.removeprefix('python')}",
                *(f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (34, 28, 17, 12)),  # AL2023 has 2.34
                *("--target", f"{work}/site", "--requirement", str(LOCK)),
            ]
            subprocess.run(command, check=True)
            for record in Path(work).glob("site/*.dist-info/RECORD"):
                record.unlink()  # names what is left out here, and where pip put it
            Path(work, "site").rename(kept)
    return kept


def compile_all(site: Path, target: Target) -> None:
    """Compile all modules, so that no start has to: by hash and unchecked, as the files' times say nothing.

    Without an interpreter of the target's version here, the package compiles at its installation.
    """
    interpreter = interpreter_for(target.python)
    if interpreter is None:
        print(f"no {target.python} here: {target.name}'s package compiles its modules when it is installed", flush=True)
        return
    command = [interpreter, "-I", "-m", "compileall", "-q", "--invalidation-mode=unchecked-hash"]
    subprocess.run([*command, f"-s{site}", f"-p/{HOME}/lib/{target.python}/site-packages", str(site)], check=True)


def interpreter_for(name: str) -> str | None:
    """Return an interpreter of this version, if there is one."""
    pyenv = Path("~/.pyenv/versions").expanduser()
    candidates = [sys.executable, f"/usr/bin/{name}", *map(str, sorted(pyenv.glob(f"*/bin/{name}")))]
    question = "import sys; print('python%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            done = subprocess.run([candidate, "-I", "-c", question], capture_output=True, text=True, check=False)
            if done.stdout.strip() == name:
                return candidate
    return None


def description(root: Path, target: Target, version: str) -> dict[str, Any]:
    """Return what nfpm is told of a package."""
    scripts = {
        "deb": {"postinstall": "postinst", "preremove": "prerm", "postremove": "postrm"},
        "rpm": {"postinstall": "post", "preremove": "preun", "postremove": "postun"},
    }[target.kind]
    found: dict[str, Any] = {
        "name": "neurond",
        "arch": "amd64",
        "platform": "linux",
        "version": version,
        "version_schema": "none",
        "release": target.release,
        "section": "admin",
        "priority": "optional",
        "maintainer": "The neurond developers <neurond@localhost>",
        "description": "One ledger per host of who holds which AWS Neuron chip\n"
        "A daemon that leases Neuron chips to processes and containers, compares its ledger with the kernel, and\n"
        "starts containers with exactly the chips that they hold.",
        "license": "Apache-2.0",
        "mtime": build_time().isoformat(),
        "depends": [target.python, "libudev1", "passwd", "systemd"]
        if target.kind == "deb"
        else [target.python, "shadow-utils", "systemd", "systemd-libs"],
        "recommends": ["docker.io | docker-ce | moby-engine", "udev"] if target.kind == "deb" else ["docker"],
        "scripts": {when: str(FILES / target.kind / name) for when, name in scripts.items()},
        "contents": list(contents(root)),
        "deb": {"compression": "zstd"},
        "rpm": {"compression": "zstd", "buildhost": "neurond", "group": "System Environment/Daemons"},
    }
    if target.kind == "rpm":
        found["rpm"]["scripts"] = {"posttrans": str(FILES / "rpm" / "posttrans")}
    return found


def contents(root: Path) -> Iterator[dict[str, Any]]:
    """Yield each file of a package, and the directories that are its own, with their modes; root owns all."""
    for path in sorted(root.rglob("*")):
        place = "/" + str(path.relative_to(root))
        if path.is_symlink():
            yield {"type": "symlink", "src": str(path.readlink()), "dst": place}
        elif path.is_dir():
            if is_own(place):
                yield {"type": "dir", "dst": place, "file_info": {"mode": 0o755}}
        else:
            mode = 0o755 if place.startswith(("/usr/bin/", "/usr/libexec/")) else 0o644
            kind = {"type": "config|noreplace"} if place.startswith("/etc/") else {}
            yield {"src": str(path), "dst": place, "file_info": {"mode": mode}, **kind}


def is_own(place: str) -> bool:
    """Tell whether a directory comes and goes with neurond: its own, and those of programs that may not be there."""
    return (
        re.search(r"/neurond(/|$)|^/usr/share/(fish|zsh|bash-completion)(/|$)|^/usr/libexec/docker", place) is not None
    )


if __name__ == "__main__":
    sys.exit(main())
