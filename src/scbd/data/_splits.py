"""Training, validation and test cells: from an obs column, or stratified at random."""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from scbd._keys import LEFT_OUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

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

    Parameters
    ----------
    train, validation, test
        Row numbers, or boolean masks over all cells.

    Raises
    ------
    ValueError
        If there is no training cell, a cell is in two parts or twice in one, a row number is negative or not whole, or
        masks differ in length.

    Examples
    --------
    >>> scbd.data.Split(train=np.arange(200), validation=np.arange(200, 240))
    Split of 240 cells: train 200, validation 40, test 0
    """

    train: np.ndarray
    validation: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    test: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __post_init__(self) -> None:
        parts = {name: getattr(self, name) for name in ("train", "validation", "test")}
        lengths = {name: len(rows) for name, rows in parts.items() if pd.api.types.is_bool_dtype(rows)}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} {n:,}" for name, n in lengths.items())
            msg = f"The masks of a split differ in length ({counts}): each must have one value a cell."
            raise ValueError(msg)
        for name, rows in parts.items():
            object.__setattr__(self, name, _sorted_rows(rows, name))
        if not len(self.train):
            msg = "The split leaves no cell to train on."
            raise ValueError(msg)
        together = np.sort(np.concatenate([self.train, self.validation, self.test]))
        twice = together[1:][together[1:] == together[:-1]]
        if len(twice):
            msg = (
                "A cell is in two parts of the split, or twice in one: train, validation and test must be disjoint "
                f"(row {twice[0]:,})."
            )
            raise ValueError(msg)

    def __repr__(self) -> str:
        """Numbers of cells, for a person."""
        parts = {name: len(getattr(self, name)) for name in ("train", "validation", "test")}
        counts = ", ".join(f"{name} {n:,}" for name, n in parts.items())
        return f"Split of {sum(parts.values()):,} cells: {counts}"

    def seen(self, values: ArrayLike, part: Literal["validation", "test"] = "test") -> np.ndarray:
        """Which cells of a part have a value (a perturbation, an environment) that occurs among training cells.

        Parameters
        ----------
        values
            Of all cells, ``(N,)``.
        part
            ``"test"`` or ``"validation"``.

        Returns
        -------
        Mask of the rows of that part, in their order.

        Raises
        ------
        ValueError
            If there are fewer values than cells.
        """
        given, rows = pd.Series(np.asarray(values)), getattr(self, part)
        if len(given) <= max([self.train[-1], *rows[-1:]]):
            msg = f"There are {len(given)} values, and the split has cells beyond: give a value for each cell."
            raise ValueError(msg)
        return given.iloc[rows].isin(given.iloc[self.train].unique()).to_numpy()


def _sorted_rows(given: np.ndarray, name: str) -> np.ndarray:
    if pd.api.types.is_bool_dtype(given):
        return np.flatnonzero(np.asarray(given, dtype=bool))
    rows = np.asarray(given)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        msg = (
            f"The {name} part of a split must be a list of row numbers or a mask, not {rows.dtype.name} of shape "
            f"{rows.shape}."
        )
        raise ValueError(msg)
    rows = np.sort(rows.astype(np.int64, copy=False))
    if rows.size and rows[0] < 0:
        msg = f"The {name} part of the split names row {rows[0]}: count from the first cell, which is row 0."
        raise ValueError(msg)
    return rows


def split_by_column(obs: pd.DataFrame, column: str) -> Split:
    """Take the split from a column of ``train``, ``validation`` (or ``val``) and ``test``; others are left out.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If no cell is ``train``.

    Warns
    -----
    UserWarning
        If there are other values, which may be typing errors. Cells without a value, or with ``"left out"``, are left
        out in silence.

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
    codes, values = pd.factorize(obs[column])
    names = [_NAMES.get(str(value).strip().lower()) for value in values]
    if "train" not in {names[code] for code in np.unique(codes[codes >= 0])}:
        there = ", ".join(map(repr, [*values[:5]]))
        msg = f"obs[{column!r}] must hold 'train', 'validation' and 'test'; it holds {there} and no 'train'."
        raise ValueError(msg)
    unknown = [i for i, name in enumerate(names) if name is None and str(values[i]).strip() not in ("", LEFT_OUT)]
    if unknown:
        counts = np.bincount(codes[codes >= 0], minlength=len(values))
        found = ", ".join(f"{values[i]!r} × {counts[i]:,}" + _near(str(values[i])) for i in unknown[:5])
        msg = (
            f"obs[{column!r}] holds values that name no part of a split ({found}{', …' if len(unknown) > 5 else ''}): "
            f"{counts[unknown].sum():,} cells are left out. Parts are 'train', 'validation' and 'test'; cells that are "
            "meant to be left out have no value."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
    # the last one is for cells without a value, whose code is -1
    number = {"train": 1, "validation": 2, "test": 3}
    part = np.array([*(number.get(name or "", 0) for name in names), 0], dtype=np.int8)[codes]
    del codes
    return Split(**{name: np.flatnonzero(part == i) for name, i in number.items()})


def _near(value: str) -> str:
    near = difflib.get_close_matches(value.strip().lower(), _NAMES, n=1)
    return f", {_NAMES[near[0]]}?" if near else ""


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
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(strata[0]) if rows is None else np.asarray(rows))
    stratum = _codes(strata)[shuffled]
    # numbered as they come
    stratum = pd.factorize(stratum)[0].astype(np.int32, copy=False)
    sizes = np.bincount(stratum)
    # systematic sampling: cells of a stratum stand at equal distances on [0, 1), the first at a random place
    position = _counted(stratum, sizes)
    position += rng.random(len(sizes))[stratum]
    position /= sizes[stratum]
    del stratum
    # the epsilon keeps 0.9 + (1 - 0.9) from leaving a cell behind
    is_train, is_kept = position < train_size, position < train_size + validation_size + 1e-9
    del position
    return Split(train=shuffled[is_train], validation=shuffled[is_kept & ~is_train], test=shuffled[~is_kept])


def matched_rows(split: Split, labels: np.ndarray, seed: int = 0) -> np.ndarray:
    """For each validation cell, in their order, another training cell of its label, as long as there are some.

    Parameters
    ----------
    split
        Training and validation rows.
    labels
        Codes, non-negative integers ``(N,)``.
    seed
        Of which ones.
    """
    train = np.random.default_rng(seed).permutation(split.train)
    of_train, of_validation = labels[train], labels[split.validation]
    sizes, asked = (np.bincount(codes, minlength=int(labels.max()) + 1) for codes in (of_train, of_validation))
    nth = _counted(of_validation, asked).astype(np.int64)
    there = nth < sizes[of_validation]
    first = (np.cumsum(sizes) - sizes)[of_validation]
    return train[np.argsort(of_train, kind="stable")[(first + nth)[there]]]


def _codes(strata: Sequence[np.ndarray]) -> np.ndarray:
    """One number for each combination of labels, int32 ``(N,)``."""
    codes = np.zeros(len(strata[0]), dtype=np.int32)
    for labels in strata:
        labels = labels if isinstance(labels, pd.Series) else np.asarray(labels)
        found, values = pd.factorize(labels, use_na_sentinel=False)
        crossed = codes * np.int64(len(values))
        crossed += found
        del found
        codes = pd.factorize(crossed)[0].astype(np.int32)
    return codes


def _counted(groups: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """How many of its group stand before each, float64 ``(N,)``."""
    order = np.argsort(groups, kind="stable")
    counted = np.empty(len(groups))
    counted[order] = np.arange(len(groups))
    counted -= (np.cumsum(sizes) - sizes)[groups]
    return counted
