"""What several of these tests need: a small file system, and a process without rights."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAP = """
import ctypes, mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
call = ctypes.CDLL(None).mmap
call.restype = ctypes.c_void_p
length, offset = ctypes.c_size_t(4096), ctypes.c_long(0)
call(None, length, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, offset)
os.close(fd)
print("mapped", flush=True)
sys.stdin.read()
"""
"""Maps a file and keeps no descriptor, as Python's own mmap would."""


@contextmanager
def tmpfs(path: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs at `path` for a while."""
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "neurond-test", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


BECOME_NOBODY = """
import os
import encodings.ascii
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
main()
"""


def as_nobody(script: str, *arguments: object) -> str:
    """Run `main()` of a Python script as the user nobody and return what it printed. Needs root.

    What the script imports it imports as root: the interpreter may lie where nobody can't read.
    """
    done = subprocess.run(
        [sys.executable, "-c", script + BECOME_NOBODY, *map(str, arguments)],
        env={},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
