"""Splits that test on what training never sees: whole environments, and whole perturbations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._checks import check_number
from scbd._labels import label_text
from scbd._messages import head
from scbd.data._splits import Split, stratified_split

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALL_ENVIRONMENTS = "All environments are held out: leave at least one to train on."


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
        If a held-out environment does not occur, a cell has none, or none is left to train on.

    Examples
    --------
    >>> split = scbd.data.hold_out_environments(adata.obs["well"], ["P1_W1"])
    >>> set(adata.obs["well"].iloc[split.test])
    {'P1_W1'}
    """
    codes, values = _known(environments, "environments", sort=False)
    is_test = np.isin(codes, _places(values, _several(held_out), "is in the held-out environment"))
    if is_test.all():
        raise ValueError(_ALL_ENVIRONMENTS)
    inside = stratified_split(
        [codes, *strata], train_size=1 - validation_size, seed=seed, rows=np.flatnonzero(~is_test)
    )
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
    """Test on perturbations that training and validation never see, and on whole environments besides.

    ========================  =====================  ========================
    perturbation              kept environments      held-out environments
    ========================  =====================  ========================
    to train on, or ``keep``  train                  test
    of validation             validation             left out
    held out                  test                   test
    ========================  =====================  ========================

    :meth:`Split.seen` tells the parts of the test cells apart. Validation has perturbations of its own, so that models
    are chosen by what they do to perturbations that they were not trained on.

    Parameters
    ----------
    labels
        Perturbation of each cell, ``(N,)``. Controls whose label is their position are held out by position: those of
        the test part are negatives that nothing was fitted on.
    held_out
        Perturbations to test on; drawn at random by default.
    share, validation_share
        Of all perturbations but those of ``keep``, how many are drawn for testing and for validation: each at least
        one, or none where the share is 0.
    keep
        One perturbation or several that are never held out, such as the control.
    environments
        Environment of each cell, ``(N,)``.
    held_out_environments
        Environments of the test part.
    seed
        Seed of the draw.

    Raises
    ------
    ValueError
        If a share is no number from 0 to 1, a name does not occur, a cell has no label, or nothing is left to train on.

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
    codes, values = _known(labels, "labels")
    kept = _places(values, _several(keep), "has the perturbation to keep,")
    order = np.random.default_rng(seed).permutation(np.setdiff1d(np.arange(len(values)), kept))
    if held_out is None:
        test = order[: _how_many(share, len(order))]
    else:
        test = _places(values, _several(held_out), "has the held-out perturbation")
    if np.isin(test, kept).any():
        msg = f"{str(values[np.intersect1d(test, kept)[0]])!r} is to be held out and to be kept: name it once."
        raise ValueError(msg)
    validation = order[~np.isin(order, test)][: _how_many(validation_share, len(order))]
    if len(test) + len(validation) >= len(order):
        msg = (
            f"{len(test)} perturbations to test on and {len(validation)} for validation leave none of {len(order)} to "
            "train on: hold out fewer."
        )
        raise ValueError(msg)
    elsewhere = _in_environments(environments, held_out_environments, len(codes))
    is_test, is_validation = np.isin(codes, test), np.isin(codes, validation)
    return Split(
        train=~(is_test | is_validation | elsewhere),
        validation=is_validation & ~elsewhere,
        test=is_test | (elsewhere & ~is_validation),
    )


def _in_environments(environments: np.ndarray | pd.Series | None, held_out: Sequence[object], n: int) -> np.ndarray:
    """Mask of cells in held-out environments, ``(n,)``."""
    if environments is None:
        if len(held_out):
            msg = "held_out_environments needs environments, with a value for each cell."
            raise ValueError(msg)
        return np.zeros(n, dtype=bool)
    codes, values = _known(environments, "environments")
    if len(codes) != n:
        msg = f"There are {n} labels and {len(codes)} environments: give one of each for a cell."
        raise ValueError(msg)
    mask = np.isin(codes, _places(values, _several(held_out), "is in the held-out environment"))
    if mask.all():
        raise ValueError(_ALL_ENVIRONMENTS)
    return mask


def _known(given: np.ndarray | pd.Series, name: str, *, sort: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Codes of values and the values; sorted, their order does not depend on that of the cells."""
    codes, values = pd.factorize(np.asarray(given), sort=sort)
    missing = np.flatnonzero(codes < 0)
    if missing.size:
        msg = f"{name} has no value for {missing.size} of {len(codes)} cells (rows {head(missing)}): leave these out."
        raise ValueError(msg)
    return codes, np.asarray(values)


def _places(values: np.ndarray | pd.Index, names: Sequence[object], said: str) -> np.ndarray:
    """Where names stand among values; a number has one name, as text, too."""
    place_of = {label_text(value): place for place, value in enumerate(values)}
    places = np.array([place_of.get(label_text(name), -1) for name in names], dtype=np.int64)
    if (places < 0).any():
        missing = list(names)[int(np.argmax(places < 0))]
        msg = f"No cell {said} {missing!r}; there are: {head(sorted(map(str, values)), 20)}."
        raise ValueError(msg)
    return places


def _several(names: object | Sequence[object]) -> list[object]:
    return list(names) if isinstance(names, Iterable) and not isinstance(names, str) else [names]


def _how_many(share: float, n: int) -> int:
    return max(1, round(share * n)) if share else 0
