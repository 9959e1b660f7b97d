"""How well an embedding predicts a label: high for the perturbation, low for the environment."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd

from scbd._matrices import dense
from scbd.metrics._auroc import mean_auroc
from scbd.metrics._design import split_groups
from scbd.metrics._readers import READERS, Kind, Reader, check_kinds
from scbd.metrics._table import chosen_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

Classifier = Literal["linear", "nearest_mean"]

_BLOCK = 1 << 17
# scores of cells and labels that are held at a time
_SCORES = 1 << 24
# more would change the third digit of an area, and cost time for a score a cell and label
_AUROC_CELLS = 200_000
# cells × labels that permuted labels are learned of, all times together, where it is more than once
_CHANCE_SIZE = 100_000


def predict_labels(
    train_embedding: np.ndarray, train_labels: ArrayLike, embedding: np.ndarray, *, classifier: Classifier = "linear"
) -> np.ndarray:
    """Learn labels from one embedding, predict those of another.

    Parameters
    ----------
    train_embedding, embedding
        ``(N, D)`` and ``(M, D)``.
    train_labels
        Labels of the first, ``(N,)``.
    classifier
        ``"linear"``: multinomial logistic regression on standardised components; ``"nearest_mean"``: the label whose
        mean is nearest, which asks whether the embedding *as it is* separates the labels.

    Returns
    -------
    Predicted labels, ``(M,)``.

    Raises
    ------
    TypeError
        If an embedding is a DataFrame, and a column holds no numbers.
    ValueError
        If an embedding is sparse, not finite, not of the shape that is asked for, or there is one label only.

    Examples
    --------
    >>> known = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> scbd.metrics.predict_labels(known, ["a", "b"], np.array([[0.1, 0.9]]), classifier="nearest_mean").tolist()
    ['a']
    """
    train_embedding = dense(train_embedding, "train_embedding")
    codes, names = _codes(train_embedding, train_labels)
    if len(names) < 2:
        msg = "A probe needs at least two different labels to tell apart."
        raise ValueError(msg)
    if classifier not in get_args(Classifier):
        msg = f"classifier={classifier!r} is not known: use 'linear' or 'nearest_mean'."
        raise ValueError(msg)
    train, new = np.asarray(train_embedding, dtype=np.float64), np.asarray(dense(embedding, "embedding"))
    _check_finite(new)
    if new.shape[1] != train.shape[1]:
        msg = f"What is learned from has {train.shape[1]} components, and what is predicted from has {new.shape[1]}."
        raise ValueError(msg)
    reader = READERS[classifier](train, codes, np.arange(len(train)), 0)
    return np.asarray(names)[_predicted(reader, new, np.arange(len(new)), len(names))]


def label_probe(
    embedding: Any,
    labels: ArrayLike,
    *,
    kind: Kind = "linear",
    train_fraction: float = 0.6,
    groups: ArrayLike | None = None,
    train: ArrayLike | None = None,
    max_cells: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Predict a label from an embedding, on cells that were not learned from.

    The paper's protocol (appendix, batch prediction): a random 60 % of cells to learn from, the score on the rest.

    Parameters
    ----------
    embedding
        ``(N, D)``, an array, a DataFrame, or a memory-map, which is read in blocks.
    labels
        ``(N,)``; labels with a single cell are left out.
    kind
        The classifier. ``"linear"``: multinomial logistic regression on standardised components. ``"quadratic"``: the
        same on the 64 whitened principal components of most variance, their squares, and the products of the first 16,
        which tells apart environments that differ in variance. ``"neighbours"``: votes of the 15 nearest cells by
        cosine, which asks for no shape. ``"nearest_mean"``: the label whose mean is nearest, which asks whether the
        embedding *as it is* separates the labels.
    train_fraction
        Fraction of cells to learn from.
    groups
        ``(N,)``: cells of a group are all learned from or all tested on, such as those of a well when the label is a
        gene. Of each label some groups are learned from and some tested on; labels with cells in one group only are
        left out, which is logged. By default cells are split one by one.
    train
        Mask ``(N,)`` or row numbers: learn from these cells and test on all others, in place of a random split; for
        example the cells that the embedding itself was trained on.
    max_cells
        Use a random subset of this size.
    seed
        Seed of subset, split and permutation.

    Returns
    -------
    ``f1`` (macro over the labels that were tested), ``auroc`` (one against rest, macro, on at most 200,000 cells; with
    ``"nearest_mean"``, distances count in units of the spread within labels, and those of the embedding do not matter),
    ``accuracy``, and ``chance_f1``: the macro F1 of the same classifier when it learned from permuted labels, its mean
    over up to five permutations where cells are few.

    Raises
    ------
    TypeError
        If the embedding is a DataFrame, and a column holds no numbers.
    ValueError
        If the embedding is sparse, not finite or not of the labels' length, fewer than two labels have two cells or two
        groups, or a split leaves a side without two labels.

    Warns
    -----
    UserWarning
        If a regression has not converged in 200 steps, so that scores may be a little low.

    Examples
    --------
    >>> embedding = np.repeat(np.eye(3), 50, axis=0)  # tells three labels apart
    >>> scbd.metrics.label_probe(embedding, np.repeat(["a", "b", "c"], 50))["accuracy"]
    1.0
    """
    return probed(
        embedding,
        labels,
        kind=kind,
        train_fraction=train_fraction,
        groups=groups,
        train=train,
        max_cells=max_cells,
        seed=seed,
    ).scores


class Probed(NamedTuple):
    """What a probe said of the cells that it was tested on."""

    scores: dict[str, float]
    """See :func:`label_probe`."""
    truth: np.ndarray
    """Code of each cell's label, ``(T,)``."""
    predicted: np.ndarray
    """The same as it was read."""
    units: np.ndarray
    """Code of what was held out as a whole: a cell's group, or the cell, ``(T,)``."""

    def resampled(self, n: int, seed: int) -> dict[str, np.ndarray]:
        """Scores ``(n,)`` of as many units drawn with replacement; the same units for the same seed."""
        _, units = np.unique(self.units, return_inverse=True)
        n_units, rng = int(units.max()) + 1, np.random.default_rng(seed)
        found: dict[str, list[float]] = {"f1": [], "accuracy": []}
        hit = self.truth == self.predicted
        for _ in range(n):
            weight = np.bincount(rng.integers(n_units, size=n_units), minlength=n_units)[units].astype(float)
            found["f1"].append(macro_f1(self.truth, self.predicted, weight))
            found["accuracy"].append(float(weight[hit].sum() / weight.sum()))
        return {name: np.array(values) for name, values in found.items()}


def probed(
    embedding: Any,
    labels: ArrayLike,
    *,
    kind: Kind,
    train_fraction: float = 0.6,
    groups: ArrayLike | None,
    train: ArrayLike | None = None,
    max_cells: int | None,
    seed: int,
) -> Probed:
    """Fit a probe and test it, see :func:`label_probe`."""
    check_kinds(kind)
    embedding = dense(embedding, "embedding")
    codes, _ = _codes(embedding, labels)
    rng = np.random.default_rng(seed)
    rows = np.arange(len(codes))
    if max_cells is not None and len(rows) > max_cells:
        rows = np.sort(rng.choice(len(rows), max_cells, replace=False))
    rows = rows[np.bincount(codes[rows])[codes[rows]] > 1]
    if len(np.unique(codes[rows])) < 2:
        msg = "A probe needs at least two labels with two cells each, one to learn from and one to be tested on."
        raise ValueError(msg)
    of_group = None if groups is None else _factorized(groups, "group", len(codes), "labels")[0]
    if train is None:
        learned, test = _split(rows, codes, of_group, train_fraction, rng)
    else:
        is_train = chosen_rows("train", train, len(codes))[rows]
        learned, test = rows[is_train], rows[~is_train]
    # labels that cannot be learned are still tested on: they count as errors
    known = np.unique(codes[learned])
    if len(known) < 2 or not len(test):
        msg = "The split leaves fewer than two labels to learn from: use smaller groups, or more cells."
        raise ValueError(msg)
    of_known = np.full(codes.max() + 1, -1)
    of_known[known] = np.arange(len(known))
    fit = READERS[kind]
    model = fit(embedding, of_known[codes], learned, seed)
    predicted = known[_predicted(model, embedding, test, len(known))]
    chance = []
    for _ in range(int(np.clip(_CHANCE_SIZE // (len(learned) * len(known)), 1, 5))):
        permuted = of_known[codes]
        permuted[learned] = rng.permutation(permuted[learned])
        permuted_model = fit(embedding, permuted, learned, seed)
        named = known[_predicted(permuted_model, embedding, test, len(known))]
        chance.append(macro_f1(codes[test], named))
    scores = {
        "f1": macro_f1(codes[test], predicted),
        "auroc": _auroc(model, embedding, of_known[codes], rng.permutation(test)[:_AUROC_CELLS], len(known)),
        "accuracy": float(np.mean(codes[test] == predicted)),
        "chance_f1": float(np.mean(chance)),
    }
    return Probed(scores, codes[test], predicted, test if of_group is None else of_group[test])


def macro_f1(truth: np.ndarray, predicted: np.ndarray, weight: np.ndarray | None = None) -> float:
    """F1 averaged over the labels that occur in ``truth`` or ``predicted``, as in scikit-learn; ``weight`` of cells."""
    size, hit = int(max(truth.max(), predicted.max())) + 1, truth == predicted
    hits = np.bincount(truth[hit], None if weight is None else weight[hit], minlength=size)
    total = np.bincount(truth, weight, minlength=size) + np.bincount(predicted, weight, minlength=size)
    return float(np.mean(2 * hits[total > 0] / total[total > 0]))


def _codes(embedding: Any, labels: ArrayLike) -> tuple[np.ndarray, Any]:
    """Integer codes and names of the labels; the embedding is checked."""
    found = _factorized(labels, "label", len(embedding), "embeddings")
    _check_finite(embedding)
    return found


def _check_finite(embedding: Any) -> None:
    shape = np.shape(embedding)
    if len(shape) != 2:
        msg = f"The embedding has the shape {shape}: give a row a cell and a column a component."
        raise ValueError(msg)
    blocks = (np.isfinite(embedding[s : s + _BLOCK]).all(axis=1) for s in range(0, len(embedding), _BLOCK))
    n_bad = sum(int((~finite).sum()) for finite in blocks)
    if n_bad:
        msg = f"The embedding has NaN or infinite values in {n_bad} of {len(embedding)} cells."
        raise ValueError(msg)


def _factorized(values: ArrayLike, what: str, n: int, beside: str) -> tuple[np.ndarray, Any]:
    """Integer codes and names of labels or groups, one for each of ``n`` cells."""
    # a list would become text, a missing value in it, too
    codes, names = pd.factorize(np.asarray(pd.Series(values) if isinstance(values, list | tuple) else values))
    if len(codes) != n:
        msg = f"There are {n} {beside} and {len(codes)} {what}s."
        raise ValueError(msg)
    if (codes < 0).any():
        msg = f"{(codes < 0).sum()} of {n} cells have no {what}: drop them."
        raise ValueError(msg)
    return codes, names


def _split(
    rows: np.ndarray, codes: np.ndarray, groups: np.ndarray | None, train_fraction: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Sorted rows to learn from and to test on."""
    if not 0 < train_fraction < 1:
        msg = f"train_fraction={train_fraction} must lie between 0 and 1."
        raise ValueError(msg)
    if groups is None:
        is_train = np.zeros(len(rows), dtype=bool)
        is_train[rng.permutation(len(rows))[: round(train_fraction * len(rows))]] = True
        return rows[is_train], rows[~is_train]
    is_train, is_test = split_groups(codes[rows], groups[rows], train_fraction, rng)
    n, n_scored = len(np.unique(codes[rows])), len(np.unique(codes[rows[is_train]]))
    if n_scored < 2:
        msg = (
            f"{n - n_scored} of {n} labels have cells in one group only, and cannot be learned from one group and "
            "tested on another: a probe needs two labels that can. Use finer groups, or none."
        )
        raise ValueError(msg)
    if n_scored < n:
        logger.warning("The probe leaves out %d of %d labels, with cells in one group only.", n - n_scored, n)
    return rows[is_train], rows[is_test]


def _blocks(n: int, n_labels: int) -> Iterator[slice]:
    """Of cells whose scores of all labels are held at a time."""
    size = max(1, _SCORES // n_labels)
    return (slice(start, start + size) for start in range(0, n, size))


def _predicted(model: Reader, x: Any, rows: np.ndarray, n_labels: int) -> np.ndarray:
    return np.concatenate([model.logits(x[rows[block]]).argmax(axis=1) for block in _blocks(len(rows), n_labels)])


def _auroc(model: Reader, x: Any, codes: np.ndarray, rows: np.ndarray, n_labels: int) -> float:
    """Mean area over labels that were learned and occur, but are not all there is."""
    from scipy.special import softmax

    rows = np.sort(rows)

    def scores() -> Iterator[np.ndarray]:
        return (softmax(model.logits(x[rows[block]]), axis=1) for block in _blocks(len(rows), n_labels))

    # few are kept: some probes take their time
    kept = list(scores()) if len(rows) * n_labels <= _SCORES else None
    return mean_auroc(scores if kept is None else lambda: iter(kept), codes[rows], n_labels)
