"""The container engine, through the Docker SDK. The only import of docker; every method blocks, so call it in a thread.

The SDK is imported at the first use: it takes a quarter of a second, and a host without containers never needs it.
"""

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import docker

DEFAULT_URL = "unix:///var/run/docker.sock"
TIMEOUT = 60
LABEL = "io.neurond.lease"
STREAMS = {1: "stdout", 2: "stderr"}
NOT_FOUND, CONFLICT = 404, 409


class EngineError(Exception):
    """The engine refused; the sentence has its own words. `status` is that of HTTP, 0 if there was no answer."""

    def __init__(self, sentence: str, status: int = 0) -> None:
        super().__init__(sentence)
        self.status = status


class EngineUnreachable(EngineError):
    """The engine did not answer."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A container to create. Values are as in `docker run`; `devices` maps a node on the host to its path inside."""

    name: str
    image: str
    command: Sequence[str] = ()
    devices: Mapping[str, str] = field(default_factory=dict)
    env: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    volumes: Sequence[str] = ()
    ulimits: Sequence[str] = ()
    cap_add: Sequence[str] = ()
    workdir: str | None = None
    user: str | None = None
    shm_size: str | None = None
    network: str | None = None
    ipc: str | None = None
    entrypoint: str | None = None


@dataclass(frozen=True, slots=True)
class Container:
    """A container as the engine knows it; `status` is its word: created, running, paused, restarting, exited, dead.

    Only `inspect` tells the rest: the exit code (of the last end, if any), the paths on the host of the devices given
    to it, whether it is privileged, and the pid of its main process (0 if it does not run).
    """

    id: str
    name: str
    image: str
    status: str
    labels: Mapping[str, str]
    exit_code: int | None = None
    devices: tuple[str, ...] = ()
    privileged: bool = False
    pid: int = 0

    @property
    def lives(self) -> bool:
        """Whether it runs, or the engine will start it again by itself."""
        return self.status in {"running", "paused", "restarting"}


class Output:
    """The output of a container as it comes: iterate over (stream, data); `close` ends that from any thread."""

    def __init__(self, response: Any, *, framed: bool) -> None:
        from docker.types import CancellableStream  # noqa: PLC0415 - see the module's docstring

        self._response = response
        self._stream = CancellableStream(_frames(response, framed=framed), response)

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """Yield what comes until the container ends."""
        try:
            yield from self._stream
        finally:
            self._response.close()

    def close(self) -> None:
        """End the iteration."""
        with suppress(Exception):  # it may be closing on its own at this moment
            self._stream.close()


class Engine:
    """One engine at a fixed address; connects when needed, and again after it was restarted."""

    def __init__(self, url: str = DEFAULT_URL) -> None:
        self.url = url
        self._client: docker.APIClient | None = None
        self._lock = threading.Lock()

    def version(self) -> str:
        """Return the engine's version, as in "20.10.24". Raises EngineUnreachable."""
        return str(self._ask(lambda api: api.version())["Version"])

    def has_image(self, image: str) -> bool:
        """Tell whether an image is there without pulling it."""
        try:
            self._ask(lambda api: api.inspect_image(image))  # type: ignore[no-untyped-call]
        except EngineError as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return True

    def pull(self, image: str, tell: Callable[[str], bool]) -> None:
        """Pull an image; `tell` gets lines for people and returns False to stop the pull."""
        repository, tag = _split_image(image)
        for line in self._ask(lambda api: api.pull(repository, tag=tag, stream=True, decode=True)):
            if "error" in line:
                raise EngineError(f"cannot pull {image}: {line['error']}", 500)
            if not tell(" ".join(filter(None, (line.get("id"), line.get("status"), line.get("progress"))))):
                return

    def create(self, spec: Spec) -> str:
        """Create a container and return its id. Raises EngineError; nothing is left behind then."""

        def work(api: "docker.APIClient") -> str:
            import docker.utils  # noqa: PLC0415

            try:
                shm_size = int(docker.utils.parse_bytes(spec.shm_size)) if spec.shm_size else None
            except docker.errors.DockerException as error:
                raise EngineError(f"--shm-size {spec.shm_size}: {error}") from None
            host_config = api.create_host_config(
                binds=[volume for volume in spec.volumes if ":" in volume],
                # Dictionaries: a text such as "/dev/neuron0:rw" would be read as a path inside called "rw".
                devices=[
                    {"PathOnHost": node, "PathInContainer": path, "CgroupPermissions": "rw"}  # type: ignore[misc]
                    for node, path in spec.devices.items()
                ],
                cap_add=list(spec.cap_add),
                ulimits=[
                    docker.types.Ulimit(name=name, soft=soft, hard=hard)
                    for name, soft, hard in map(parse_ulimit, spec.ulimits)
                ],
                shm_size=shm_size,
                network_mode=spec.network or "default",
                ipc_mode=spec.ipc,
            )
            made = api.create_container(
                spec.image,
                command=list(spec.command) or None,
                name=spec.name,
                environment=list(spec.env),
                labels=dict(spec.labels),
                volumes=[volume for volume in spec.volumes if ":" not in volume] or None,
                working_dir=spec.workdir,
                user=spec.user,
                entrypoint=None if spec.entrypoint is None else [spec.entrypoint],
                host_config=host_config,
            )
            return str(made["Id"])

        return self._ask(work)  # type: ignore[no-any-return]

    def start(self, container: str) -> None:
        """Start a created container."""
        self._ask(lambda api: api.start(container))

    def attach(self, container: str) -> Output:
        """Return the output of a container from now on."""
        return self._output("POST", f"/containers/{container}/attach", {"stream": 1, "stdout": 1, "stderr": 1})

    def logs(self, container: str, *, follow: bool, tail: int | None) -> Output:
        """Return the output so far, `tail` lines of it or all, and what follows if asked for."""
        wanted = {"stdout": 1, "stderr": 1, "follow": int(follow), "tail": "all" if tail is None else tail}
        framed = not self._ask(lambda api: api.inspect_container(container))["Config"]["Tty"]
        return self._output("GET", f"/containers/{container}/logs", wanted, framed=framed)

    def inspect(self, container: str) -> Container | None:
        """Return a container by id or name as it is at this moment; None if there is none.

        The list can lag behind: Docker 20.10 tells of a container's end before its list shows it.
        """
        try:
            raw = self._ask(lambda api: api.inspect_container(container))
        except EngineError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        return Container(
            raw["Id"],
            raw["Name"].lstrip("/"),
            raw["Config"]["Image"],
            raw["State"]["Status"],
            raw["Config"].get("Labels") or {},
            exit_code=int(raw["State"]["ExitCode"]),
            devices=tuple(str(device["PathOnHost"]) for device in raw["HostConfig"].get("Devices") or ()),
            privileged=bool(raw["HostConfig"].get("Privileged")),
            pid=int(raw["State"].get("Pid") or 0),
        )

    def containers(self) -> list[Container]:
        """Return all containers that carry the label of a lease, whatever their state; may lag behind a little."""
        return self._list(all=True, filters={"label": LABEL})

    def running(self) -> list[Container]:
        """Return all containers that run, whoever started them; may lag behind a little."""
        return self._list()

    def _list(self, **wanted: Any) -> list[Container]:
        return [
            Container(
                raw["Id"],
                (raw.get("Names") or ["/"])[0].lstrip("/"),
                raw.get("Image", ""),
                raw.get("State", "unknown"),
                raw.get("Labels") or {},
            )
            for raw in self._ask(lambda api: api.containers(**wanted))
        ]

    def stop(self, container: str, timeout: int) -> None:
        """Stop a container: its stop signal, then SIGKILL after `timeout` seconds."""
        self._ask(lambda api: api.stop(container, timeout=timeout))

    def remove(self, container: str) -> None:
        """Remove a container with its anonymous volumes, running or not; gone already is done."""
        try:
            self._ask(lambda api: api.remove_container(container, force=True, v=True))
        except EngineError as error:
            if error.status not in {NOT_FOUND, CONFLICT}:
                raise

    def events(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever something happens to a container, until the stream ends. Raises EngineError."""
        wanted = {"type": "container", "event": ["start", "die", "destroy", "pause", "unpause"]}
        for _ in self._ask(lambda api: api.events(filters=wanted, decode=True)):
            tell()

    # -- the door ---------------------------------------------------------------------------------------------------

    def _output(self, method: str, path: str, params: Mapping[str, Any], *, framed: bool = True) -> Output:
        def work(api: "docker.APIClient") -> Output:
            url = f"{api.base_url}/v{api.api_version}{path}"
            response = api.request(method, url, params=params, stream=True, timeout=None)
            api._raise_for_status(response)  # type: ignore[attr-defined] # noqa: SLF001 - makes docker's own errors
            return Output(response, framed=framed)

        return self._ask(work)  # type: ignore[no-any-return]

    def _ask(self, work: Callable[["docker.APIClient"], Any]) -> Any:
        path = self.url.removeprefix("unix://")
        if path != self.url and not os.path.exists(path):  # noqa: PTH110 - before anything slow is imported
            self._lost(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        import docker  # noqa: PLC0415 - see the module's docstring
        import requests  # noqa: PLC0415

        try:
            return work(self._connected())
        except docker.errors.APIError as error:
            raise EngineError(str(error.explanation or error), error.status_code or 0) from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            self._lost(error)

    def _connected(self) -> "docker.APIClient":
        import docker  # noqa: PLC0415

        with self._lock:
            if self._client is None:
                self._client = docker.APIClient(base_url=self.url, version="auto", timeout=TIMEOUT)
            return self._client

    def _lost(self, error: Exception) -> NoReturn:
        self._client = None
        cause: BaseException = error
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__ or cause
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise EngineUnreachable(
            f"the Docker Engine at {self.url} does not answer ({reason}): is it installed and running?"
        ) from error


def _frames(response: Any, *, framed: bool) -> Iterator[tuple[str, bytes]]:
    """Take apart the engine's stream: frames of 8 bytes of header (stream number, length) and the data."""
    if not framed:
        for data in response.iter_content(None):
            yield "stdout", data
        return
    while len(header := response.raw.read(8)) == 8:
        stream, length = struct.unpack(">BxxxL", header)
        yield STREAMS.get(stream, "stdout"), response.raw.read(length)


def parse_ulimit(text: str) -> tuple[str, int, int]:
    """Read NAME=SOFT[:HARD] into its parts; raises ValueError with a sentence."""
    name, equals, limits = text.partition("=")
    soft, _, hard = limits.partition(":")
    try:
        if name and equals:
            return name, int(soft), int(hard or soft)
    except ValueError:
        pass
    raise ValueError(f"--ulimit {text}: the form is NAME=SOFT[:HARD], as in memlock=-1:-1")


def _split_image(image: str) -> tuple[str, str | None]:
    """Split an image name as `docker pull` does; without a tag or digest it is "latest"."""
    if "@" in image:
        return image, None
    repository, colon, tag = image.rpartition(":")
    if colon and "/" not in tag:
        return repository, tag
    return image, "latest"
