"""How much is measured: all of it, or so little that it is over at once and only shows that everything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Scale:
    """Handed down to whatever has a size."""

    repeats: int = 5
    smoke: bool = False

    def of(self, full: T, smoke: T) -> T:
        """A number of cells, a list of shapes: as large as what is claimed, or as small as it can be."""
        return smoke if self.smoke else full


SMOKE = Scale(repeats=1, smoke=True)
