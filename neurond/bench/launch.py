"""What it costs to start something on leased chips, beside starting it without."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from neurond.bench.report import Report
from neurond.bench.servers import Daemon
from neurond.bench.turns import Plan, in_turn

SECTION = "launch"
IMAGE = "neurond-bench:1"
BUSYBOX = Path("/bin/busybox")


def seconds(plan: Plan, engine: str | None) -> float:
    """Return about how long this takes."""
    return _times(plan) * (0.4 + 6 * bool(engine)) + 5


def measure(plan: Plan, report: Report, place: Path, engine: str | None, image: str | None) -> None:
    """Measure it; `engine` is the address of a Docker Engine, `image` one of its images that has `true`."""
    report.progress("launch: neurond run beside the bare interpreter, flock")
    with ExitStack() as undo:
        reached = engine if engine and _answers(engine) else None
        daemon = undo.enter_context(Daemon(place / "launch", 16, reached))
        daemon.free()
        commands = {
            "python3 -I -c pass": [sys.executable, "-I", "-c", "pass"],
            "neurond run -n 1 -- true": [*neurond(), "run", "-n", "1", "--", "true"],
        }
        if shutil.which("flock"):
            commands["flock FILE true"] = ["flock", str(place / "launch.lock"), "true"]
        found = _walls(_times(plan), commands, daemon)
        bare, ours, *_ = commands
        report.compare(SECTION, f"{ours}, against {bare}", found[ours], found[bare], must=3.0, aim=2.0, upward=False)
        for name, walls in found.items():
            report.add(SECTION, name, "ms", [wall * 1e3 for wall in walls])
        if reached is None:
            why = f"no Docker Engine answers at {engine}" if engine else "no Docker Engine is given (--docker URL)"
            report.leave_out("container run and docker run", why)
            return
        report.progress("launch: containers")
        found_image = image or undo.enter_context(_image(reached))
        if found_image is None:
            report.leave_out("container run and docker run", "no static /bin/busybox to make an image of; give --image")
            return
        _measure_containers(plan, report, daemon, reached, found_image)


def _measure_containers(plan: Plan, report: Report, daemon: Daemon, engine: str, image: str) -> None:
    commands = {
        "docker run": ["docker", "--host", engine, "run", "--rm", "--network=none", image, "true"],
        "neurond container run": [*neurond(), "container", "run", "-n", "1", "--rm", "--network=none", image, "true"],
        "neurond docker run": [*neurond(), "docker", "run", "-n", "1", "--rm", "--network=none", image, "true"],
    }
    found = _walls(max(plan.rounds, 3), commands, daemon, engine)
    for name, walls in found.items():
        report.add(SECTION, name, "ms", [wall * 1e3 for wall in walls])
    plain, run, own = found["docker run"], found["neurond container run"], found["neurond docker run"]
    what = "neurond container run, against docker run"
    report.compare(SECTION, what, run, plain, must=1.10, aim=1.0, upward=False)
    more = [(one - other) * 10 for one, other in zip(own, plain, strict=True)]
    what = "neurond docker run minus docker run, in 100 ms"
    report.compare(SECTION, what, more, [1.0] * len(more), must=1.0, aim=0.5, upward=False)


def neurond() -> list[str]:
    """Return the command as people have it: as it was called here, the script beside the interpreter, or the module."""
    scripts = [Path(sys.argv[0]), Path(sys.executable).with_name("neurond")]
    found = next((one for one in scripts if one.name == "neurond" and os.access(one, os.X_OK) and one.is_file()), None)
    return [str(found.absolute())] if found else [sys.executable, "-m", "neurond"]


def _times(plan: Plan) -> int:
    return 5 if plan.quick else 40


def _walls(
    times: int, commands: Mapping[str, Sequence[str]], daemon: Daemon, engine: str | None = None
) -> dict[str, list[float]]:
    env = os.environ | {"NEUROND_HOST": f"unix://{daemon.socket}"} | ({"DOCKER_HOST": engine} if engine else {})

    def wall_of(command: Sequence[str]) -> Callable[[], float]:
        def wall() -> float:
            begun = time.perf_counter()
            done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False)
            took = time.perf_counter() - begun
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(command)}: {done.stderr.decode(errors='replace')}")
            return took

        return wall

    return in_turn(times, {name: wall_of(command) for name, command in commands.items()})


def _answers(engine: str) -> bool:
    if not shutil.which("docker"):
        return False
    command = ["docker", "--host", engine, "version"]
    return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0


@contextmanager
def _image(engine: str) -> Iterator[str | None]:
    """Import an image that is nothing but busybox, for as long as it is needed."""
    if not BUSYBOX.exists():
        yield None
        return
    tar = subprocess.run(
        ["tar", "--create", "--dereference", "--transform", "s,.*,bin/true,", "--file", "-", str(BUSYBOX)],
        capture_output=True,
        check=True,
    ).stdout
    docker = ["docker", "--host", engine]
    subprocess.run([*docker, "import", "-", IMAGE], input=tar, capture_output=True, check=True)
    try:
        yield IMAGE
    finally:
        subprocess.run([*docker, "rmi", "--force", IMAGE], capture_output=True, check=False)
