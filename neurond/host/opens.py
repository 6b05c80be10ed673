"""Which chips were opened: inotify on their nodes, which costs nothing while nobody opens one.

A chip that was never opened since it was last known to be closed needs no look through /proc when its lease ends. An
open through another node of the same device (in a container, or made by hand) is not seen here. The only import of
inotify_simple.
"""

import os
import select
from collections.abc import Mapping

from inotify_simple import INotify, flags, parse_events

QUEUE = 16 * (16_384 + 1)
"""Bytes of as many events as the kernel keeps (fs.inotify.max_queued_events): one read has all that came before it."""


class Opens:
    """Watches the nodes of all chips. `maybe_open` is the mask of the chips that some process may have open."""

    def __init__(self) -> None:
        self.maybe_open = 0
        self._inotify = INotify(nonblocking=True)
        self._fd = int(self._inotify.fileno())
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._bits: dict[int, int] = {}
        self._watched: dict[str, int] = {}
        self._unwatched = 0
        self._since = 0  # what was opened since the last look began

    def fileno(self) -> int:
        """Return the descriptor that is readable when a chip was opened or closed."""
        return self._fd

    def watch(self, nodes: Mapping[str, int]) -> None:
        """Watch exactly these nodes, given with their chips' indices. A chip that is new here may be open."""
        self._unwatched = 0
        for path in self._watched.keys() - nodes.keys():
            self._bits.pop(self._watched.pop(path), None)
        for path, index in nodes.items():
            try:
                watch = int(self._inotify.add_watch(path, flags.OPEN | flags.CLOSE_WRITE | flags.CLOSE_NOWRITE))
            except OSError:
                self._unwatched |= 1 << index  # no node, or no watch to be had: nothing is known about it
                continue
            if self._watched.get(path) != watch:  # the node is another one now
                self._bits.pop(self._watched.get(path, -1), None)
                self._watched[path] = watch
                self._bits[watch] = 1 << index
                self._note(1 << index)

    def look(self) -> int:
        """Take in what was opened meanwhile, and return `noted`."""
        if self._poll.poll(0):  # a third of what it takes to read in vain
            for event in parse_events(os.read(self._fd, QUEUE)):
                if event.mask & flags.Q_OVERFLOW:
                    self._note(-1)
                if event.mask & flags.OPEN:
                    self._note(self._bits.get(event.wd, 0))
        return self.noted

    @property
    def noted(self) -> int:
        """The mask of the chips that may be open, as of the last time that `look` took in what was opened."""
        return self.maybe_open | self._unwatched

    def _note(self, mask: int) -> None:
        self.maybe_open |= mask
        self._since |= mask

    def begin(self) -> None:
        """Note that somebody begins to look who really has chips open."""
        self.look()
        self._since = 0

    def finish(self, used: int) -> int:
        """Take the outcome of a look: these chips are open, and what was opened since its beginning may be.

        Returns the mask of the latter, of which the look does not tell.
        """
        self.look()
        self.maybe_open = used | self._since
        return self._since
