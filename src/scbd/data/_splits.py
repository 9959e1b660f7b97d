"""Division of the cells of a data set into training, validation and test cells.

Cells can be divided at random within strata, by holding out environments or perturbations, or as a column states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from scbd._shared.checks import check_number, check_unmasked, inflect, join_first, missing_key_message, suggest_name
from scbd._shared.keys import NOT_IN_SPLIT
from scbd._shared.labels import as_list, label_text
from scbd._shared.messages import warn_user

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

# Values, in lower case, by which a column may state the part of the split (training, validation or test) that each cell
# belongs to. Each value is mapped to the name of the part.
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
    """Division of the cells of a data set into three parts: training, validation and test cells.

    Each part is stored as sorted row numbers (one row per cell), int64. No cell is in two parts, but cells may be
    excluded from all parts.

    Parameters
    ----------
    train, validation, test
        Cells of each part, as row numbers or as a boolean mask over all cells. Default of ``validation`` and ``test``:
        no cells.

    Raises
    ------
    ValueError
        If there is no training cell, a cell occurs in two parts or twice in one part, a row number is negative or not
        an integer, or the masks differ in length.
    TypeError
        If a part is given as a masked array of numpy.

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
        """Return a text with the total number of cells, and the numbers of training, validation and test cells."""
        parts = {name: len(getattr(self, name)) for name in ("train", "validation", "test")}
        counts = ", ".join(f"{name} {n:,}" for name, n in parts.items())
        return f"Split of {sum(parts.values()):,} cells: {counts}"

    def seen(self, values: ArrayLike, part: Literal["validation", "test"] = "test") -> np.ndarray:
        """Return a mask of the test (or validation) cells whose label also occurs among the training cells.

        Parameters
        ----------
        values
            Label of each cell of the data set, such as its perturbation or environment, ``(N,)``.
        part
            Cells for which the mask is returned: ``"test"`` or ``"validation"`` cells.

        Returns
        -------
        Boolean mask with one entry per cell of this part, in the order of the row numbers of the part.

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
    """Convert the training, validation or test part of a split to sorted row numbers, int64.

    Parameters
    ----------
    given
        Row numbers of the cells of the part, or a boolean mask over all cells.
    name
        Name of the part, for error messages.

    Raises
    ------
    TypeError
        If the part is a masked array of numpy.
    ValueError
        If the part is neither a one-dimensional array of integers nor a boolean mask, or if a row number is negative.
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
    """Read the division into training, validation and test cells from a column of the table of cells.

    The column holds ``train``, ``validation`` or ``test`` for each cell. Upper case is accepted as well, and so are
    ``training`` in place of ``train``, and ``val`` and ``valid`` in place of ``validation``. Cells with any other value
    are excluded from the split.

    Parameters
    ----------
    obs
        Table with one row per cell.
    column
        Name of the column that states the part of each cell.

    Raises
    ------
    KeyError
        If the table has no such column.
    ValueError
        If the column assigns no cell to the training part.

    Warns
    -----
    UserWarning
        If cells are excluded because their value names no part, which may be a typing error. Cells with a missing or
        empty value, or with the value ``scbd._shared.keys.NOT_IN_SPLIT``, are excluded without a warning.
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
        warn_user(msg)
    # The last entry of the array of parts is 0, which means no part. Cells without a value have the code -1, which
    # selects this last entry.
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
    """Split cells into training, validation and test cells at random, with the same proportions in each stratum.

    A stratum is the set of all cells with the same labels, usually the same perturbation and environment. In each
    stratum, the number of cells in each part deviates from the requested proportion by less than one cell. If a stratum
    has too few cells to be divided, the parts that receive them are drawn at random. The expected number of cells in
    each part is therefore exactly the requested fraction of all cells.

    Parameters
    ----------
    strata
        One or several arrays of labels, each ``(N,)``, usually the perturbation y and the environment e of each cell.
        Each combination of these labels is a stratum.
    train_size, validation_size
        Fractions of cells for training and validation. The remaining cells are test cells. Default of
        ``validation_size``: all cells that are not used for training.
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
    # number the strata from 0, in the order in which they first occur among the shuffled cells
    stratum = pd.factorize(stratum)[0].astype(np.int32, copy=False)
    sizes = np.bincount(stratum)
    # Systematic sampling: the cells of a stratum are placed on the interval [0, 1) at equal distances, and the first
    # cell is placed at random. The position of a cell on the interval determines its part.
    position = _rank_within_group(stratum, sizes)
    position += rng.random(len(sizes))[stratum]
    position /= sizes[stratum]
    del stratum
    # The sum of the fractions is raised by 1e-9 against rounding errors. A sum such as 0.9 + (1 - 0.9) could otherwise
    # be slightly below 1, and a cell would become a test cell.
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
    """Split cells such that all cells of the held-out environments are test cells.

    The cells of all remaining environments are divided into training and validation cells at random. The test
    environments are thus unseen in training and validation.

    Parameters
    ----------
    environments
        Environment of each cell, ``(N,)``.
    held_out
        Environments whose cells become test cells.
    strata
        Further labels of each cell, such as its perturbation, as arrays ``(N,)``. The fraction of validation cells is
        the same for each combination of environment and these labels.
    validation_size
        Fraction of the cells of the remaining environments that are used for validation.
    seed
        Seed of the random split into training and validation cells.

    Raises
    ------
    ValueError
        If no cell is in a held-out environment, a cell has no environment, or no environment remains to train on.

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

    Perturbations are divided into three sets: for training, for validation and for testing. Environments are divided
    into two sets: for training and held out. The part of a cell follows from its perturbation and its environment:

    ===========================  =======================  ====================
    perturbation of the cell     environment of the cell  part of the cell
    ===========================  =======================  ====================
    for training                 for training             training
    for training                 held out                 test
    for validation               for training             validation
    for validation               held out                 none (excluded)
    for testing                  for training             test
    for testing                  held out                 test
    ===========================  =======================  ====================

    :meth:`Split.seen` distinguishes test cells whose perturbation (or environment) occurs among the training cells from
    test cells whose perturbation (or environment) does not. Training and validation cells have no perturbation in
    common. Models can therefore be selected by their results on perturbations that they were not trained on.

    Parameters
    ----------
    labels
        Perturbation of each cell, ``(N,)``. If the label of a control cell includes its position on the plate, each
        position is held out or used for training like a perturbation. The controls among the test cells then are
        negative controls on which no model was trained.
    held_out
        Perturbations for testing. Default: drawn at random.
    share, validation_share
        Fractions of perturbations to draw for testing and for validation, relative to all perturbations that are not in
        ``keep``. At least one perturbation is drawn for testing, and one for validation, unless ``share`` or
        ``validation_share`` is 0. ``share`` has no effect if ``held_out`` is given.
    keep
        One or several perturbations that are always used for training, such as the control.
    environments
        Environment of each cell, ``(N,)``. Required only with ``held_out_environments``.
    held_out_environments
        Environments that are held out of training. Default: no environments.
    seed
        Seed of the random draw of perturbations.

    Raises
    ------
    ValueError
        If a fraction is not a number from 0 to 1, no cell has a given perturbation or environment, a perturbation is
        both in ``held_out`` and in ``keep``, a cell has no label, or no perturbation or environment remains to train
        on.

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
    """Draw for each validation cell one training cell with the same label (perturbation), without replacement.

    If fewer training cells than validation cells have a label, the surplus validation cells of this label get no
    training cell.

    Parameters
    ----------
    split
        Row numbers of the training and the validation cells.
    labels
        Label code of each cell of the data set, non-negative integers ``(N,)``.
    seed
        Seed of the random draw.

    Returns
    -------
    Row numbers of the drawn training cells, in the order of the validation cells for which they were drawn.
    """
    train = np.random.default_rng(seed).permutation(split.train)
    of_train, of_validation = labels[train], labels[split.validation]
    sizes, asked = (np.bincount(codes, minlength=int(labels.max()) + 1) for codes in (of_train, of_validation))
    nth = _rank_within_group(of_validation, asked).astype(np.int64)
    there = nth < sizes[of_validation]
    first = (np.cumsum(sizes) - sizes)[of_validation]
    return train[np.argsort(of_train, kind="stable")[(first + nth)[there]]]


def _combination_codes(strata: Sequence[np.ndarray]) -> np.ndarray:
    """Return an integer code for the combination of labels of each cell, int32 ``(N,)``.

    Parameters
    ----------
    strata
        Several arrays of labels, such as the perturbations and the environments of all cells, ``(N,)`` each.
    """
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
    """Return for each cell the number of cells of the same group in earlier rows, float64 ``(N,)``.

    Parameters
    ----------
    groups
        Code of the group of each cell, such as its stratum or perturbation, non-negative integers ``(N,)``.
    sizes
        Number of cells in each group.
    """
    order = np.argsort(groups, kind="stable")
    counted = np.empty(len(groups))
    counted[order] = np.arange(len(groups))
    counted -= (np.cumsum(sizes) - sizes)[groups]
    return counted


def _held_out_environment_mask(
    environments: np.ndarray | pd.Series | None, held_out: Sequence[object], n: int
) -> np.ndarray:
    """Return a boolean mask ``(n,)`` that is true for each cell whose environment is held out of training.

    Parameters
    ----------
    environments
        Environment of each cell. May be `None` if no environment is held out.
    held_out
        Names of the environments to hold out.
    n
        Number of cells of the data set.

    Raises
    ------
    ValueError
        If environments are to be held out but ``environments`` is `None`, no cell is in a held-out environment, a cell
        has no environment, the length of ``environments`` is not ``n``, or all environments are held out.
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
    """Return an integer code for the label of each cell, and the sorted array of distinct labels.

    A code is the position of the label in the sorted array. It therefore does not depend on the order of the cells.

    Parameters
    ----------
    given
        Label of each cell, such as its perturbation or environment.
    name
        Name of the argument that holds the labels, for error messages.

    Raises
    ------
    ValueError
        If a cell has no label.
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
    """Return the position of each given name in the array of the distinct labels of all cells.

    Names and labels are compared as text. The whole numbers 1 and 1.0 have the same text.

    Parameters
    ----------
    values
        Distinct labels of all cells, such as all perturbations.
    names
        Names to find among the labels.
    said
        Words that follow "No cell" in the error message, such as "is in the held-out environment".

    Raises
    ------
    ValueError
        If a name is not among the labels.
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
