"""`neurond docker run`: docker gets the user's words untouched, and the devices of a lease."""

from pathlib import Path

import pytest

from tests.cli.fakes import Wrapper, added, run
from tests.harness import NEUROND

CORES = "NEURON_RT_VISIBLE_CORES"


def test_docker_gets_the_words_untouched_and_the_devices_first(wrapper: Wrapper) -> None:
    """Quoting, -it, an empty entry point, lines in values, arguments after the image that look like ours: all kept."""
    options = ["--rm", "-it", "--network", "bridge", "-v", "/a b:/c", "-e", "A=1 2\n3", "--entrypoint", "", "-w", "/"]
    command = ["image:1", "-n", "3", "--all", "sh", "-c", "echo 'a  b'\nexit", "", "--device", "/dev/neuron0"]
    assert wrapper.passed_on("run", "-n", "2", *options, *command) == ["run", *added(0, 1), *options, *command]


def test_nothing_is_asked_but_what_is_needed(wrapper: Wrapper) -> None:
    """The daemon is asked whether it likes the container, then for the chips, on one connection and in this order."""
    wrapper.passed_on("run", "-n", "2", "--privileged=false", "registry:5000/team/my-image:1@sha256:0")
    assert [name for name, _ in wrapper.daemon.calls] == ["CheckContainer", "Acquire"]
    assert wrapper.daemon.parameters("CheckContainer") == {
        "image": "registry:5000/team/my-image:1@sha256:0",
        "count": 2,
    }
    asked = wrapper.daemon.parameters("Acquire")
    assert asked.pop("wait") > 1e6
    assert asked == {
        "all": False,
        "count": 2,
        "missing_ok": False,
        "pid": 0,
        "name": "my-image",
        "env": True,
        "container": "run",
    }


def test_the_daemon_learns_what_could_open_other_chips(wrapper: Wrapper, tmp_path: Path) -> None:
    """All that could reach beyond the lease is shown to the daemon before any chip is leased; paths are absolute."""
    (tmp_path / "vars").write_text("\ufeff# none\n\n  FILE=1\nPASSED\nNOT_SET\nno name=1\n")
    wrapper.env["PASSED"] = "on"
    words = "--chips 4-7 --privileged --device /dev/fuse:/dev/fuse --device-cgroup-rule=c_1:*_rw -v ../x:/dev:ro"
    words += " --volume=data:/data --mount type=bind,src=../x,dst=/d --runtime neuron --gpus all -e A=1 -e PASSED"
    wrapper.daemon.cdi = "neurond.io/lease=ab12-3"
    words += f" -e NOT_SET --env-file {tmp_path}/vars -l a=b --restart always --name me --no-wait"
    given = [word.replace("_1", " 1").replace("*_", "* ") for word in words.split()]
    wrapper.passed_on("run", *given, "image")
    assert wrapper.daemon.parameters("CheckContainer") == {
        "image": "image",
        "chips": [4, 5, 6, 7],
        "privileged": True,
        "devices": ["/dev/fuse:/dev/fuse"],
        "cgroup_rules": ["c 1:* rw"],
        "volumes": [f"{Path.cwd().parent}/x:/dev:ro", "data:/data"],
        "mounts": [f"type=bind,src={Path.cwd().parent}/x,dst=/d"],
        "runtime": "neuron",
        "gpus": "all",
        "env": ["FILE=1", "PASSED=on", "A=1", "PASSED=on"],
        "labels": ["a=b"],
        "restart": "always",
    }
    asked = wrapper.daemon.parameters("Acquire")
    assert (asked["name"], asked["wait"], asked["chips"]) == ("me", 0, [4, 5, 6, 7])


def test_a_container_that_the_daemon_refuses_is_a_usage_error(wrapper: Wrapper) -> None:
    """The daemon's sentence is said, no chip is leased, and docker is not called."""
    wrapper.daemon.errors["CheckContainer"] = ("InvalidRequest", {"message": "--privileged opens every chip"})
    assert wrapper.refused("run", "-n1", "--privileged", "image") == "neurond: --privileged opens every chip\n"
    assert [name for name, _ in wrapper.daemon.calls] == ["CheckContainer"]


@pytest.mark.parametrize(
    ("kind", "options", "code"),
    [
        ("NoCapacity", [], 75),
        ("WaitTimedOut", ["-E", "9"], 9),
        ("NotAllowed", [], 77),
        ("NoSuchChip", [], 66),
        ("InvalidRequest", [], 2),
        ("JournalFull", [], 125),
    ],
)
def test_without_a_lease_docker_is_not_called(wrapper: Wrapper, kind: str, options: list[str], code: int) -> None:
    """The exit codes are those of the other verbs, 125 for what failed before the start."""
    wrapper.daemon.errors["Acquire"] = (kind, {"message": "no"})
    done = wrapper.cli("docker", "run", "-n", "1", *options, "image")
    assert (done.returncode, done.stderr, wrapper.recorder.called) == (code, "neurond: no\n", False)


def test_a_daemon_that_is_not_there_is_69(wrapper: Wrapper) -> None:
    """Without a daemon docker is not called."""
    done = wrapper.cli("docker", "run", "-n", "1", "image", env={"NEUROND_HOST": "/never/there"})
    assert (done.returncode, wrapper.recorder.called) == (69, False)


def test_no_docker_is_127(wrapper: Wrapper) -> None:
    """Without docker in PATH nothing is leased."""
    done = wrapper.cli("docker", "run", "-n", "1", "image", env={"PATH": "/never/there"})
    assert (done.returncode, done.stderr) == (127, "neurond: docker: command not found\n")
    assert wrapper.daemon.calls == []


def test_docker_has_the_process_and_the_exit_code(wrapper: Wrapper) -> None:
    """The process to which the lease is bound becomes docker, so its signals, terminal and exit code are docker's."""
    done = wrapper.cli("docker", "run", "-n", "1", "image", env={"RECORDER_EXITS": "37"})
    assert done.returncode == 37
    script = f"echo $$; exec {' '.join(NEUROND)} docker run -n 1 image"
    done = run(["sh", "-c", script], wrapper.env)
    assert int(done.stdout) == wrapper.recorder.pid


def test_it_is_said_what_is_waited_for(wrapper: Wrapper) -> None:
    """A request that waits says so on stderr, as with `neurond run`."""
    wrapper.daemon.waiting = "16 chips asked, 8 free"
    done = wrapper.cli("docker", "run", "-n", "1", "image")
    assert done.stderr == "neurond: waiting: 16 chips asked, 8 free (--no-wait fails at once)\n"
    assert wrapper.recorder.argv == ["run", *added(0), "image"]


@pytest.mark.parametrize("order", [list(range(12)), list(reversed(range(12)))])
def test_devices_written_by_hand_are_the_wish(wrapper: Wrapper, order: list[int]) -> None:
    """Twelve flags ask for these twelve chips, which are added again in numeric order; -d with -it is allowed."""
    flags = [word for chip in order for word in ("--device", f"/dev/neuron{chip}")]
    argv = wrapper.passed_on("run", "-d", "-it", *flags, "-p", "80:80", "-p", "81:81", "image")
    assert argv == ["run", *added(*range(12)), "-d", "-it", "-p", "80:80", "-p", "81:81", "image"]
    assert wrapper.daemon.parameters("Acquire")["chips"] == list(range(12))


def test_a_device_keeps_its_name_inside(wrapper: Wrapper) -> None:
    """What the user wants a chip to be inside is what it is, also where devices come from a CDI specification."""
    wrapper.daemon.cdi = "neurond.io/lease=ab12-3"
    flags = ["--device=/dev/neuron7:/dev/neuron1:rw", "--device", "/dev/neuron6:/dev/neuron0", "--device", "/dev/fuse"]
    argv = wrapper.passed_on("run", *flags, "image")
    assert argv == [
        "run",
        *added(6, 7, inside={6: "/dev/neuron0", 7: "/dev/neuron1"}),
        "--device",
        "/dev/fuse",
        "image",
    ]


def test_the_same_chip_twice_is_one(wrapper: Wrapper) -> None:
    """A flag that is given twice asks for one chip."""
    argv = wrapper.passed_on("run", "--device", "/dev/neuron3", "--device=/dev/neuron3", "-n1", "image")
    assert argv == ["run", *added(3), "image"]


@pytest.mark.parametrize("agreeing", ["-n 2", "--chips 1,0", "--chips 0-1"])
def test_devices_and_options_that_agree_are_one_wish(wrapper: Wrapper, agreeing: str) -> None:
    """Who says the same twice is understood."""
    devices = ["--device", "/dev/neuron0", "--device", "/dev/neuron1"]
    assert wrapper.passed_on("run", *agreeing.split(), *devices, "image") == ["run", *added(0, 1), "image"]
    asked = wrapper.daemon.parameters("Acquire")
    assert (asked["chips"], asked.get("count")) == ([0, 1], None)


def test_permissions_are_dockers_to_refuse(wrapper: Wrapper) -> None:
    """They are passed on as given, with a warning where the runtime could not work with them."""
    flags = ["--device", "/dev/neuron0:r", "--device", "/dev/neuron1:/dev/neuron1:rwm", "--device=/dev/neuron2:/x:odd"]
    done = wrapper.cli("docker", "run", *flags, "image")
    assert done.stderr == "neurond: --device /dev/neuron0 has permissions 'r': the Neuron runtime needs rw\n"
    assert wrapper.recorder.argv[:7] == [
        "run",
        "--device",
        "/sim/dev/neuron0:/dev/neuron0:r",
        "--device",
        "/sim/dev/neuron1:/dev/neuron1:rwm",
        "--device",
        "/sim/dev/neuron2:/x:odd",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-n 3 --device /dev/neuron0 image", "--device asks for the chips 0, and -n for 3 of neurond's choice"),
        ("-n 0 --device /dev/neuron0 image", "--device asks for the chips 0, and -n for 0"),
        ("--all --device /dev/neuron0 image", "--device asks for the chips 0, and --all for all of them"),
        ("--chips 1 --device /dev/neuron0 image", "--device asks for the chips 0, and --chips for 1"),
        ("--device /dev/neuron0 --device /dev/neuron1:/dev/neuron0 image", "makes both chips 0 and 1 /dev/neuron0"),
        ("--device /dev/neuron0 /dev/neuron1 /dev/neuron2 image", "/dev/neuron1 stands where the image should"),
        ("--device /dev/neuron* image", "ask for chips with -n N or --chips 0-3"),
        ("image", "how many chips? neurond docker run -n N, --chips 0,1 or --all"),
        ("--all=false image", "how many chips?"),
        ("--all=perhaps image", "--all=perhaps: true or false"),
        ("-n 1", "docker run which image?"),
        ("-n 1 --chips 0 image", "not allowed with argument"),
        ("-n one image", "invalid int value: 'one'"),
        ("-n 1 --wait soon image", "'soon' is not a time"),
        ("-n 1 --foo image", "write --foo=VALUE"),
        ("-n 1 -l io.neurond.lease=x image", "label io.neurond.lease=x: the labels io.neurond.* are neurond's own"),
        ("-n 1 -e NEUROND_LEASE=x image", "-e NEUROND_LEASE: that variable is neurond's to set"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_leased(wrapper: Wrapper, words: str, said: str) -> None:
    """A sentence says what is wrong; the daemon is not asked, and docker is not called."""
    assert said in wrapper.refused("run", *words.split())
    assert wrapper.daemon.calls == []


def test_a_label_of_neuronds_in_a_file_is_refused(wrapper: Wrapper, tmp_path: Path) -> None:
    """A file of labels can't make a container another lease's."""
    file = tmp_path / "labels"
    file.write_text("a=b\nio.neurond.lease=other\n")
    assert "label io.neurond.lease=other" in wrapper.refused("run", "-n", "1", "--label-file", str(file), "image")


def test_variables_of_a_file_may_be_of_another_lease(wrapper: Wrapper, tmp_path: Path) -> None:
    """The whole environment in a file is no obstacle: what neurond adds by -e counts more to docker."""
    file = tmp_path / "vars"
    file.write_text("NEUROND_LEASE=other\n")
    argv = wrapper.passed_on("run", "-n", "1", "--env-file", str(file), "image")
    assert argv == ["run", *added(0), "--env-file", str(file), "image"]


def test_no_chips_is_plain_docker(wrapper: Wrapper) -> None:
    """With -n 0 docker gets the words as they are, and the daemon need not even run."""
    wrapper.env["NEUROND_HOST"] = "/never/there"
    assert wrapper.passed_on("run", "-n", "0", "--rm", "image", "ls") == ["run", "--rm", "image", "ls"]


def test_a_cdi_name_stands_for_the_devices(wrapper: Wrapper) -> None:
    """Where the daemon offers a CDI name, docker gets that one device."""
    wrapper.daemon.cdi = "neurond.io/lease=ab12-3"
    argv = wrapper.passed_on("run", "-n", "2", "image")
    assert argv == ["run", "--device", "neurond.io/lease=ab12-3", *added(0, 1)[4:], "image"]


@pytest.mark.parametrize(("numbering", "cores"), [("none", None), ("global", "24,25,26,27"), ("local", "0,1,2,3")])
def test_cores_are_numbered_as_asked(wrapper: Wrapper, numbering: str, cores: str | None) -> None:
    """NEURON_RT_VISIBLE_CORES is unset unless asked for: the host's numbers, or from 0 on."""
    argv = wrapper.passed_on("run", "--core-numbering", numbering, "--chips", "12,13", "image")
    more = ["-e", f"{CORES}={cores}"] if cores else []
    assert argv == ["run", *added(12, 13), *more, "image"]


@pytest.mark.parametrize("value", ["4", "4-5", "4,5", "0", "0-1"])
@pytest.mark.parametrize("numbering", ["none", "global"])
def test_own_cores_inside_the_lease_win(wrapper: Wrapper, value: str, numbering: str) -> None:
    """A value of the user's own, by the host's numbers or from 0 on, is passed on and nothing is set beside it."""
    words = ["--core-numbering", numbering, "--chips", "2", "-e", f"{CORES}={value}", "image"]
    assert wrapper.passed_on("run", *words) == ["run", *added(2), "-e", f"{CORES}={value}", "image"]


@pytest.mark.parametrize("value", ["0-31", "5-4", "", "4, 5", "nc4", "1,4"])
def test_own_cores_that_contradict_the_lease_are_refused(wrapper: Wrapper, value: str) -> None:
    """Before docker is called, with the cores of the lease where they help."""
    assert CORES in wrapper.refused("run", "--chips", "2", "-e", f"{CORES}={value}", "image")


def test_own_cores_of_a_file_or_the_environment_are_looked_at_too(wrapper: Wrapper, tmp_path: Path) -> None:
    """A value counts wherever docker takes it from, and -e counts more than a file."""
    (tmp_path / "vars").write_text(f"{CORES}=0-31\n")
    file = ["--env-file", str(tmp_path / "vars")]
    assert "the lease, which has 4-5" in wrapper.refused("run", "--chips", "2", *file, "image")
    assert "the lease, which has 4-5" in wrapper.refused("run", "--chips", "2", "-e", CORES, "image", env={CORES: "9"})
    wrapper.passed_on("run", "--chips", "2", *file, "-e", f"{CORES}=4", "image")


def test_options_come_from_the_environment_too(wrapper: Wrapper) -> None:
    """NEUROND_DOCKER_RUN_<OPTION> gives an option that the command line leaves open."""
    wrapper.env["NEUROND_DOCKER_RUN_COUNT"] = "2"
    assert wrapper.passed_on("run", "image") == ["run", *added(0, 1), "image"]
    assert wrapper.passed_on("run", "--chips", "5", "image") == ["run", *added(5), "image"]
    assert wrapper.passed_on("run", "--device", "/dev/neuron6", "image") == ["run", *added(6), "image"]


@pytest.mark.parametrize(
    ("words", "before"),
    [
        ("create", ["create"]),
        ("container run", ["container", "run"]),
        ("-H tcp://host:1 --context=there run", ["-H", "tcp://host:1", "--context=there", "run"]),
    ],
)
def test_docker_is_called_as_asked(wrapper: Wrapper, words: str, before: list[str]) -> None:
    """`create`, the long form, and options of docker itself before the verb."""
    assert wrapper.passed_on(*words.split(), "-n", "1", "image") == [*before, *added(0), "image"]


def test_start_is_dockers(wrapper: Wrapper) -> None:
    """`docker start` gets its words as they are: the daemon leases again when it sees the container start."""
    assert wrapper.passed_on("start", "-ai", "-n", "trainer") == ["start", "-ai", "-n", "trainer"]
    assert wrapper.daemon.calls == []


def test_other_verbs_are_dockers_own(wrapper: Wrapper) -> None:
    """What neurond has nothing to add to is done by docker itself, and that is said."""
    assert "use docker itself: docker ps" in wrapper.refused("ps")
    assert "usage: neurond docker" in wrapper.refused()


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["run", "-it", "--help", "image"], ["create", "--help"]]
)
def test_help_is_neuronds(wrapper: Wrapper, words: list[str]) -> None:
    """The help says how to ask for chips; docker is not called."""
    done = wrapper.cli("docker", *words)
    assert (done.returncode, done.stderr, wrapper.recorder.called) == (0, "", False)
    assert "-n N | --chips 0,1 | --all" in done.stdout


def test_a_broken_pipe_ends_docker_as_it_would_without_neurond(wrapper: Wrapper) -> None:
    """Python ignores SIGPIPE and SIGXFSZ; docker is started with both as they should be."""
    docker = wrapper.recorder.directory / "docker"
    docker.write_text("#!/bin/sh\nexec grep SigIgn /proc/self/status\n")
    done = wrapper.cli("docker", "run", "-n", "1", "image")
    assert int(done.stdout.split()[1], 16) & (1 << 12 | 1 << 24) == 0


def test_the_lease_is_printed_as_arguments_of_docker(wrapper: Wrapper) -> None:
    """`docker run $(neurond env ID --docker-args) IMAGE` gives a container the chips of a lease that there is."""
    done = wrapper.cli("env", "ab12-3", "--docker-args")
    assert done.stdout.split() == added(0)
    assert done.stdout.count("\n") == 1
    done = run(["sh", "-c", f"docker run $({' '.join(NEUROND)} env ab12-3 --docker-args) image"], wrapper.env)
    assert wrapper.recorder.argv == ["run", *added(0), "image"]


def test_the_daemons_connection_is_not_dockers(wrapper: Wrapper) -> None:
    """Docker inherits no open file of neurond's."""
    docker = wrapper.recorder.directory / "docker"
    docker.write_text("#!/bin/sh\nls /proc/$$/fd\n")
    assert set(wrapper.cli("docker", "run", "-n", "1", "image").stdout.split()) <= {"0", "1", "2", "10", "255"}


@pytest.mark.parametrize("policy", ["always", "unless-stopped"])
@pytest.mark.parametrize("device", ["/dev/neuron6:/dev/neuron0", "/dev/neuron0:rwm", "/dev/neuron0:/dev/neuron0:r"])
def test_restart_for_ever_takes_a_name(wrapper: Wrapper, policy: str, device: str) -> None:
    """A chip that can't be given by the lease's name could be used by a container that docker starts late: refused."""
    said = wrapper.refused("run", "--restart", policy, "--device", device, "image")
    assert f"--restart {policy}: with a path or permissions of its own a chip can't be given by name" in said
    assert wrapper.daemon.calls == []


def test_restart_for_ever_without_a_name_is_given_up(wrapper: Wrapper) -> None:
    """Where names can't be written at the moment of the lease, docker is not called."""
    done = wrapper.cli("docker", "run", "-n", "1", "--restart", "always", "image")
    assert (done.returncode, wrapper.recorder.called) == (125, False)
    assert "at the moment the lease can't be given by name" in done.stderr
