"""Training, validation and test cells: from an obs column, stratified at random, or by held-out environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAMES = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


@dataclass(frozen=True)
class Split:
    """Row numbers of the three parts, each int64; disjoint, together not necessarily all cells.

    Raises
    ------
    ValueError
        If there is no training cell, or a cell is in two parts.

    Examples
    --------
    >>> scbd.data.Split(train=np.arange(200), validation=np.arange(200, 240))
    Split of 240 cells: train 200, validation 40, test 0
    """

    train: np.ndarray
    validation: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    test: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __post_init__(self) -> None:
        for name in ("train", "validation", "test"):
            object.__setattr__(self, name, np.sort(np.asarray(getattr(self, name), dtype=np.int64)))
        together = np.concatenate([self.train, self.validation, self.test])
        if not len(self.train):
            msg = "The split leaves no cell to train on."
            raise ValueError(msg)
        if len(np.unique(together)) != len(together):
            msg = "A cell is in two parts of the split: train, validation and test must be disjoint."
            raise ValueError(msg)

    def __repr__(self) -> str:
        """Numbers of cells, for a person."""
        parts = {name: len(getattr(self, name)) for name in ("train", "validation", "test")}
        said = ", ".join(f"{name} {n:,}" for name, n in parts.items())
        return f"Split of {sum(parts.values()):,} cells: {said}"


def split_by_column(obs: pd.DataFrame, column: str) -> Split:
    """Take the split from a column of ``train``, ``validation`` (or ``val``) and ``test``; others are left out.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If no cell is ``train``.

    Examples
    --------
    >>> adata.obs["split"] = np.where(adata.obs["well"] == "P1_W1", "test", "train")
    >>> split = scbd.data.split_by_column(adata.obs, "split")
    >>> set(adata.obs["well"].iloc[split.test])
    {'P1_W1'}
    """
    if column not in obs:
        msg = f"obs has no column {column!r} to split by (its columns: {', '.join(map(str, obs.columns))})."
        raise KeyError(msg)
    names = obs[column].astype(str).str.lower().map(_NAMES)
    if not (names == "train").any():
        there = ", ".join(map(repr, obs[column].unique()[:5]))
        msg = f"obs[{column!r}] must hold 'train', 'validation' and 'test'; it holds {there} and no 'train'."
        raise ValueError(msg)
    return Split(**{name: np.flatnonzero(names == name) for name in ("train", "validation", "test")})


def stratified_split(
    strata: Sequence[np.ndarray],
    *,
    train_size: float = 0.9,
    validation_size: float | None = None,
    seed: int = 0,
    rows: np.ndarray | None = None,
) -> Split:
    """Split at random such that each stratum is divided in the same proportions, to within one cell.

    A stratum too small to be divided falls on one side at random, so that the expected sizes are exact.

    Parameters
    ----------
    strata
        One or several label arrays of length ``N``; cells are stratified by their combination (usually y and e).
    train_size, validation_size
        Fractions; what they leave is the test part. ``validation_size=None`` takes all of the rest.
    seed
        Seed of the split.
    rows
        Restrict the split to these rows.

    Raises
    ------
    ValueError
        If the fractions are not between 0 and 1, or sum to more than 1.

    Examples
    --------
    >>> split = scbd.data.stratified_split([adata.obs["gene"].cat.codes.to_numpy()], train_size=0.8)
    >>> adata.obs["gene"].iloc[split.validation].nunique() == adata.obs["gene"].nunique()
    True
    """
    if validation_size is None:
        validation_size = 1 - train_size
    if not 0 < train_size <= 1 or not 0 <= validation_size <= 1 or train_size + validation_size > 1 + 1e-9:
        msg = f"train_size={train_size} and validation_size={validation_size} must be fractions that sum to at most 1."
        raise ValueError(msg)
    frame = pd.DataFrame({str(i): np.asarray(labels) for i, labels in enumerate(strata)})
    rows = np.arange(len(frame)) if rows is None else np.asarray(rows)
    rng = np.random.default_rng(seed)
    frame = frame.iloc[rng.permutation(rows)]
    groups = frame.groupby(list(frame.columns), sort=False, observed=True)
    # systematic sampling: cells of a stratum stand at equal distances on [0, 1), the first at a random place
    offset = rng.random(groups.ngroups)[groups.ngroup()]
    position = (groups.cumcount().to_numpy() + offset) / groups[frame.columns[0]].transform("size").to_numpy()
    shuffled = frame.index.to_numpy()
    # the epsilon keeps 0.9 + (1 - 0.9) from leaving a cell behind
    is_train, is_kept = position < train_size, position < train_size + validation_size + 1e-9
    return Split(train=shuffled[is_train], validation=shuffled[is_kept & ~is_train], test=shuffled[~is_kept])


def hold_out_environments(
    environments: np.ndarray | pd.Series,
    held_out: Sequence[object],
    *,
    strata: Sequence[np.ndarray] = (),
    validation_size: float = 0.1,
    seed: int = 0,
) -> Split:
    """Test on whole environments that training and validation never see.

    Parameters
    ----------
    environments
        Environment of each cell.
    held_out
        Environments of the test part.
    strata
        Further labels to stratify training and validation by, besides the environment.
    validation_size
        Fraction of the other environments' cells.
    seed
        Seed of the split.

    Raises
    ------
    ValueError
        If a held-out environment does not occur, or none is left to train on.

    Examples
    --------
    >>> split = scbd.data.hold_out_environments(adata.obs["well"], ["P1_W1"])
    >>> set(adata.obs["well"].iloc[split.test])
    {'P1_W1'}
    """
    environments = np.asarray(environments)
    unknown = [e for e in held_out if e not in set(environments)]
    if unknown:
        msg = (
            f"No cell is in the held-out environment {unknown[0]!r}; there are: {sorted(set(map(str, environments)))}."
        )
        raise ValueError(msg)
    is_test = np.isin(environments, np.asarray(held_out))
    if is_test.all():
        msg = "All environments are held out: leave at least one to train on."
        raise ValueError(msg)
    inside = stratified_split(
        [environments, *strata], train_size=1 - validation_size, seed=seed, rows=np.flatnonzero(~is_test)
    )
    return Split(train=inside.train, validation=inside.validation, test=np.flatnonzero(is_test))
