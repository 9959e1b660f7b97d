"""Cells that a model is trained on: choosing them, sampling them, and identifying them by digests (hashes).

The file also holds checks of the training cells, for example for perturbations with a single cell.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from scbd._shared.checks import inflect, join_first
from scbd._shared.labels import MIN_CELLS_PER_VALUE
from scbd._shared.messages import warn_user
from scbd.data._splits import Split, split_by_column, stratified_split
from scbd.model._interfaces import TrainingSample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from scbd.data._sources import ImageSource

logger = logging.getLogger(__name__)

# default fraction of the cells in a table that are used for training
TRAIN_SIZE = 0.9
# types of columns of obs that may hold labels, named as by pandas.api.types.infer_dtype
_LABEL_DTYPES = ("categorical", "string", "boolean", "integer")
# Maximum sizes of the random sample of training cells to which the scales of inputs are fitted. First: the number of
# images, which gives channel statistics to three digits. Second: the number of rows of features, which is enough for
# the covariance of features. Third: the number of controls that are sampled in addition to the rows of features.
_MAX_SAMPLED_IMAGES, _MAX_SAMPLED_ROWS, _MAX_SAMPLED_CONTROLS = 4_096, 65_536, 16_384
# number of cells of the sample whose inputs are read into memory at once
_CELLS_READ_AT_ONCE = 512


def choose_split(
    obs: pd.DataFrame,
    strata: list[np.ndarray],
    *,
    split: str | Split | None = None,
    train_size: float | None = None,
    validation_size: float | None = None,
    default: float = TRAIN_SIZE,
    seed: int = 0,
    earlier: Split | None = None,
) -> Split:
    """Return the split of the cells of a table into training, validation and test cells.

    If ``split`` is given, it is used. If neither ``split`` nor a size is given, the split of the model's last run on
    the same cells is used again. In all other cases, a random stratified split is drawn.

    Parameters
    ----------
    obs
        Table with one row per cell.
    strata
        Labels by which a random split is stratified, such as perturbation and environment, one array ``(N,)`` each.
    split, train_size, validation_size
        Arguments of :meth:`scbd.SCBDModel.train`.
    default
        Fraction of the cells to train on if ``train_size`` is not given; at most ``1 - validation_size``.
    seed
        Seed of a random split.
    earlier
        Split of the model's last run, if this run used the same cells.

    Raises
    ------
    KeyError
        If ``split`` names a column that ``obs`` lacks.
    TypeError
        If ``split`` is neither a :class:`~scbd.data.Split` nor a column name.
    ValueError
        If ``split`` contains row numbers beyond the table, the column that it names has no training cells, or
        ``train_size`` and ``validation_size`` do not fit the number of cells.

    Warns
    -----
    UserWarning
        If validation cells of the new split were training cells of the earlier run.
    """
    if split is None and earlier is not None and train_size is None and validation_size is None:
        return earlier
    if split is None:
        if train_size is None:
            train_size = default if validation_size is None else min(default, 1 - validation_size)
        chosen = stratified_split(strata, train_size=train_size, validation_size=validation_size, seed=seed)
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
    seen = 0 if earlier is None else np.isin(chosen.validation, earlier.train).sum()
    if seen:
        msg = (
            f"{seen:,} of {len(chosen.validation):,} validation cells were trained on in an earlier run of this model: "
            "their loss does not measure performance on new cells. Omit split and sizes to keep the split of that run."
        )
        warn_user(msg)
    return chosen


def draw_training_sample(
    source: ImageSource,
    rows: np.ndarray,
    y: np.ndarray,
    e: np.ndarray,
    controls: np.ndarray | None,
    positions: np.ndarray | None,
    *,
    seed: int,
) -> TrainingSample:
    """Draw a random sample of the training cells: up to 4,096 images, or up to 65,536 rows of features.

    The scales of inputs and the transforms of features are fitted to this sample. For features, up to 16,384 controls
    are drawn in addition, because features are scaled by the controls, and a random sample may contain few controls.

    Parameters
    ----------
    source
        Inputs of all cells.
    rows
        Row numbers of the training cells.
    y, e, controls, positions
        Perturbations, environments, controls and positions on the plate of all cells, see :class:`TrainingSample`.
    seed
        Seed of the random sample.
    """
    rng, of_features = np.random.default_rng(seed), len(source.shape) == 2
    drawn = rng.choice(rows, min(len(rows), _MAX_SAMPLED_ROWS if of_features else _MAX_SAMPLED_IMAGES), replace=False)
    if of_features and controls is not None:
        drawn = np.union1d(drawn, rng.permutation(rows[controls[rows]])[:_MAX_SAMPLED_CONTROLS])
    drawn = np.sort(drawn)
    blocks = np.array_split(drawn, -(-len(drawn) // _CELLS_READ_AT_ONCE))
    return TrainingSample(
        lambda: (torch.from_numpy(source.read(block)) for block in blocks),
        y[drawn],
        e[drawn],
        None if controls is None else controls[drawn],
        None if positions is None else positions[drawn],
    )


def warn_if_single_cell_perturbations(y: np.ndarray, names: Sequence[str]) -> None:
    """Log a warning that names the perturbations with a single training cell, which has no partner to learn from.

    Parameters
    ----------
    y
        Codes of the perturbations of the training cells, integer ``(N,)``.
    names
        Names of the perturbations, in the order of their codes.
    """
    codes, counts = np.unique(y, return_counts=True)
    alone = codes[counts == 1]
    if len(alone):
        message = "%d of %d perturbations %s a single training cell (%s), which has no partner to learn from."
        have = inflect(len(alone), "has", "have")
        logger.warning(message, len(alone), len(codes), have, join_first(np.asarray(names)[alone]))


def label_column_codes(obs: pd.DataFrame) -> Iterator[np.ndarray]:
    """Yield the integer codes of each column of ``obs`` that holds labels, such as guide, plate or donor.

    Each array of codes is int64 ``(N,)``. A column counts as labels if it has at least eight cells per distinct value.
    Columns of fractions, dates and objects are skipped. Missing values get a code like any other value. Cells that are
    stored next to each other may share any of these labels, for example the plate.
    """
    for place in range(obs.shape[1]):
        column = obs.iloc[:, place]
        if pd.api.types.infer_dtype(column) in _LABEL_DTYPES:
            codes, values = pd.factorize(column)
            if len(values) <= len(obs) / MIN_CELLS_PER_VALUE:
                yield codes + 1


def column_values_or_text(column: pd.Series | pd.Index) -> Any:
    return column.to_numpy() if column.dtype.kind in "biuf" else column.astype(str).tolist()
