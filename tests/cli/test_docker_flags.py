"""The reader of docker's command line takes words as docker does, and knows every flag that docker has."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurond.cli import Exit
from neurond.cli.chipdevices import chip_device
from neurond.cli.dockerflags import CommandLine, Flag, read, run_flags, table
from neurond.cli.launching import real_device

README = Path(__file__).parent.parent.parent / "README.md"
DOCKERS = [path for path in map(shutil.which, ("/usr/bin/docker", "/usr/local/bin/docker", "docker")) if path]
FLAGS = run_flags("run")
DOCKERS_OWN = [flag for flag in FLAGS if not flag.own and flag.long != "device"]
BOOLEANS = [flag for flag in DOCKERS_OWN if flag.boolean and flag.short]


def run(*words: str) -> CommandLine:
    """Read what follows `docker run`."""
    return read(words, FLAGS)


def helped(docker: str, verb: str) -> dict[str, tuple[str, bool]]:
    """Return the flags that docker's help names, with their short names, and whether they are booleans."""
    text = subprocess.run([docker, verb, "--help"], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^ +(?:-(\w), )?--([\w-]+)(?: ([\w-]+))?(?:  |$)", text, re.MULTILINE)
    return {long: (short, not kind) for short, long, kind in found}


@pytest.mark.parametrize("docker", sorted(set(DOCKERS)))
@pytest.mark.parametrize("verb", ["run", "create"])
def test_every_flag_of_the_installed_docker_is_known(docker: str, verb: str) -> None:
    """What `docker run --help` names is in the table, with the same short name, and takes a value or does not."""
    known = {flag.long: (flag.short, flag.boolean) for flag in run_flags(verb) if not flag.own}
    told = helped(docker, verb)
    assert len(told) > 90
    assert told == {name: known.get(name) for name in told}


@pytest.mark.parametrize("docker", sorted(set(DOCKERS)))
def test_neuronds_own_options_are_none_of_dockers(docker: str) -> None:
    """Docker has no flag by the name of one of neurond's."""
    told = helped(docker, "run")
    shorts = {short for short, _ in told.values()}
    for flag in FLAGS:
        assert not flag.own or (flag.long not in told and (not flag.short or flag.short not in shorts))


def test_names_are_unique() -> None:
    """No two flags have the same name."""
    for names in ([flag.long for flag in FLAGS], [flag.short for flag in FLAGS if flag.short]):
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("-e A=1", {"env": ["A=1"]}),
        ("-eA=1", {"env": ["A=1"]}),
        ("-e=A=1", {"env": ["A=1"]}),
        ("-e=", {"env": ["="]}),
        ("--env A --env=B", {"env": ["A", "B"]}),
        ("--env=", {"env": [""]}),
        ("-it", {"interactive": ["true"], "tty": ["true"]}),
        ("-itv /a:/b", {"interactive": ["true"], "tty": ["true"], "volume": ["/a:/b"]}),
        ("-itv/a:/b", {"interactive": ["true"], "tty": ["true"], "volume": ["/a:/b"]}),
        ("-dit=false", {"detach": ["true"], "interactive": ["true"], "tty": ["false"]}),
        ("--privileged --privileged=false", {"privileged": ["true", "false"]}),
        ("--name --rm", {"name": ["--rm"]}),
        ("-w -n", {"workdir": ["-n"]}),
        ("-h host", {"hostname": ["host"]}),
        ("--new-in-docker=31", {"new-in-docker": ["31"]}),
    ],
)
def test_a_flag_has_the_value_that_docker_gives_it(words: str, values: dict[str, list[str]]) -> None:
    """Values in the next word, behind `=`, or in the same word; what is neurond's stands where docker's own may."""
    line = run(*words.split(" "), "-n", "1", "image", "-n", "3", "--all")
    assert (line.values, line.options, line.own) == (values, words.split(" "), {"count": "1"})
    assert (line.image, line.command) == ("image", ["-n", "3", "--all"])


@pytest.mark.parametrize(
    ("words", "own", "options"),
    [
        ("-n 2", {"count": "2"}, []),
        ("-n2", {"count": "2"}, []),
        ("-n=2", {"count": "2"}, []),
        ("--count 2", {"count": "2"}, []),
        ("--count=2 -n3", {"count": "3"}, []),
        ("-itn 2", {"count": "2"}, ["-it"]),
        ("-itn2", {"count": "2"}, ["-it"]),
        ("-dE 9", {"conflict-exit-code": "9"}, ["-d"]),
        ("--all --rm", {"all": "true"}, ["--rm"]),
        ("--all=false", {"all": "false"}, []),
        ("--wait 10m -w /dir --no-wait", {"wait": "10m", "no-wait": "true"}, ["-w", "/dir"]),
    ],
)
def test_neuronds_own_options_are_taken_out(words: str, own: dict[str, str], options: list[str]) -> None:
    """They may stand anywhere before the image, also in one word with docker's."""
    line = run(*words.split(), "image")
    assert (line.own, line.options, line.image) == (own, options, "image")


@pytest.mark.parametrize("word", ["--env", "-e", "-ite", "--count", "-n", "--device"])
def test_a_flag_without_its_value_is_refused(word: str) -> None:
    """A flag that needs a value can't be the last word."""
    with pytest.raises(Exit, match="needs a value") as caught:
        run(word)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--foo", "does not know the flag --foo, .* write --foo=VALUE"),
        ("--interact", "does not know the flag --interact"),
        ("-x", "docker run has no flag -x"),
        ("-itx", r"docker run has no flag -x \(in -itx\)"),
        ("-t=", r"docker run has no flag -= \(in -t=\)"),
        ("---rm", "---rm is no flag"),
        ("--=1", "--=1 is no flag"),
    ],
)
def test_an_unknown_flag_is_refused_by_name(word: str, said: str) -> None:
    """Whether its next word is a value or the image can't be known; there are no abbreviations."""
    with pytest.raises(Exit, match=said) as caught:
        run(word, "image")
    assert caught.value.code == 2


@pytest.mark.parametrize("word", ["-d", "--detach", "--sig-proxy", "--detach-keys"])
def test_create_does_not_have_what_it_does_not_have(word: str) -> None:
    """`docker create` refuses what makes no sense there, and so does neurond, before it leases."""
    with pytest.raises(Exit):
        read([word, "image"], run_flags("create"), "docker create")


@pytest.mark.parametrize("image", ["image", "-", ""])
def test_the_first_word_that_is_no_flag_is_the_image(image: str) -> None:
    """As for docker, a single dash and an empty word are no flags."""
    line = run("--rm", image, "--rm")
    assert (line.options, line.image, line.command) == (["--rm"], image, ["--rm"])


def test_two_dashes_end_the_flags() -> None:
    """After `--` comes the image, whatever it looks like."""
    line = run("-it", "--", "-n", "3")
    assert (line.options, line.own, line.image, line.command) == (["-it", "--"], {}, "-n", ["3"])
    assert run("--rm", "--").image is None


@pytest.mark.parametrize(
    ("words", "on"),
    [
        ("", False),
        ("--privileged", True),
        ("--privileged --privileged=0", False),
        ("--privileged=F --privileged", True),
    ],
)
def test_the_last_boolean_counts(words: str, *, on: bool) -> None:
    """A later boolean overrides an earlier one."""
    assert run(*words.split(), "image").on("privileged") is on


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        ("/dev/neuron6", (6, "/dev/neuron6", "")),
        ("/dev/neuron6:/dev/neuron0", (6, "/dev/neuron0", "")),
        ("/dev/neuron6:/dev/neuron0:rwm", (6, "/dev/neuron0", "rwm")),
        ("/dev/neuron15:r", (15, "/dev/neuron15", "r")),
        ("/dev/neuron6:/dev/neuron0:nonsense", (6, "/dev/neuron0", "nonsense")),
        ("//dev/./neuron6", (6, "/dev/neuron6", "")),
        ("/dev/neuron06", None),
        ("/dev/neuron", None),
        ("/dev/neuron_monitor", None),
        ("/dev/infiniband/uverbs0", None),
        ("neurond.io/lease=ab12-3", None),
        ("/dev/neuron0:a:b:c", None),
    ],
)
def test_a_device_asks_for_a_chip(value: str, asked: tuple[int, str, str] | None) -> None:
    """`--device /dev/neuronN` asks for chip N under a name inside; other devices are docker's business."""
    device = chip_device(value)
    assert (device and (device.chip, device.inside, device.permissions)) == asked
    line = run("--device", value, "--rm", f"--device={value}", "image")
    assert len(line.devices) == (2 if asked else 0)
    assert line.options == (["--rm"] if asked else ["--device", value, "--rm", f"--device={value}"])


@pytest.mark.parametrize(
    "value", ["/dev/neuron*", "/dev/neuron0-3", "/dev/neuron[0-3]", "/dev/neuron{0,1}", "ALL", "all"]
)
def test_a_pattern_of_devices_is_refused(value: str) -> None:
    """Docker takes one device at a time, and neurond says how to ask for several chips."""
    with pytest.raises(Exit, match="ask for chips with -n N or --chips"):
        run("--device", value, "image")


def forms_of(flag: Flag, value: str) -> list[list[str]]:
    """Return all ways to write a flag with this value, or, if it is a boolean, all ways to write that."""
    long, short = f"--{flag.long}", f"-{flag.short}"
    if flag.boolean:
        return [[long], [f"{long}=false"], *([[short], [f"{short}=0"]] if flag.short else [])]
    forms = [[long, value], [f"{long}={value}"]]
    if flag.short:
        forms += [[short, value], [f"-it{flag.short}", value]]
        forms += [[f"{short}={value}"], [short + value]] if value and not value.startswith("=") else []
    return forms


VALUES = st.text(max_size=8) | st.sampled_from(["-n", "--all", "--", "-", "", "/a:/b", "A=b c\nd", "=", "-it"])
PART = st.builds(forms_of, st.sampled_from(DOCKERS_OWN), VALUES).flatmap(st.sampled_from)
CLUSTER = st.lists(st.sampled_from(BOOLEANS), min_size=1).map(lambda flags: ["-" + "".join(f.short for f in flags)])
NEURONDS = st.sampled_from(
    [["-n", "2"], ["-n2"], ["--count=2"], ["--chips", "0,1"], ["--all"], ["--no-wait"], ["-E", "9"], ["--wait=1m"]]
)
DEVICE = st.sampled_from([["--device", "/dev/neuron0"], ["--device=/dev/neuron1:/dev/neuron0"]])
PARTS = st.lists(st.tuples(PART | CLUSTER, st.just(True)) | st.tuples(NEURONDS | DEVICE, st.just(False)))


@given(PARTS, st.sampled_from([[], ["--"]]), st.lists(VALUES))
def test_what_is_passed_on_is_all_but_neuronds_own(
    parts: list[tuple[list[str], bool]], end: list[str], command: list[str]
) -> None:
    """For any command line: docker's words in their order, then image and command, and nothing else."""
    line = run(*(word for part, _ in parts for word in part), *end, "image", *command)
    assert line.options == [word for part, is_dockers in parts if is_dockers for word in part] + end
    assert (line.image, line.command) == ("image", command)


def test_the_table_has_each_flag_once() -> None:
    """The table of what neurond does with each flag leaves none out."""
    rows = table().rpartition("| any other")[0].splitlines()[2:]
    found = [name for row in rows for name in re.findall(r"`--([\w-]+)`", row.split("|")[1])]
    assert sorted(found) == sorted(flag.long for flag in FLAGS)


def test_the_readme_has_the_table() -> None:
    """What the README says of the flags is what the code does with them."""
    assert table() in README.read_text()


def test_a_link_to_a_device_is_told_by_its_node(tmp_path: Path) -> None:
    """What a link leads to is found out by the command: the daemon may see another /tmp, where the link is not."""
    link = tmp_path / "link"
    link.symlink_to("/dev/zero")
    assert real_device(str(link)) == f"/dev/zero:{link}"
    assert real_device(f"{link}:rw") == f"/dev/zero:{link}:rw"
    assert real_device(f"{link}:/dev/x:r") == "/dev/zero:/dev/x:r"
    assert real_device("/dev/zero:/dev/x") == "/dev/zero:/dev/x"
