"""Which cells a run learns from, and how it is known that they are the same cells as before."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._labels import label_text
from scbd._messages import head
from scbd.data import Split, digest_cells, split_by_column, stratified_split

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scbd.data import ImageSource
    from scbd.model._settings import TrainSettings

logger = logging.getLogger(__name__)

# of a digest: more than enough to tell cells apart
_DIGITS = 16
TRAIN_SIZE = 0.9
# columns of labels, as pandas calls what is in them
_KINDS = ("categorical", "string", "boolean", "integer")
_CELLS_A_VALUE = 8


def cell_digests(source: ImageSource, labels: pd.DataFrame) -> dict[str, str]:
    """What images and labels are, apart, so that it can be said which of them are others."""
    return {
        "images": digest_cells(source, pd.DataFrame(index=range(source.shape[0])))[:_DIGITS],
        "labels": digest_cells(None, labels)[:_DIGITS],
    }


def split_digest(split: Split, n_cells: int) -> dict[str, str]:
    """Which cells are trained on and validated on."""
    part = np.zeros(n_cells, dtype=np.int8)
    part[split.train], part[split.validation] = 1, 2
    return {"split": digest_cells(None, pd.DataFrame({"part": part}))[:_DIGITS]}


def codes_of_few(obs: pd.DataFrame) -> Iterator[np.ndarray]:
    """Codes of all columns with fewer values than an eighth of the cells: guide, plate, donor; int64 ``(N,)`` each.

    Any of them may be what cells that lie together have in common. Fractions, dates and objects are not looked at; a
    missing value is a value.
    """
    for _, codes, _ in _columns_of_few(obs):
        yield codes + 1


def values_of_few(obs: pd.DataFrame) -> dict[str, list[str]]:
    """What is in these columns, as text, by the name of the column; of those whose name is text."""
    named = ((name, values) for name, _, values in _columns_of_few(obs) if isinstance(name, str))
    return {str(name): [label_text(value) for value in values] for name, values in named}


def _columns_of_few(obs: pd.DataFrame) -> Iterator[tuple[Any, np.ndarray, pd.Index]]:
    """Name, codes ``(N,)`` that are -1 where a value is missing, and values."""
    for place, name in enumerate(obs.columns):
        column = obs.iloc[:, place]
        if pd.api.types.infer_dtype(column) in _KINDS:
            codes, values = pd.factorize(column)
            if len(values) <= len(obs) / _CELLS_A_VALUE:
                yield name, codes, pd.Index(values)


def choose_split(
    obs: pd.DataFrame,
    strata: list[np.ndarray],
    settings: TrainSettings,
    seed: int,
    earlier: Split | None,
    train_size: float = TRAIN_SIZE,
) -> Split:
    """The split that was asked for; else that of an earlier run on these cells; else one at random.

    Parameters
    ----------
    obs
        Table of the cells.
    strata
        Labels to stratify by.
    settings
        What was asked for.
    seed
        Of a random split.
    earlier
        Of the model's last run, if that was on the same cells.
    train_size
        Of a random split, where none is asked for; or what validation leaves, where that is less.

    Raises
    ------
    TypeError
        If ``split`` is nothing that can be.
    ValueError
        If it names cells that are not there, or sizes are given beside it.

    Warns
    -----
    UserWarning
        If cells are to be validated on that the model was trained on before.
    """
    split, sizes = settings.split, (settings.train_size, settings.validation_size)
    if split is None and earlier is not None and sizes == (None, None):
        return earlier
    if split is None:
        rest = 1.0 if sizes[1] is None else 1 - sizes[1]
        train_size = min(train_size, rest) if sizes[0] is None else sizes[0]
        chosen = stratified_split(strata, train_size=train_size, validation_size=sizes[1], seed=seed)
    elif isinstance(split, str):
        chosen = split_by_column(obs, split)
    elif isinstance(split, Split):
        chosen = split
    else:
        msg = f"split must be a scbd.data.Split or a column of obs, got {type(split).__name__}."
        raise TypeError(msg)
    last = max(rows.max(initial=-1) for rows in (chosen.train, chosen.validation, chosen.test))
    if last >= len(obs):
        msg = f"The split names row {last}, there are {len(obs)} cells."
        raise ValueError(msg)
    if earlier is not None:
        _warn_if_seen(chosen, earlier)
    return chosen


def warn_of_singletons(y: np.ndarray, names: Sequence[str]) -> None:
    """Name the perturbations of a single training cell; ``y`` are the codes of all training cells."""
    codes, counts = np.unique(y, return_counts=True)
    alone = codes[counts == 1]
    if len(alone):
        logger.warning(
            "%d of %d perturbations have a single training cell (%s): it has no partner and teaches z_c nothing.",
            len(alone),
            len(codes),
            head(np.asarray(names)[alone]),
        )


def check_other_environments(y: np.ndarray, e: np.ndarray, names: Sequence[str]) -> None:
    """Name the perturbations whose training cells, with codes ``y`` and ``e``, lie in one environment.

    Raises
    ------
    ValueError
        If all do: where positives are of other environments, there are none.
    """
    codes, n_environments = np.unique(np.unique(np.stack([y, e], 1), axis=0)[:, 0], return_counts=True)
    alone = codes[n_environments == 1]
    if len(alone) == len(codes):
        msg = (
            "positives='other_environments' needs perturbations that were seen in several environments, and the "
            "training cells of each lie in one: use positives='all', or a coarser e_key."
        )
        raise ValueError(msg)
    if len(alone):
        logger.warning(
            "%d of %d perturbations have training cells in one environment only (%s): with "
            "positives='other_environments' they have no partners and teach z_c nothing.",
            len(alone),
            len(codes),
            head(np.asarray(names)[alone]),
        )


def _warn_if_seen(split: Split, earlier: Split) -> None:
    seen = np.isin(split.validation, earlier.train).sum()
    if seen:
        msg = (
            f"{seen:,} of {len(split.validation):,} validation cells were trained on in an earlier run of this model: "
            "their loss says nothing about new cells. Without split, train_size and validation_size, train() keeps the "
            "split of the earlier run."
        )
        warnings.warn(msg, UserWarning, stacklevel=6)
