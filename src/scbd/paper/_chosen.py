"""What tables show of a search: each system at one setting, which is chosen in distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from scbd.paper._tables import value_of
from scbd.workflows import best_setting

if TYPE_CHECKING:
    from collections.abc import Sequence

# of what is searched over, what tells the settings of a system apart
_SETTINGS = ("lr", "weight_decay", "max_steps", "penalty", "step_size", "meta_lr", "pretrain_steps", "alpha")


def chosen(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Rows of the setting that :func:`scbd.workflows.select` would choose, of each group of rows.

    Its accuracy is that of the head that learned with the encoder, where all rows of a group have one, and of the
    fitted head otherwise.
    """
    parts = [part[setting_of(part) == _best(part)] for _, part in frame.groupby(list(by), sort=False)]
    return pd.concat(parts) if parts else frame


def setting_of(frame: pd.DataFrame) -> pd.Series:
    """What tells the settings of one system apart, as words."""
    columns = [column for column in _SETTINGS if column in frame]
    return frame[columns].map(value_of).agg(" ".join, axis=1)


def _best(part: pd.DataFrame) -> str:
    own = "own in" in part and part["own in"].notna().all()
    return str(best_setting(part["own in" if own else "r_c in"], setting_of(part)))
