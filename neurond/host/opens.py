"""Which chips were opened: inotify on their nodes, which costs nothing while nobody opens one.

A chip that was never opened since it was last known to be closed needs no look through /proc when its lease ends. An
open through another node of the same device (in a container, or made by hand) is not seen here. The only import of
inotify_simple.
"""

import os
from collections.abc import Mapping

from inotify_simple import INotify, flags, parse_events


class Opens:
    """Watches the nodes of all chips. `maybe_open` is the mask of the chips that some process may have open."""

    def __init__(self) -> None:
        self.maybe_open = 0
        self._inotify = INotify(nonblocking=True)
        self._fd = int(self._inotify.fileno())
        self._bits: dict[int, int] = {}
        self._watched: dict[str, int] = {}
        self._unwatched = 0

    def watch(self, nodes: Mapping[str, int]) -> None:
        """Watch exactly these nodes, given with their chips' indices. A chip that is new here may be open."""
        self._unwatched = 0
        for path in self._watched.keys() - nodes.keys():
            self._bits.pop(self._watched.pop(path), None)
        for path, index in nodes.items():
            try:
                watch = int(self._inotify.add_watch(path, flags.OPEN))
            except OSError:
                self._unwatched |= 1 << index  # no node, or no watch to be had: nothing is known about it
                continue
            if self._watched.get(path) != watch:  # the node is another one now
                self._bits.pop(self._watched.get(path, -1), None)
                self._watched[path] = watch
                self._bits[watch] = 1 << index
                self.maybe_open |= 1 << index

    def look(self) -> int:
        """Take in what was opened meanwhile, and return `maybe_open`."""
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return self.maybe_open | self._unwatched
        for event in parse_events(data):
            if event.mask & flags.Q_OVERFLOW:
                self.maybe_open = -1
            self.maybe_open |= self._bits.get(event.wd, 0)
        return self.look()

    def forget(self, mask: int) -> None:
        """Take these chips to be closed, as somebody is about to look who has them open."""
        self.look()
        self.maybe_open &= ~mask
