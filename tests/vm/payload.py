"""What the machine is given on its second disk, a tar file: two builds of the package, an image, the checks."""

import subprocess
import tarfile
from pathlib import Path

from neurond import __version__

REPOSITORY = Path(__file__).resolve().parents[2]
INSIDE = Path(__file__).resolve().parent / "inside"

VERSIONS = (__version__, f"{__version__}+second")
"""Of the two packages: the second is an upgrade of the first."""

APPLETS = ("sh", "cat", "echo", "ls", "mknod", "rm", "sleep", "sed", "stat", "touch", "true")


def make_payload(work: Path, only: str) -> Path:
    """Build all and put it into a tar file below `work`; `only` is a word that names of the checks to run have."""
    for version in VERSIONS:
        build = [str(REPOSITORY / "packaging/build"), "debian12", "--version", version, "--output", str(work)]
        subprocess.run(build, check=True)
    payload = work / "payload.tar"
    with tarfile.open(payload, "w") as tar:
        tar.add(INSIDE, "inside", filter=_without_caches)
        for number, version in enumerate(VERSIONS, 1):
            (package,) = work.glob(f"neurond_{version}-*.deb")
            tar.add(package, f"packages/{number}.deb")
        tar.add(_make_image(work), "image.tar")
        words = work / "only"
        words.write_text(only)
        tar.add(words, "only")
    return payload


def _without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.name.endswith("__pycache__") else entry


def _make_image(work: Path) -> Path:
    """Make an image for `docker import` that is nothing but busybox."""
    image = work / "image.tar"
    with tarfile.open(image, "w") as tar:
        tar.add("/bin/busybox", "bin/busybox")
        for applet in APPLETS:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    return image
