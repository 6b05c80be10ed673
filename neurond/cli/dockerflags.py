"""The one place that knows docker's command line: every flag of `docker run`, and a reader that follows docker's.

docker reads its flags with pflag: values as `--flag value`, `--flag=value`, `-e value`, `-eVALUE` or `-e=VALUE`,
booleans without a value or with `=false`, short booleans in one word (`-it`, and `-itv /a:/b` with a last one that
takes a value), no abbreviations. Flags end at `--` or at the first word that is none, which is the image; all after
that is the command's.

The flags are those of docker 20.10 to 29, whatever the version that is installed: one that it does not have is its own
to refuse.
"""

from collections.abc import Iterator, Sequence

from neurond.cli import USAGE, Exit
from neurond.cli.chipdevices import Device, chip_device

VALUES = """
add-host annotation attach,a blkio-weight blkio-weight-device cap-add cap-drop cgroup-parent cgroupns cidfile cpu-count
cpu-percent cpu-period cpu-quota cpu-rt-period cpu-rt-runtime cpu-shares,c cpus cpuset-cpus cpuset-mems detach-keys
device device-cgroup-rule device-read-bps device-read-iops device-write-bps device-write-iops dns dns-opt dns-option
dns-search domainname entrypoint env,e env-file expose gpus group-add health-cmd health-interval health-retries
health-start-interval health-start-period health-timeout hostname,h io-maxbandwidth io-maxiops ip ip6 ipc isolation
kernel-memory label,l label-file link link-local-ip log-driver log-opt mac-address memory,m memory-reservation
memory-swap memory-swappiness mount name net net-alias network network-alias oom-score-adj pid pids-limit platform
publish,p pull restart runtime security-opt shm-size stop-signal stop-timeout storage-opt sysctl tmpfs ulimit user,u
userns uts volume,v volume-driver volumes-from workdir,w
"""
BOOLEANS = """
detach,d disable-content-trust help init interactive,i no-healthcheck oom-kill-disable privileged publish-all,P quiet,q
read-only rm sig-proxy tty,t use-api-socket
"""
RUN_ONLY = {"detach", "detach-keys", "sig-proxy"}
"""What `docker create` does not have."""
OWN_VALUES = "chips conflict-exit-code,E core-numbering count,n wait"
OWN_BOOLEANS = "all no-wait"
GLOBAL_VALUES = "config context,c host,H log-level,l tlscacert tlscert tlskey"
GLOBAL_BOOLEANS = "debug,D help,h tls tlsverify version,v"
"""The options of docker itself, which stand before its verb."""

FALSE = {"0", "f", "F", "false", "FALSE", "False"}
TRUE = {"1", "t", "T", "true", "TRUE", "True"}

CHECKED = "passed on; refused, before any chip is leased, where it would open chips beyond the lease"
READ = {
    "device": "`/dev/neuronN` asks for chip N; another device is passed on like `--privileged`",
    "privileged": CHECKED,
    "device-cgroup-rule": CHECKED,
    "volume": CHECKED,
    "mount": CHECKED,
    "runtime": CHECKED,
    "gpus": "refused: it asks for another vendor's chips",
    "restart": "passed on, and told to the daemon",
    "env": "passed on; `NEURON_RT_VISIBLE_CORES` must lie within the lease, `NEUROND_LEASE` is refused",
    "env-file": "passed on; `NEURON_RT_VISIBLE_CORES` must lie within the lease",
    "label": "passed on; `io.neurond.*` is refused",
    "label-file": "passed on; `io.neurond.*` is refused",
    "name": "passed on; it also names the lease",
    "help": "prints the help of neurond",
}
"""What neurond does with the flags that it does more with than to pass them on."""


class Flag:
    """A flag: its long name, its short one or "", whether it is a boolean, and whether it is neurond's own."""

    __slots__ = ("boolean", "long", "own", "short")

    def __init__(self, names: str, *, boolean: bool, own: bool = False) -> None:
        self.long, _, self.short = names.partition(",")
        self.boolean = boolean
        self.own = own

    def __str__(self) -> str:
        return f"-{self.short}, --{self.long}" if self.short else f"--{self.long}"


class CommandLine:
    """A command line that was read.

    `own` are neurond's options and their values by long name, `devices` the chips asked for by --device; both are
    taken out. `options` are the words of all others, untouched and in their order, `values` what they say by long
    name. Then the `image`, None if there is none, and the `command`.
    """

    def __init__(self) -> None:
        self.own: dict[str, str] = {}
        self.devices: list[Device] = []
        self.options: list[str] = []
        self.values: dict[str, list[str]] = {}
        self.image: str | None = None
        self.command: list[str] = []

    def all(self, name: str) -> list[str]:
        """Return all values of a docker flag."""
        return self.values.get(name, [])

    def last(self, name: str) -> str | None:
        """Return the value of a docker flag that is in force: the last one."""
        return self.values[name][-1] if name in self.values else None

    def on(self, name: str) -> bool:
        """Tell whether a boolean of docker's is on; what is neither true nor false is docker's to refuse."""
        return self.last(name) not in FALSE | {None}


def run_flags(verb: str) -> list[Flag]:
    """Return the flags of `docker run` or `docker create`, and neurond's own among them."""
    left_out = RUN_ONLY if verb == "create" else set()
    flags = [Flag(names, boolean=False) for names in VALUES.split()]
    flags += [Flag(names, boolean=True) for names in BOOLEANS.split()]
    flags += [Flag(names, boolean=False, own=True) for names in OWN_VALUES.split()]
    flags += [Flag(names, boolean=True, own=True) for names in OWN_BOOLEANS.split()]
    return [flag for flag in flags if flag.long not in left_out]


def global_flags() -> list[Flag]:
    """Return the options of docker itself."""
    return [
        *(Flag(names, boolean=False) for names in GLOBAL_VALUES.split()),
        *(Flag(names, boolean=True) for names in GLOBAL_BOOLEANS.split()),
    ]


def read(words: Sequence[str], flags: Sequence[Flag], program: str = "docker run") -> CommandLine:
    """Read what follows `program` on a command line. Raises Exit for what can't be read or names chips wrongly."""
    line, table = CommandLine(), _Table(flags, program)
    left = iter(words)
    for word in left:
        if word == "--":
            line.options.append(word)
            line.image = next(left, None)
            break
        if len(word) < 2 or word[0] != "-":
            line.image = word
            break
        _take(line, word, table.flags_in(word), left, program)
    line.command = list(left)
    return line


def _take(
    line: CommandLine, word: str, found: list[tuple[Flag, str | None]], left: Iterator[str], program: str
) -> None:
    """Take over the flags of one word, and the word after it if that is the value of the last of them."""
    flag, value = found[-1]
    words = [word]
    if value is None:
        value = next(left, None)
        if value is None:
            raise Exit(USAGE, f"{program}: {flag} needs a value")
        words.append(value)
    for other, said in found[:-1]:
        line.values.setdefault(other.long, []).append(said or "")
    device = chip_device(value) if flag.long == "device" else None
    if device:
        line.devices.append(device)
    elif flag.own:
        line.own[flag.long] = value
        # Ours have a short name only where they take a value, so one of them is the last of its word.
        line.options += ["-" + word[1 : len(found)]] if len(found) > 1 else []
    else:
        line.values.setdefault(flag.long, []).append(value)
        line.options += words


class _Table:
    """The flags by their names."""

    def __init__(self, flags: Sequence[Flag], program: str) -> None:
        self.long = {flag.long: flag for flag in flags}
        self.short = {flag.short: flag for flag in flags if flag.short}
        self.program = program

    def flags_in(self, word: str) -> list[tuple[Flag, str | None]]:
        """Return the flags of one word with their values; None for the last means that the next word has it."""
        if word.startswith("--"):
            return [self._long_flag(word)]
        found: list[tuple[Flag, str | None]] = []
        letters = word[1:]
        while letters:
            flag = self.short.get(letters[0])
            if flag is None:
                within = f" (in {word})" if len(word) > 2 else ""
                raise Exit(USAGE, f"{self.program} has no flag -{letters[0]}{within}")
            if letters[1:2] == "=" and len(letters) > 2:
                found.append((flag, letters[2:]))
                break
            if not flag.boolean:
                found.append((flag, letters[1:] or None))
                break
            found.append((flag, "true"))
            letters = letters[1:]
        return found

    def _long_flag(self, word: str) -> tuple[Flag, str | None]:
        name, equals, value = word[2:].partition("=")
        flag = self.long.get(name)
        if flag is not None:
            return flag, value if equals else "true" if flag.boolean else None
        if not name or name.startswith("-"):
            raise Exit(USAGE, f"{word} is no flag of {self.program}")
        if not equals:
            raise Exit(
                USAGE,
                f"neurond does not know the flag {word}, so it can't tell whether the next word is its value: "
                f"if {self.program} has it, write {word}=VALUE ({word}=true for one without a value)",
            )
        return Flag(name, boolean=False), value


def table() -> str:
    """Return, as Markdown, what `neurond docker run` does with each flag."""
    flags = sorted(run_flags("run"), key=lambda flag: flag.long)
    own = [flag for flag in flags if flag.own]
    rows = [(own, "neurond's own, anywhere before the image; docker does not see them")]
    rows += [([flag for flag in flags if READ.get(flag.long) == does], does) for does in dict.fromkeys(READ.values())]
    passed = [flag for flag in flags if not flag.own and flag.long not in READ]
    rows.append((passed, "passed on unread"))
    lines = ["| flags | what neurond does |", "|---|---|"]
    lines += [f"| {' '.join(_marked(flag) for flag in group)} | {does} |" for group, does in rows]
    lines.append(
        "| any other | `--flag=VALUE` is passed on, for a newer docker; `--flag` and `-f` are refused by name |"
    )
    return "\n".join(lines) + "\n"


def _marked(flag: Flag) -> str:
    return f"`-{flag.short}` `--{flag.long}`" if flag.short else f"`--{flag.long}`"
