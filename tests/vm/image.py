"""The machine's disk: a Debian 12 made by mmdebstrap, kept for the next run as long as it would come out the same."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("NEUROND_VM_CACHE") or "/var/cache/neurond-vm")

RELEASE = "bookworm"
PACKAGES = (
    *("linux-image-cloud-amd64", "systemd-sysv", "udev", "dbus", "python3", "iproute2", "kmod", "procps"),
    *("docker.io", "iptables", "apparmor", "acl"),
)
TO_COMPILE = ("linux-headers-cloud-amd64", "gcc", "make", "libc6-dev")
"""For the module; image/finish takes them away again."""
DISK_SIZE = "3G"
KEPT = 24 * 3600
"""Seconds that an image is kept after its last use: another branch may boot it just now."""


@dataclass(frozen=True)
class Image:
    """A disk as it is before the first boot, and the kernel for it; none of them is ever written to."""

    directory: Path

    @property
    def disk(self) -> Path:
        """The raw ext4 file system that the machine has as its root."""
        return self.directory / "root.img"

    @property
    def kernel(self) -> Path:
        """What the machine boots."""
        return self.directory / "vmlinuz"

    @property
    def initrd(self) -> Path:
        """What the kernel needs to find the disk."""
        return self.directory / "initrd.img"


def key() -> str:
    """Return a word for all that an image is made from, the archive of Debian aside."""
    made_from = hashlib.sha256(repr((RELEASE, PACKAGES, TO_COMPILE, DISK_SIZE)).encode())
    for path in sorted([*HERE.glob("image/*"), *HERE.glob("module/*"), Path(__file__)]):
        made_from.update(path.name.encode() + b"\0" + path.read_bytes())
    return made_from.hexdigest()[:12]


def want_image() -> Image:
    """Return the image, made now if there is none yet. Those that nobody has used for a while are removed then."""
    CACHE.mkdir(parents=True, exist_ok=True)
    image = Image(CACHE / key())
    with _lock(CACHE / "lock"):
        if image.directory.exists():
            print(f"the machine is that of {image.directory}", flush=True)
        else:
            print(f"making the machine in {image.directory}: takes a minute or two", flush=True)
            for old in CACHE.iterdir():
                if old.is_dir() and old.stat().st_mtime < time.time() - KEPT:
                    shutil.rmtree(old)
            _make(image.directory)
        os.utime(image.directory)
    return image


def _make(directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        root, made = Path(work, "root"), Path(work, "made")
        made.mkdir()
        log = CACHE / "mmdebstrap.log"
        with log.open("w") as output:
            done = subprocess.run(
                [
                    *("mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory"),
                    *('--aptopt=APT::Install-Recommends "false"', "--include", ",".join([*PACKAGES, *TO_COMPILE])),
                    *(f"--essential-hook={HERE}/image/prepare", f"--customize-hook={HERE}/image/finish"),
                    *(RELEASE, str(root)),
                ],
                env={**os.environ, "TMPDIR": work},
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            end = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-10:])
            raise SystemExit(f"mmdebstrap made no machine; {log} has all, and ends:\n{end}")
        for name in ("vmlinuz", "initrd.img"):
            shutil.copyfile(root / name, made / name)
        # No journal: a disk that is thrown away after its machine needs none, and it is written less.
        ext4 = ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", str(root), str(made / "root.img"), DISK_SIZE]
        subprocess.run(ext4, check=True)
        made.rename(directory)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
