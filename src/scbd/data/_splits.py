"""Splits into training, validation and test cells: stratified, by environment, by perturbation, or from a column."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from scbd._shared.checks import check_number, check_unmasked, inflect, join_first, missing_key_message, suggest_name
from scbd._shared.keys import NOT_IN_SPLIT
from scbd._shared.labels import as_list, label_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

# accepted values of a split column, in lower case, and the part that each stands for
_PART_OF_VALUE = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


@dataclass(frozen=True)
class Split:
    """Row numbers of the training, validation and test cells of a data set.

    No cell is in two parts. Cells may be in none of the parts. The parts are stored as sorted row numbers, int64.

    Parameters
    ----------
    train, validation, test
        Row numbers, or boolean masks over all cells.

    Raises
    ------
    ValueError
        If there is no training cell, a cell occurs in two parts or twice in one, a row number is negative or not an
        integer, or masks differ in length.
    TypeError
        If a part is a masked array.

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
            object.__setattr__(self, name, _as_sorted_rows(rows, name))
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
        """Return the number of cells in each part as text."""
        parts = {name: len(getattr(self, name)) for name in ("train", "validation", "test")}
        counts = ", ".join(f"{name} {n:,}" for name, n in parts.items())
        return f"Split of {sum(parts.values()):,} cells: {counts}"

    def seen(self, values: ArrayLike, part: Literal["validation", "test"] = "test") -> np.ndarray:
        """Return a mask of the cells of a part whose perturbation (or environment) occurs among the training cells.

        Parameters
        ----------
        values
            Perturbation, environment or another label of each cell of the data set, ``(N,)``.
        part
            ``"test"`` or ``"validation"``.

        Returns
        -------
        Boolean mask over the rows of that part, in their order.

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


def _as_sorted_rows(given: np.ndarray, name: str) -> np.ndarray:
    """Return a part of a split as sorted row numbers, int64.

    Raises
    ------
    TypeError
        If the part is a masked array.
    ValueError
        If the part is neither a one-dimensional array of integers nor a mask, or if a row number is negative.
    """
    check_unmasked(f"The {name} part of a split", given)
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
    """Read a split from a column whose values are ``train``, ``validation`` and ``test``.

    Upper case, ``training``, ``val`` and ``valid`` are accepted as well. Cells with any other value are in no part.

    Parameters
    ----------
    obs
        Table of the cells.
    column
        Name of the column.

    Raises
    ------
    KeyError
        If there is no such column.
    ValueError
        If no cell is in the training part.

    Warns
    -----
    UserWarning
        If there are other values, which may be typing errors. Missing and empty values, and the value
        ``scbd._shared.keys.NOT_IN_SPLIT``, raise no warning.
    """
    if column not in obs:
        raise KeyError(missing_key_message("obs", column, obs.columns, "split"))
    codes, values = pd.factorize(obs[column])
    names = [_PART_OF_VALUE.get(str(value).strip().lower()) for value in values]
    if "train" not in {names[code] for code in np.unique(codes[codes >= 0])}:
        msg = f"obs[{column!r}] must hold 'train', 'validation' and 'test'; it holds {join_first(map(repr, values))}."
        raise ValueError(msg)
    unknown = [i for i, name in enumerate(names) if name is None and str(values[i]).strip() not in ("", NOT_IN_SPLIT)]
    if unknown:
        counts = np.bincount(codes[codes >= 0], minlength=len(values))
        found = join_first(
            f"{values[i]!r} × {counts[i]:,}{suggest_name(str(values[i]).strip(), _PART_OF_VALUE)}" for i in unknown
        )
        n = counts[unknown].sum()
        cells_are = inflect(n, "cell is", "cells are")
        msg = (
            f"obs[{column!r}] holds values that name no part of a split ({found}): {n:,} {cells_are} excluded. Parts "
            "are 'train', 'validation' and 'test'; cells that are meant to be excluded have no value."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
    # the last entry is for cells without a value, since their code -1 indexes it
    number = {"train": 1, "validation": 2, "test": 3}
    part = np.array([*(number.get(name or "", 0) for name in names), 0], dtype=np.int8)[codes]
    del codes
    return Split(**{name: np.flatnonzero(part == i) for name, i in number.items()})


def stratified_split(
    strata: Sequence[np.ndarray],
    *,
    train_size: float = 0.9,
    validation_size: float | None = None,
    seed: int = 0,
    rows: np.ndarray | None = None,
) -> Split:
    """Split cells at random such that each stratum is divided in the same proportions, to within one cell.

    A stratum that is too small to be divided falls into one part at random. The expected sizes of the parts are
    therefore exact.

    Parameters
    ----------
    strata
        One or several label arrays of length ``N``. A stratum is a combination of these labels (usually y and e).
    train_size, validation_size
        Fractions of cells for training and validation. The remaining cells are the test part. Default of
        ``validation_size``: all cells that are not for training.
    seed
        Seed of the random split.
    rows
        Row numbers of the cells to split. Default: all cells.

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
    stratum = _combination_codes(strata)[shuffled]
    # renumber the strata from 0, in the order of their first cells
    stratum = pd.factorize(stratum)[0].astype(np.int32, copy=False)
    sizes = np.bincount(stratum)
    # systematic sampling: the cells of a stratum are placed at equal distances on [0, 1), the first at random
    position = _rank_within_group(stratum, sizes)
    position += rng.random(len(sizes))[stratum]
    position /= sizes[stratum]
    del stratum
    # the epsilon absorbs rounding errors: 0.9 + (1 - 0.9) must not be so small that a cell falls into the test part
    is_train, is_kept = position < train_size, position < train_size + validation_size + 1e-9
    del position
    return Split(train=shuffled[is_train], validation=shuffled[is_kept & ~is_train], test=shuffled[~is_kept])


def hold_out_environments(
    environments: np.ndarray | pd.Series,
    held_out: Sequence[object],
    *,
    strata: Sequence[np.ndarray] = (),
    validation_size: float = 0.1,
    seed: int = 0,
) -> Split:
    """Split cells such that the test part consists of whole environments, unseen in training and validation.

    Parameters
    ----------
    environments
        Environment of each cell, ``(N,)``.
    held_out
        Environments of the test part.
    strata
        Further labels by which training and validation are stratified, in addition to the environment.
    validation_size
        Fraction of the cells of the other environments that are used for validation.
    seed
        Seed of the random split into training and validation.

    Raises
    ------
    ValueError
        If a held-out environment does not occur, a cell has no environment, or no environment remains to train on.

    Examples
    --------
    >>> split = scbd.data.hold_out_environments(adata.obs["well"], ["P1_W1"])
    >>> set(adata.obs["well"].iloc[split.test])
    {'P1_W1'}
    """
    is_test = _held_out_environment_mask(environments, held_out, len(environments))
    kept = np.flatnonzero(~is_test)
    inside = stratified_split([np.asarray(environments), *strata], train_size=1 - validation_size, seed=seed, rows=kept)
    return Split(train=inside.train, validation=inside.validation, test=np.flatnonzero(is_test))


def hold_out_perturbations(
    labels: np.ndarray | pd.Series,
    held_out: Sequence[object] | None = None,
    *,
    share: float = 0.2,
    validation_share: float = 0.1,
    keep: object | Sequence[object] = (),
    environments: np.ndarray | pd.Series | None = None,
    held_out_environments: Sequence[object] = (),
    seed: int = 0,
) -> Split:
    """Split cells such that test cells have a perturbation or an environment that is unseen in training.

    ========================  =====================  ========================
    perturbation              other environments     held-out environments
    ========================  =====================  ========================
    training, or in ``keep``  train                  test
    validation                validation             in no part
    test                      test                   test
    ========================  =====================  ========================

    :meth:`Split.seen` distinguishes the test cells whose perturbation or environment was seen in training. Validation
    cells have perturbations of their own, so that models are selected by their results on perturbations they were not
    trained on.

    Parameters
    ----------
    labels
        Perturbation of each cell, ``(N,)``. Controls that are labelled with their position are held out by position,
        like perturbations. Controls in the test part then serve as negatives on which no model was fitted.
    held_out
        Perturbations to test on. Default: drawn at random.
    share, validation_share
        Fractions of perturbations to draw for the test part and for the validation part, relative to all perturbations
        that are not in ``keep``. At least one perturbation is drawn for a part, unless its fraction is 0. ``share`` has
        no effect if ``held_out`` is given.
    keep
        One perturbation or several that are never held out, such as the control.
    environments
        Environment of each cell, ``(N,)``.
    held_out_environments
        Environments of the test part. Default: none.
    seed
        Seed of the random draw.

    Raises
    ------
    ValueError
        If a fraction is not a number from 0 to 1, a name does not occur, a perturbation is both held out and in
        ``keep``, a cell has no label, or no perturbation or environment remains to train on.

    Examples
    --------
    >>> gene, well = adata.obs["gene"], adata.obs["well"]
    >>> split = scbd.data.hold_out_perturbations(
    ...     gene, share=0.4, keep="nontargeting", environments=well, held_out_environments=["P1_W1"]
    ... )
    >>> set(gene.iloc[split.train]) & set(gene.iloc[split.validation])
    set()
    >>> both_unseen = split.test[~split.seen(gene) & ~split.seen(well)]
    >>> set(well.iloc[both_unseen])
    {'P1_W1'}
    """
    check_number("share", share, 1)
    check_number("validation_share", validation_share, 1)
    codes, values = _factorize_labels(labels, "labels")
    kept = _positions_of_names(values, as_list(keep), "has the perturbation to keep,")
    order = np.random.default_rng(seed).permutation(np.setdiff1d(np.arange(len(values)), kept))
    if held_out is None:
        test = order[: _n_to_draw(share, len(order))]
    else:
        test = _positions_of_names(values, as_list(held_out), "has the held-out perturbation")
    if np.isin(test, kept).any():
        msg = f"{str(values[np.intersect1d(test, kept)[0]])!r} is to be held out and to be kept: name it once."
        raise ValueError(msg)
    validation = order[~np.isin(order, test)][: _n_to_draw(validation_share, len(order))]
    if len(test) + len(validation) >= len(order):
        msg = (
            f"{len(test)} perturbations to test on and {len(validation)} for validation leave none of {len(order)} to "
            "train on: hold out fewer."
        )
        raise ValueError(msg)
    elsewhere = _held_out_environment_mask(environments, held_out_environments, len(codes))
    is_test, is_validation = np.isin(codes, test), np.isin(codes, validation)
    return Split(
        train=~(is_test | is_validation | elsewhere),
        validation=is_validation & ~elsewhere,
        test=is_test | (elsewhere & ~is_validation),
    )


def draw_matched_training_rows(split: Split, labels: np.ndarray, seed: int = 0) -> np.ndarray:
    """Draw one training cell with the same label for each validation cell, without replacement.

    If a label has fewer training cells than validation cells, the last of its validation cells get no training cell.

    Parameters
    ----------
    split
        Training and validation rows.
    labels
        Codes of the labels of all cells, non-negative integers ``(N,)``.
    seed
        Seed of the random draw.

    Returns
    -------
    Row numbers of training cells, in the order of the validation cells for which they were drawn.
    """
    train = np.random.default_rng(seed).permutation(split.train)
    of_train, of_validation = labels[train], labels[split.validation]
    sizes, asked = (np.bincount(codes, minlength=int(labels.max()) + 1) for codes in (of_train, of_validation))
    nth = _rank_within_group(of_validation, asked).astype(np.int64)
    there = nth < sizes[of_validation]
    first = (np.cumsum(sizes) - sizes)[of_validation]
    return train[np.argsort(of_train, kind="stable")[(first + nth)[there]]]


def _combination_codes(strata: Sequence[np.ndarray]) -> np.ndarray:
    """Return one integer code per combination of labels, int32 ``(N,)``."""
    codes = np.zeros(len(strata[0]), dtype=np.int32)
    for labels in strata:
        check_unmasked("A stratum", labels)
        labels = labels if isinstance(labels, pd.Series) else np.asarray(labels)
        found, values = pd.factorize(labels, use_na_sentinel=False)
        crossed = codes * np.int64(len(values))
        crossed += found
        del found
        codes = pd.factorize(crossed)[0].astype(np.int32)
    return codes


def _rank_within_group(groups: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return for each cell the number of earlier cells in its group, float64 ``(N,)``.

    Parameters
    ----------
    groups
        Group of each cell, non-negative integers ``(N,)``.
    sizes
        Number of cells per group.
    """
    order = np.argsort(groups, kind="stable")
    counted = np.empty(len(groups))
    counted[order] = np.arange(len(groups))
    counted -= (np.cumsum(sizes) - sizes)[groups]
    return counted


def _held_out_environment_mask(
    environments: np.ndarray | pd.Series | None, held_out: Sequence[object], n: int
) -> np.ndarray:
    """Return a mask of the cells in held-out environments, boolean ``(n,)``.

    Raises
    ------
    ValueError
        If environments are held out but not given, a name does not occur, a cell has no environment, the number of
        cells differs from ``n``, or all environments are held out.
    """
    if environments is None:
        if len(held_out):
            msg = "held_out_environments needs environments, with a value for each cell."
            raise ValueError(msg)
        return np.zeros(n, dtype=bool)
    codes, values = _factorize_labels(environments, "environments")
    if len(codes) != n:
        msg = f"There are {n} labels and {len(codes)} environments: give one of each for a cell."
        raise ValueError(msg)
    mask = np.isin(codes, _positions_of_names(values, as_list(held_out), "is in the held-out environment"))
    if mask.all():
        msg = "All environments are held out: leave at least one to train on."
        raise ValueError(msg)
    return mask


def _factorize_labels(given: np.ndarray | pd.Series, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the code of each value, and the sorted distinct values.

    Because the values are sorted, the codes do not depend on the order of the cells.

    Raises
    ------
    ValueError
        If a cell has no value.
    """
    check_unmasked(name, given)
    codes, values = pd.factorize(np.asarray(given), sort=True)
    missing = np.flatnonzero(codes < 0)
    if missing.size:
        msg = (
            f"{name} has no value for {missing.size} of {len(codes)} cells (rows {join_first(missing)}): leave these "
            "out."
        )
        raise ValueError(msg)
    return codes, np.asarray(values)


def _positions_of_names(values: np.ndarray | pd.Index, names: Sequence[object], said: str) -> np.ndarray:
    """Return the positions of names in an array of distinct values.

    Names and values are compared as text, in which whole numbers have one form: 1 equals 1.0. The last argument
    completes the error message "No cell …".

    Raises
    ------
    ValueError
        If a name does not occur.
    """
    place_of = {label_text(value): place for place, value in enumerate(values)}
    places = np.array([place_of.get(label_text(name), -1) for name in names], dtype=np.int64)
    if (places < 0).any():
        missing = list(names)[int(np.argmax(places < 0))]
        msg = f"No cell {said} {missing!r}; there are: {join_first(sorted(map(str, values)), 20)}."
        raise ValueError(msg)
    return places


def _n_to_draw(share: float, n: int) -> int:
    return max(1, round(share * n)) if share else 0
