"""task run, task describe, host describe: what is asked of the daemon, and what is made of its answers.

The daemon here is a script of replies, on a real socket.
"""

import base64
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_taskfile import FILES, container, definition, devices
from tests.harness import NEUROND, PATIENCE, Daemon, eventually

Replies = list[dict[str, Any]]

LEASED = {"lease": "abcd-1", "chips": [0]}


def output(text: str, name: str = "app", stream: str = "stdout") -> dict[str, Any]:
    """Return a reply with output of a container."""
    return {"container": name, "stream": stream, "data": base64.b64encode(text.encode()).decode()}


class Scripted:
    """A daemon that answers each method with the replies that it is given, and keeps what it was asked.

    A reply {"error": NAME, ...} is an error; {"wait": METHOD} waits until that method is called, or the test is over;
    {"hang up": 1} closes the connection.
    """

    def __init__(self, path: Path) -> None:
        self.address = f"unix://{path}"
        self.replies: dict[str, Replies] = {"ListChips": [chips(16)]}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._over = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._over = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def asked(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of all calls of a method."""
        return [parameters for name, parameters in self.calls if name == method]

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as read, suppress(OSError):
            unread = b""
            while data := read.read1(1 << 16):
                *messages, unread = (unread + data).split(b"\0")
                for message in messages:
                    self._answer(connection, json.loads(message))

    def _answer(self, connection: socket.socket, call: dict[str, Any]) -> None:
        method = call["method"].removeprefix("io.neurond.")
        self.calls.append((method, call["parameters"]))
        replies = self.replies[method]
        for number, reply in enumerate(replies, start=1):
            if "wait" in reply:
                self._await(reply["wait"])
                continue
            if "hang up" in reply:
                connection.shutdown(socket.SHUT_RDWR)
                return
            sent = {"parameters": reply, "continues": number < len(replies)}
            if "error" in reply:
                sent = {"error": f"io.neurond.{reply['error']}", "parameters": reply}
            connection.sendall(json.dumps(sent).encode() + b"\0")

    def _await(self, method: str) -> None:
        eventually(lambda: self._over or self.asked(method))

    def cli(self, *arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        """Run the command line to its end."""
        return subprocess.run(
            [*NEUROND, *arguments],
            env=os.environ | {"NEUROND_HOST": self.address},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )


def chips(number: int, state: Callable[[int], str] = lambda _: "free") -> dict[str, Any]:
    """Return a reply of ListChips on a trn1.32xlarge."""
    found = [{"neuron_device": index, "state": state(index)} for index in range(number)]
    return {"instance_type": "trn1.32xlarge", "shape": "grid", "chips": found, "note": None}


@pytest.fixture
def scripted(run_dir: Path) -> Iterator[Scripted]:
    """Give a daemon of replies."""
    daemon = Scripted(run_dir / "socket")
    yield daemon
    daemon.close()


@pytest.fixture
def job(tmp_path: Path) -> str:
    """Give a task of one container with one chip."""
    return written(tmp_path, definition(container(linuxParameters=devices("/dev/neuron0"))))


@pytest.fixture
def pair(tmp_path: Path) -> str:
    """Give a task of two containers."""
    return written(tmp_path, definition(container("app"), container("helper", essential=False)))


def written(directory: Path, document: Any) -> str:
    """Write a task definition to a file, and return its path."""
    (directory / "job.json").write_text(json.dumps(document), "utf-8")
    return str(directory / "job.json")


# -- run --------------------------------------------------------------------------------------------------------------


def test_what_is_asked(scripted: Scripted, job: str) -> None:
    """The plan is asked of the daemon, with a wait without limit, and not for chips that are missing."""
    scripted.replies["RunTask"] = [LEASED, {"exit_code": 0}]
    assert scripted.cli("task", "run", job).returncode == 0
    (asked,) = scripted.asked("RunTask")
    assert asked.pop("wait") > 300 * 86400
    assert asked == {
        "name": "job",
        "chips": [0],
        "missing_ok": False,
        "containers": [
            {
                "name": "app",
                "essential": True,
                "depends_on": [],
                "all_chips": False,
                "chips": [{"chip": 0, "path": "/dev/neuron0", "permissions": "rwm"}],
                "options": {"image": "app:1"},
            }
        ],
    }


@pytest.mark.parametrize(
    ("option", "wait", "missing_ok"),
    [(("--no-wait",), 0, False), (("--wait", "10m"), 600, True), (("-w", "1h"), 3600, True)],
)
def test_waiting(scripted: Scripted, job: str, option: tuple[str, ...], wait: int, *, missing_ok: bool) -> None:
    """A task waits for its chips as every other verb that leases."""
    scripted.replies["RunTask"] = [{"exit_code": 0}]
    scripted.cli("task", "run", *option, job)
    (asked,) = scripted.asked("RunTask")
    assert (asked["wait"], asked["missing_ok"]) == (wait, missing_ok)


def test_stdin(scripted: Scripted) -> None:
    """`-` reads the task definition from stdin."""
    scripted.replies["RunTask"] = [{"exit_code": 0}]
    assert scripted.cli("task", "run", "-", stdin=json.dumps(definition(family="piped"))).returncode == 0
    assert scripted.asked("RunTask")[0]["name"] == "piped"


def test_exit_code_and_output(scripted: Scripted, job: str) -> None:
    """Output of a single container comes as it is, and the exit code is that of the last reply."""
    scripted.replies["RunTask"] = [
        {"status": "pulling app:1"},
        LEASED,
        output("out\nhalf"),
        output("err\n", stream="stderr"),
        {"container": "app", "exit_code": 3},
        {"exit_code": 3},
    ]
    done = scripted.cli("task", "run", job)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\nhalf", "neurond: pulling app:1\nerr\n")


def test_lines_of_several_containers_have_their_names(scripted: Scripted, pair: str) -> None:
    """Each line says which container it is from, however it is cut on its way; the last may lack its end."""
    scripted.replies["RunTask"] = [
        LEASED,
        output("one\ntw"),
        output("help", "helper"),
        output("o\n\nlast"),
        output("!\n", "helper"),
        output("oops\n", stream="stderr"),
        {"container": "helper", "exit_code": 0},
        {"container": "app", "exit_code": 5},
        {"exit_code": 5},
    ]
    done = scripted.cli("task", "run", pair)
    assert done.stdout == "app | one\napp | two\napp | \nhelper | help!\napp | last\n"
    assert done.stderr == "app | oops\nneurond: helper has ended with 0\nneurond: app has ended with 5\n"
    assert done.returncode == 5


def test_a_long_line_is_not_kept_back(scripted: Scripted, pair: str) -> None:
    """Output without any end of line is cut into lines rather than kept in memory."""
    scripted.replies["RunTask"] = [LEASED, *[output("x" * 100_000)] * 2, {"exit_code": 0}]
    lines = scripted.cli("task", "run", pair).stdout.splitlines()
    assert "".join(line.removeprefix("app | ") for line in lines) == "x" * 200_000
    assert all(len(line) <= (1 << 16) + len("app | ") for line in lines)


def test_detached(scripted: Scripted, job: str) -> None:
    """With -d the lease is printed, and the daemon is told not to follow."""
    scripted.replies["RunTask"] = [LEASED]
    done = scripted.cli("task", "run", "-d", job)
    assert (done.returncode, done.stdout, done.stderr) == (0, "abcd-1\n", "")
    assert scripted.asked("RunTask")[0]["detach"] is True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_stop_the_task(scripted: Scripted, job: str, number: signal.Signals) -> None:
    """A signal stops the task by its lease; what it says while it ends, and its exit code, still come."""
    scripted.replies["StopTask"] = [{}]
    scripted.replies["RunTask"] = [LEASED, output("begun\n"), {"wait": "StopTask"}, output("bye\n"), {"exit_code": 143}]
    command = [*NEUROND, "task", "run", job]
    env = os.environ | {"NEUROND_HOST": scripted.address}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.stdout.read() == "bye\n"
    assert process.returncode == 143
    assert scripted.asked("StopTask") == [{"task": "abcd-1"}]


def test_a_signal_before_the_lease_ends_the_command(scripted: Scripted, job: str) -> None:
    """While it waits there is no task to stop: the connection closes, which takes the request back."""
    scripted.replies["RunTask"] = [{"status": "waiting: 0 by root"}, {"wait": "never"}]
    command = [*NEUROND, "task", "run", job]
    env = os.environ | {"NEUROND_HOST": scripted.address}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "neurond: waiting: 0 by root\n"
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 143


@pytest.mark.parametrize(
    ("error", "option", "code"),
    [
        ({"error": "NoCapacity", "message": "0 is held"}, (), 75),
        ({"error": "NoCapacity", "message": "0 is held"}, ("-E", "9"), 9),
        ({"error": "WaitTimedOut", "message": "in vain"}, ("-E", "9"), 9),
        ({"error": "NoSuchChip", "message": "no such chip"}, (), 66),
        ({"error": "InvalidRequest", "message": "3 is not legal"}, (), 2),
        ({"error": "NotAllowed", "message": "group docker"}, (), 77),
        ({"error": "EngineFailed", "message": "no such image", "exit_code": 125}, (), 125),
        ({"error": "EngineFailed", "message": "not found", "exit_code": 127}, (), 127),
    ],
)
def test_refusals(scripted: Scripted, job: str, error: dict[str, Any], option: tuple[str, ...], code: int) -> None:
    """What the daemon refuses is said in its words, with the exit code of its kind."""
    scripted.replies["RunTask"] = [error]
    done = scripted.cli("task", "run", *option, job)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"neurond: {error['message']}\n")


def test_the_daemon_goes_away(scripted: Scripted, job: str) -> None:
    """If the daemon ends, the task is said to go on."""
    scripted.replies["RunTask"] = [LEASED, {"hang up": 1}]
    done = scripted.cli("task", "run", job)
    assert done.returncode == 125
    assert "task abcd-1 goes on, and keeps its chips" in done.stderr


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_bad_file_asks_for_nothing(scripted: Scripted) -> None:
    """What is wrong with a file is said with its name and place, and nothing is leased."""
    done = scripted.cli("task", "run", str(FILES / "snippet.json"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"neurond: {FILES}/snippet.json: line 7, column 13: something was left out")
    assert scripted.asked("RunTask") == []
    assert (
        scripted.cli("task", "run", "-", stdin="{").stderr
        == "neurond: stdin: line 1, column 2: the text ends in the middle\n"
    )


@pytest.mark.parametrize(("path", "why"), [("/nonexistent", "No such file"), ("/", "Is a directory")])
def test_a_file_that_cannot_be_read(scripted: Scripted, path: str, why: str) -> None:
    """A file that can't be opened is a failure before the start."""
    done = scripted.cli("task", "run", path)
    assert done.returncode == 125
    assert why in done.stderr


def test_a_task_for_another_host(scripted: Scripted, tmp_path: Path) -> None:
    """Placement is held against the host that the daemon describes."""
    constraint = {"type": "memberOf", "expression": "attribute:ecs.instance-type == inf2.xlarge"}
    done = scripted.cli("task", "run", written(tmp_path, definition(placementConstraints=[constraint])))
    assert done.returncode == 2
    assert "and this one has ecs.instance-type trn1.32xlarge" in done.stderr


def test_notes_are_said(scripted: Scripted, tmp_path: Path) -> None:
    """What a file has that changes nothing here is said on stderr."""
    scripted.replies["RunTask"] = [{"exit_code": 0}]
    done = scripted.cli("task", "run", written(tmp_path, definition(taskRoleArn="arn:x")))
    assert done.stderr == "neurond: taskRoleArn: not used: containers get no credentials from AWS by it\n"


def test_what_a_file_says_cannot_steer_a_terminal(scripted: Scripted) -> None:
    """Control characters of a file do not reach the terminal."""
    done = scripted.cli("task", "run", "-", stdin=json.dumps(definition(**{"\033[2J": 1})))
    assert "\033" not in done.stderr
    assert "\\x1b[2J: ECS has no such field here" in done.stderr


def test_check(scripted: Scripted) -> None:
    """--check says what would be asked, and asks for nothing."""
    done = scripted.cli("task", "run", "--check", str(FILES / "serve.json"))
    task, *lines = done.stdout.splitlines()
    assert (done.returncode, task) == (0, "task serve: chips 0")
    assert lines[:3] == ["  fetch: fetch:1, no chip", "  model: model:1, chips 0", "  proxy: proxy:1, no chip"]
    assert all(line.startswith("note: ") for line in lines[3:])
    assert {method for method, _ in scripted.calls} == {"ListChips"}


def test_check_json(scripted: Scripted) -> None:
    """--check -j prints an object with the plan and the notes."""
    done = scripted.cli("task", "run", "--check", "-j", str(FILES / "train.json"))
    printed = json.loads(done.stdout)
    assert printed.keys() == {"plan", "notes"}
    assert (printed["plan"]["all"], printed["plan"]["containers"][0]["all_chips"]) == (True, True)


def test_check_without_a_daemon(run_dir: Path) -> None:
    """--check needs no daemon, and then says what it could not check."""
    command = [*NEUROND, "task", "run", "-H", f"unix://{run_dir}/none", "--check", str(FILES / "serve.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0
    assert "placementConstraints[1].expression: not checked, as no daemon answers" in done.stdout


def test_json_goes_with_check(scripted: Scripted, job: str) -> None:
    """-j without --check is wrong usage."""
    assert scripted.cli("task", "run", "-j", job).returncode == 2


@pytest.mark.parametrize("arguments", [("task",), ("task", "stop"), ("host",), ("host", "run")])
def test_verbs_that_there_are_not(scripted: Scripted, arguments: tuple[str, ...]) -> None:
    """Without a verb, or with one that there is not, the usage is shown."""
    done = scripted.cli(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"usage: neurond {arguments[0]} {{")


# -- describe ---------------------------------------------------------------------------------------------------------


def row(name: str, **fields: Any) -> dict[str, Any]:
    """Return a row of ListContainers, of a task."""
    return {
        "name": f"job-{name}",
        "container_id": f"{name}0123",
        "image": "app:1",
        "status": "running",
        "exit_code": None,
        "lease": "abcd-1",
        "chips": [],
        "owner": "root",
        "task": "job",
        "task_id": "abcd-1",
        "task_container": name,
    } | fields


def test_describe_tasks(scripted: Scripted) -> None:
    """`task describe` prints tasks in the shape of DescribeTasks, containers of no task left out."""
    scripted.replies["ListContainers"] = [
        {
            "containers": [
                row("app", chips=[0, 1], health="healthy"),
                row("init", status="exited", exit_code=0),
                row("other", task=None, task_container=None),
            ]
        }
    ]
    done = scripted.cli("task", "describe")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "tasks": [
            {
                "taskArn": "neurond:task/abcd-1",
                "group": "family:job",
                "lastStatus": "RUNNING",
                "desiredStatus": "RUNNING",
                "startedBy": "root",
                "containers": [
                    {
                        "name": "app",
                        "runtimeId": "app0123",
                        "image": "app:1",
                        "lastStatus": "RUNNING",
                        "neuronDeviceIds": ["0", "1"],
                        "healthStatus": "HEALTHY",
                    },
                    {
                        "name": "init",
                        "runtimeId": "init0123",
                        "image": "app:1",
                        "lastStatus": "STOPPED",
                        "neuronDeviceIds": [],
                        "exitCode": 0,
                    },
                ],
            }
        ],
        "failures": [],
    }


def test_describe_some_tasks(scripted: Scripted) -> None:
    """Tasks are named by lease or taskArn; one that there is not is a failure in ECS's words, and exit code 66."""
    rows = [
        row("a", task_id="abcd-1"),
        row("b", task_id="abcd-2", status="created"),
        row("c", task_id="abcd-3", status="dead", lease=None),
    ]
    scripted.replies["ListContainers"] = [{"containers": rows}]
    done = scripted.cli("task", "describe", "abcd-2", "neurond:task/abcd-3")
    printed = json.loads(done.stdout)
    statuses = [(task["taskArn"], task["lastStatus"], task["desiredStatus"]) for task in printed["tasks"]]
    assert done.returncode == 0
    assert statuses == [
        ("neurond:task/abcd-2", "PENDING", "RUNNING"),
        ("neurond:task/abcd-3", "STOPPED", "STOPPED"),
    ]
    done = scripted.cli("task", "describe", "abcd-9")
    assert done.returncode == 66
    assert json.loads(done.stdout) == {
        "tasks": [],
        "failures": [{"arn": "neurond:task/abcd-9", "reason": "MISSING"}],
    }


def test_describe_host(scripted: Scripted) -> None:
    """`host describe` prints this host in the shape of DescribeContainerInstances; free chips remain."""
    scripted.replies["ListChips"] = [chips(4, lambda index: "leased" if index < 2 else "free")]
    printed = json.loads(scripted.cli("host", "describe").stdout)
    (instance,) = printed["containerInstances"]
    assert printed["failures"] == []
    entry = {"name": "NEURON_DEVICES", "type": "STRINGSET"}
    assert instance["registeredResources"] == [entry | {"stringSetValue": ["0", "1", "2", "3"]}]
    assert instance["remainingResources"] == [entry | {"stringSetValue": ["2", "3"]}]
    assert {"name": "ecs.instance-type", "value": "trn1.32xlarge"} in instance["attributes"]


def test_a_real_daemon_knows_this_host(daemon: Daemon) -> None:
    """What is described and checked is what a daemon says of its host: leased chips do not remain."""
    daemon.call("Acquire", count=4, ttl=60)
    (instance,) = json.loads(daemon.cli("host", "describe").stdout)["containerInstances"]
    assert instance["registeredResources"][0]["stringSetValue"] == [str(index) for index in range(16)]
    assert instance["remainingResources"][0]["stringSetValue"] == [str(index) for index in range(4, 16)]
    done = daemon.cli("task", "run", "--check", str(FILES / "serve.json"))
    assert done.returncode == 0
    assert "not checked" not in done.stdout
