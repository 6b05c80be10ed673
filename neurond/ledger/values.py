"""Values: dataclasses that nobody changes."""

from typing import TYPE_CHECKING, Any

__all__ = ["value"]

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:
    from dataclasses import dataclass

    def value(*, frozen: bool, slots: bool, eq: bool = True) -> Any:
        """Make a dataclass that mypy holds frozen.

        At run time it is not: to make a frozen one takes four times as long, and a lease is made of several.
        """
        return dataclass(slots=slots, eq=eq, unsafe_hash=frozen and eq)
