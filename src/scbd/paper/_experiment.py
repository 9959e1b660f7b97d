"""What an experiment is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pandas as pd

    from scbd.paper._budgets import Budget
    from scbd.workflows import Trial


@dataclass(frozen=True)
class Experiment:
    """A grid, and what is made of its rows."""

    trials: Callable[[Budget, int | None], list[Trial]]
    report: Callable[[pd.DataFrame, Path], str]

    @property
    def about(self) -> str:
        """One line."""
        return (self.trials.__doc__ or "").splitlines()[0]
