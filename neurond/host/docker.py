"""The container engine, through the Docker SDK. The only import of docker; every method blocks, so call it in a thread.

The SDK is imported at the first use: it takes a quarter of a second, and a host without containers never needs it.
"""

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import docker

DEFAULT_URL = "unix:///var/run/docker.sock"
TIMEOUT = 60
QUICK_TIMEOUT = 10
"""Seconds that a question may take: an engine that hangs on one container must not keep us from the others for long."""
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
class Container:
    """A container as the engine knows it; `status` is its word: created, running, paused, restarting, exited, dead.

    Only `inspect` tells the rest: the exit code (of the last end, if any), the paths on the host of the devices given
    to it, their names where they were given by name (`cdi`), the rules of its device cgroup, whether it is privileged,
    the name of its restart policy, the pid of its main process (0 if it does not run), and its health, if that is
    watched.
    """

    id: str
    name: str
    image: str
    status: str
    labels: Mapping[str, str]
    exit_code: int | None = None
    devices: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()
    cgroup_rules: tuple[str, ...] = ()
    privileged: bool = False
    restart: str = "no"
    pid: int = 0
    health: str = ""

    @property
    def lives(self) -> bool:
        """Whether it runs or is paused, or the engine is about to start it again by itself."""
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
        self._clients: dict[int, docker.APIClient] = {}

    def version(self) -> str:
        """Return the engine's version, as in "20.10.24". Raises EngineUnreachable."""
        return str(self._ask(lambda api: api.version())["Version"])

    def cdi_directories(self) -> list[str]:
        """Return the directories in which the engine looks for CDI specs; empty if it has no CDI, or has it off."""
        return list(self._ask(lambda api: api.info(), QUICK_TIMEOUT).get("CDISpecDirs") or ())

    def image_env(self, image: str) -> list[str] | None:
        """Return the NAME=VALUE that an image sets; None if it is not there. Nothing is pulled."""
        found = self._image(image)
        return None if found is None else list(found.get("Env") or ())

    def image_labels(self, image: str) -> dict[str, str]:
        """Return the labels that containers of an image inherit; none if it is not there."""
        return dict((self._image(image) or {}).get("Labels") or {})

    def _image(self, image: str) -> dict[str, Any] | None:
        try:
            raw = self._ask(lambda api: api.inspect_image(image))  # type: ignore[no-untyped-call]
        except EngineError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        return raw.get("Config") or {}

    def pull(self, image: str, tell: Callable[[str], bool], platform: str | None = None) -> None:
        """Pull an image; `tell` gets lines for people and returns False to stop the pull."""
        repository, tag = _split_image(image)
        for line in self._ask(lambda api: api.pull(repository, tag=tag, stream=True, decode=True, platform=platform)):
            if "error" in line:
                raise EngineError(f"cannot pull {image}: {line['error']}", 500)
            if not tell(" ".join(filter(None, (line.get("id"), line.get("status"), line.get("progress"))))):
                return

    def create(self, name: str, body: Mapping[str, Any], platform: str | None = None) -> str:
        """Create a container of the Engine API's form (see spec.py) and return its id.

        Raises EngineError; nothing is left behind then, unless the answer was lost.
        """
        made = self._ask(lambda api: api.create_container_from_config(dict(body), name, platform))  # type: ignore[no-untyped-call]
        return str(made["Id"])

    def start(self, container: str) -> None:
        """Start a created container."""
        self._ask(lambda api: api.start(container))

    def attach(self, container: str, *, tty: bool = False) -> Output:
        """Return the output of a container from now on."""
        wanted = {"stream": 1, "stdout": 1, "stderr": 1}
        return self._output("POST", f"/containers/{container}/attach", wanted, framed=not tty)

    def input(self, container: str) -> socket.socket:
        """Return a socket whose data go to the standard input of a container; shut it down to end that."""

        def work(api: "docker.APIClient") -> socket.socket:
            attached = api.attach_socket(container, {"stdin": 1, "stream": 1})
            sock: socket.socket = getattr(attached, "_sock", attached)
            own = sock.dup()  # docker-py's object closes its own when it is collected
            own.settimeout(None)
            return own

        return self._ask(work)  # type: ignore[no-any-return]

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
            raw = self._ask(lambda api: api.inspect_container(container), QUICK_TIMEOUT)
        except EngineError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        host = raw["HostConfig"]
        return Container(
            raw["Id"],
            raw["Name"].lstrip("/"),
            raw["Config"]["Image"],
            raw["State"]["Status"],
            raw["Config"].get("Labels") or {},
            exit_code=int(raw["State"]["ExitCode"]),
            devices=tuple(str(device["PathOnHost"]) for device in host.get("Devices") or ()),
            cdi=tuple(
                name
                for request in host.get("DeviceRequests") or ()
                if request.get("Driver") == "cdi"
                for name in request.get("DeviceIDs") or ()
            ),
            cgroup_rules=tuple(host.get("DeviceCgroupRules") or ()),
            privileged=bool(host.get("Privileged")),
            restart=(host.get("RestartPolicy") or {}).get("Name") or "no",
            pid=int(raw["State"].get("Pid") or 0),
            health=(raw["State"].get("Health") or {}).get("Status") or "",
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
            for raw in self._ask(lambda api: api.containers(**wanted), QUICK_TIMEOUT)
        ]

    def stop(self, container: str, grace: int | None) -> None:
        """Stop a container: its stop signal, then SIGKILL after `grace` seconds (None: its own, or 10)."""

        def work(api: "docker.APIClient") -> None:
            own = api.inspect_container(container)["Config"].get("StopTimeout")
            api.stop(container, timeout=grace if grace is not None else 10 if own is None else int(own))

        self._ask(work)

    def remove(self, container: str) -> None:
        """Remove a container with its anonymous volumes, running or not; gone already is done."""
        try:
            self._ask(lambda api: api.remove_container(container, force=True, v=True))
        except EngineError as error:
            if error.status not in {NOT_FOUND, CONFLICT}:
                raise

    def events(self, tell: Callable[[str, str], None]) -> None:
        """Call `tell` with action and id whenever something happens to a container, until the stream ends.

        The first call, without either, says that the engine is there and that from now on nothing is missed. A
        container that was sent a signal has a "kill" before its "die". Raises EngineError.
        """
        actions = ["start", "kill", "die", "destroy", "pause", "unpause", "rename", "update"]
        stream = self._ask(lambda api: api.events(filters={"type": "container", "event": actions}, decode=True))
        tell("", "")
        for event in stream:
            tell(event["Action"], event["Actor"]["ID"])

    # -- the door ---------------------------------------------------------------------------------------------------

    def _output(self, method: str, path: str, params: Mapping[str, Any], *, framed: bool = True) -> Output:
        def work(api: "docker.APIClient") -> Output:
            url = f"{api.base_url}/v{api.api_version}{path}"
            response = api.request(method, url, params=params, stream=True, timeout=None)
            api._raise_for_status(response)  # type: ignore[attr-defined] # noqa: SLF001 - makes docker's own errors
            return Output(response, framed=framed)

        return self._ask(work)  # type: ignore[no-any-return]

    def _ask(self, work: Callable[["docker.APIClient"], Any], timeout: int = TIMEOUT) -> Any:
        path = self.url.removeprefix("unix://")
        if path != self.url and not os.path.exists(path):  # noqa: PTH110 - before anything slow is imported
            self._lost(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        import docker  # noqa: PLC0415 - see the module's docstring
        import requests  # noqa: PLC0415

        try:
            return work(self._connected(timeout))
        except docker.errors.APIError as error:
            raise EngineError(str(error.explanation or error), error.status_code or 0) from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            self._lost(error)

    def _connected(self, timeout: int) -> "docker.APIClient":
        import docker  # noqa: PLC0415

        client = self._clients.get(timeout)
        if client is None:  # may be made twice at a time: behind a lock, all would wait for each that is not answered
            client = docker.APIClient(base_url=self.url, version="auto", timeout=timeout)
            self._clients[timeout] = client
        return client

    def _lost(self, error: Exception) -> NoReturn:
        self._clients = {}
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


def _split_image(image: str) -> tuple[str, str | None]:
    """Split an image name as `docker pull` does; without a tag or digest it is "latest"."""
    if "@" in image:
        return image, None
    repository, colon, tag = image.rpartition(":")
    if colon and "/" not in tag:
        return repository, tag
    return image, "latest"
