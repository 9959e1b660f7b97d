r"""How well an embedding predicts a label: high for the perturbation, low for the environment.

A probe is a classifier with one convention of splits: cells are learned from or tested on, singly or in whole groups,
so that nothing but the embedding tells the label. The linear one is multinomial logistic regression,

.. math:: \min_{W, b} \; \tfrac{1}{n} \sum_i \mathrm{CE}(W x_i + b, u_i) + \tfrac{1}{2nC} \lVert W \rVert^2

on standardised features :math:`x`, as scikit-learn has it. Along their principal axes the penalty stays what it is, and
the curvature is nearly diagonal: that of class :math:`k` along an axis of variance :math:`\lambda` is about
:math:`p_k (1 - p_k) \lambda + 1 / (nC)`. Divided by its root, L-BFGS needs tens of steps in place of hundreds.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import pandas as pd

from scbd._anndata import dense
from scbd._checks import check_choice, check_finite_rows, check_unmasked
from scbd._linear_maps import label_means, resolution
from scbd.metrics._average_precision import rounded, unit_rows
from scbd.metrics._table import chosen_rows, label_names, stored_embedding

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

Kind = Literal["linear", "quadratic", "neighbours", "nearest_mean"]
Classifier = Literal["linear", "nearest_mean"]

# scores of cells and labels that are held at a time, and the most that areas are of: more change their third digit
_SCORES = 1 << 24
# cells × labels that permuted labels are learned of, all times together, where it is more than once
_CHANCE_SIZE = 100_000
# values, such as cosines, that are worked on at once
_VALUES = 1 << 22
# of the quadratic probe: at most 64 + 64 + 120 features, which a few hundred cells allow; and, in standard deviations,
# where they are cut off: the square of an outlier would outweigh all else
_N_COMPONENTS, _N_MULTIPLIED, _CLIP = 64, 16, 5.0
# of a vote: neighbours that are nearer decide between labels with as many votes, and nothing else
_N_NEIGHBOURS, _NEARNESS = 15, 1e-3
# logits that stay in the processor's cache; cells that are enough for a fast product
_LOGITS, _CELLS = 1 << 18, 128
# of the largest variance: what is less is rounding
_NOTHING = 1e-7
# what scipy says where it took all steps that it was allowed
_UNFINISHED = 1


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
        ``"linear"``: multinomial logistic regression on standardised components. ``"quadratic"``: the same on the 64
        whitened principal components of most variance, their squares, and the products of the first 16, which tells
        apart environments that differ in variance. ``"neighbours"``: votes of the 15 nearest cells by cosine.
        ``"nearest_mean"``: the label whose mean is nearest, in the embedding *as it is*.
    train_fraction
        Fraction of cells to learn from.
    groups
        ``(N,)``: cells of a group are all learned from or all tested on. Of each label some groups are learned from and
        some tested on; labels with cells in one group only are left out, which is logged.
    train
        Mask ``(N,)`` or row numbers: learn from these cells and test on all others, in place of a random split.
    max_cells
        Use a random subset of this size.
    seed
        Seed of subset, split and permutation.

    Returns
    -------
    ``f1`` (macro over the labels that were tested), ``auroc`` (one against rest, macro, on a random part of the cells
    where labels are many), ``accuracy``, and ``chance_f1``: the macro F1 of the same classifier when it learned from
    permuted labels, its mean over up to five permutations where cells are few.

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
        If a regression has not converged.

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


def batch_probe(
    adata: AnnData,
    embedding_key: str,
    e_key: str | Sequence[str],
    *,
    kind: Kind = "linear",
    group_key: str | None = None,
    train_fraction: float = 0.6,
    max_cells: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """How well an embedding in ``obsm`` predicts the environment: low is good for z_c.

    Parameters
    ----------
    adata
        Embedded cells.
    embedding_key
        Key of ``obsm``, a layer, or ``"X"``.
    e_key
        Column of ``obs``, or several for their cross.
    group_key
        Column of ``obs`` whose groups are not split, for example the guide: see ``groups`` of :func:`label_probe`.
    kind, train_fraction, max_cells, seed
        See :func:`label_probe`.

    Returns
    -------
    See :func:`label_probe`.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        See :func:`label_probe`.

    Examples
    --------
    >>> scores = scbd.metrics.batch_probe(adata, "X_scbd_c", "well")
    >>> sorted(scores)
    ['accuracy', 'auroc', 'chance_f1', 'f1']
    """
    return label_probe(
        stored_embedding(adata, embedding_key),
        label_names(adata, e_key),
        kind=kind,
        groups=None if group_key is None else label_names(adata, group_key),
        train_fraction=train_fraction,
        max_cells=max_cells,
        seed=seed,
    )


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
        ``"linear"`` or ``"nearest_mean"``, see ``kind`` of :func:`label_probe`.

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
    check_choice("classifier", classifier, ("linear", "nearest_mean"))
    train, new = np.asarray(train_embedding, dtype=np.float64), np.asarray(dense(embedding, "embedding"))
    _check_finite(new)
    if new.shape[1] != train.shape[1]:
        msg = f"What is learned from has {train.shape[1]} components, and what is predicted from has {new.shape[1]}."
        raise ValueError(msg)
    reader = READERS[classifier](train, codes, np.arange(len(train)))
    return np.asarray(names)[_predicted(reader, new, np.arange(len(new)), len(names))]


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
    check_choice("kind", kind, Kind)
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
    model = fit(embedding, of_known[codes], learned)
    predicted = known[_predicted(model, embedding, test, len(known))]
    chance = []
    for _ in range(int(np.clip(_CHANCE_SIZE // (len(learned) * len(known)), 1, 5))):
        permuted = of_known[codes]
        permuted[learned] = rng.permutation(permuted[learned])
        permuted_model = fit(embedding, permuted, learned)
        named = known[_predicted(permuted_model, embedding, test, len(known))]
        chance.append(macro_f1(codes[test], named))
    scores = {
        "f1": macro_f1(codes[test], predicted),
        "auroc": _mean_auroc(model, embedding, of_known[codes], rng.permutation(test), len(known)),
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
    check_finite_rows(embedding)


def _factorized(values: ArrayLike, what: str, n: int, beside: str) -> tuple[np.ndarray, Any]:
    """Integer codes and names of labels or groups, one for each of ``n`` cells."""
    check_unmasked(f"An array of {what}s", values)
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


def _parts(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _predicted(model: Reader, x: Any, rows: np.ndarray, n_labels: int) -> np.ndarray:
    return np.concatenate([model.logits(x[part]).argmax(axis=1) for part in _parts(rows, max(1, _SCORES // n_labels))])


def _mean_auroc(model: Reader, x: Any, codes: np.ndarray, rows: np.ndarray, n_labels: int) -> float:
    """One label against the rest, mean over labels that some cells have and some have not; NaN if there are none."""
    from scipy.special import softmax
    from scipy.stats import rankdata

    rows = np.sort(rows[: max(1, _SCORES // n_labels)])
    of_label, truth = softmax(model.logits(x[rows]), axis=1).T, codes[rows]
    areas = []
    for scores, own in zip(of_label, truth == np.arange(n_labels)[:, None], strict=True):
        if 0 < (n := int(own.sum())) < len(own):
            areas.append((rankdata(scores)[own].sum() - n * (n + 1) / 2) / (n * (len(own) - n)))
    return float(np.mean(areas)) if areas else np.nan


def split_groups(
    codes: np.ndarray, groups: np.ndarray, train_fraction: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Masks ``(N,)`` of cells to learn from and to test on: whole groups, of each label some on either side.

    Labels are taken one after another, those with fewest groups first, and of their groups that lie on no side yet the
    fraction is drawn that is missing. Cells of labels that have groups on one side only are on neither.

    Parameters
    ----------
    codes, groups
        Label and group of each cell, integers ``(N,)``. A group may hold several labels.
    train_fraction
        Of each label's groups, to learn from; at least one, and not all.
    rng
        What the groups are drawn by.
    """
    of_label = pd.DataFrame({"label": codes, "group": groups}).drop_duplicates().groupby("label")["group"]
    learns = np.full(groups.max() + 1, -1)  # not decided
    for label in of_label.size().sort_values(kind="stable").index:
        mine = rng.permutation(of_label.get_group(label).to_numpy())
        if len(mine) < 2:
            continue
        free = mine[learns[mine] < 0]
        wanted = np.clip(round(train_fraction * len(mine)), 1, len(mine) - 1) - (learns[mine] == 1).sum()
        learns[free] = 0
        learns[free[: max(0, wanted)]] = 1
    side = learns[groups]
    n = codes.max() + 1
    both = (np.bincount(codes[side == 1], minlength=n) > 0) & (np.bincount(codes[side == 0], minlength=n) > 0)
    return (side == 1) & both[codes], (side == 0) & both[codes]


def probe_groups(
    adata: AnnData,
    y_key: str,
    e_key: str | Sequence[str] | None,
    guide_key: str | None,
    group_key: str | Sequence[str] | None,
) -> np.ndarray | None:
    """What the probe of y holds out, ``(N,)``, as :func:`scbd.metrics.benchmark` says of ``group_key``.

    Warns
    -----
    UserWarning
        If perturbations and environments nest so that any probe of the perturbation may read the environment.
    """
    if group_key != "auto":
        return None if group_key is None else label_names(adata, group_key)
    e, guide = (None if key is None else label_names(adata, key) for key in (e_key, guide_key))
    groups, wrong = groups_of_design(label_names(adata, y_key), e, guide)
    if wrong is not None:
        msg = (
            f"Between y_key={y_key!r} and e_key={e_key!r}, {wrong}: an embedding that holds the environment alone "
            "also predicts the perturbation. y_probe_f1 and similar scores do not measure biology alone here."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)
    return groups


def groups_of_design(
    y: np.ndarray, e: np.ndarray | None, guide: np.ndarray | None
) -> tuple[np.ndarray | None, str | None]:
    """What a probe of y should hold out as a whole, so that it cannot read the environment or the guide instead.

    Environments, where most cells lie in one that holds a single perturbation (wells of an arrayed screen), together
    with the guides that share them; otherwise guides, where they belong to one perturbation; otherwise nothing.

    Parameters
    ----------
    y, e, guide
        Labels ``(N,)``.

    Returns
    -------
    Groups ``(N,)`` or None, and what is wrong with the design, for a sentence, or None.
    """
    guide = guide if guide is not None and _tells(guide, y) else None
    if e is None or len(np.unique(e)) < 2:
        return _first_divisible(y, guide), None
    if not _tells(e, y):
        return _first_divisible(y, guide), "most perturbations lie in one environment only" if _tells(y, e) else None
    groups = _first_divisible(y, None if guide is None else _joined(e, guide), e)
    wrong = "most environments hold one perturbation, and fewer than two perturbations have two environments"
    return groups, wrong if groups is None else None


def _first_divisible(label: np.ndarray, *candidates: np.ndarray | None) -> np.ndarray | None:
    """The first groups of which two labels have several."""
    for group in candidates:
        if group is not None:
            pairs = pd.DataFrame({"label": label, "group": group}).drop_duplicates()
            if (pairs.groupby("label").size() > 1).sum() > 1:
                return group
    return None


def _tells(group: np.ndarray, label: np.ndarray) -> bool:
    """Whether most cells lie in a group of a single label."""
    pairs = pd.DataFrame({"group": group, "label": label}).value_counts()
    sizes, n_labels = pairs.groupby(level="group").sum(), pairs.groupby(level="group").size()
    return bool(sizes[n_labels == 1].sum() > 0.5 * len(group))


def _joined(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Components of what shares a group of either kind, integers ``(N,)``."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    (first, a), (second, b) = (np.unique(groups, return_inverse=True) for groups in (one, other))
    size = len(first) + len(second)
    links = coo_array((np.ones(len(a)), (a, len(first) + b)), shape=(size, size))
    return connected_components(links, directed=False)[1][a]


class Reader(Protocol):
    """A classifier that was fitted."""

    def logits(self, x: np.ndarray) -> np.ndarray:
        """From embeddings ``(N, D)`` to scores of labels ``(N, K)``, whose softmax are probabilities."""


def _linear(x: Any, codes: np.ndarray, rows: np.ndarray) -> Reader:
    return fit_logistic(x, codes, rows)


class _Quadratic:
    """A linear classifier of whitened components, their squares and products."""

    def __init__(self, x: Any, codes: np.ndarray, rows: np.ndarray) -> None:
        mean, sd, variance, axes = principal_axes(x, rows)
        length = np.sqrt(np.where(variance > 0, variance, 1))
        self._mean, self._matrix = mean, (axes / length / sd[:, None])[:, :_N_COMPONENTS]
        size = min(self._matrix.shape[1], _N_MULTIPLIED)
        self._pairs = np.triu_indices(size, k=1)
        self._model = fit_logistic(self._expand(x[rows]), codes[rows])

    def logits(self, x: np.ndarray) -> np.ndarray:
        return self._model.logits(self._expand(x))

    def _expand(self, x: np.ndarray) -> np.ndarray:
        v = ((np.asarray(x, dtype=np.float64) - self._mean) @ self._matrix).astype(np.float32).clip(-_CLIP, _CLIP)
        one, two = self._pairs
        return np.concatenate([v, np.square(v), v[:, one] * v[:, two]], axis=1)


class _Neighbours:
    """Votes of the nearest by cosine; of those that are equally near, each has a share of the vote."""

    def __init__(self, x: Any, codes: np.ndarray, rows: np.ndarray) -> None:
        self._unit = unit_rows(np.asarray(x[rows]))
        self._codes, self._n_labels = codes[rows], int(codes[rows].max()) + 1
        self._n = min(_N_NEIGHBOURS, len(rows))

    def logits(self, x: np.ndarray) -> np.ndarray:
        size = max(1, _VALUES // len(self._unit))
        votes = np.concatenate([self._votes(x[start : start + size]) for start in range(0, len(x), size)])
        # a label without a vote is unlikely, not impossible
        return np.log(votes / self._n + 1e-6)

    def _votes(self, x: np.ndarray) -> np.ndarray:
        cosine = rounded(unit_rows(np.asarray(x)) @ self._unit.T)
        last = np.partition(cosine, -self._n, axis=1)[:, -self._n, None]
        row, cell = np.nonzero(cosine >= last)
        near = cosine[row, cell]
        nearer = near > last[row, 0]
        n_nearer = np.bincount(row, weights=nearer, minlength=len(x))
        n_last = np.bincount(row, minlength=len(x)) - n_nearer
        share = np.where(nearer, 1, ((self._n - n_nearer) / n_last)[row])
        label = row * self._n_labels + self._codes[cell]
        votes = np.bincount(label, weights=share * (1 + _NEARNESS * near), minlength=len(x) * self._n_labels)
        return votes.reshape(len(x), self._n_labels)


class _NearestMean:
    """The label whose mean is nearest: the embedding as it is, one scale for all of it.

    That scale, the variance within labels, is what distances are beside; it decides nothing. Without it, probabilities
    of an embedding in large units are all 0 or 1, and those of one in small units all alike, whatever it tells.
    """

    def __init__(self, x: Any, codes: np.ndarray, rows: np.ndarray) -> None:
        learned = np.asarray(x[rows])
        of_row, self._means, counts = label_means(learned, codes[rows])
        self._variance = _variance_within(learned, of_row, self._means, len(learned) - len(counts))

    def logits(self, x: np.ndarray) -> np.ndarray:
        # minus half the squared distance, without the square of the point itself
        return (np.asarray(x) @ self._means.T - np.square(self._means).sum(1) / 2) / self._variance


def _variance_within(x: np.ndarray, codes: np.ndarray, means: np.ndarray, freedom: int) -> float:
    """Of a component around the mean of its label; where there is none, that of the means; of a point, 1."""
    size = max(1, _VALUES // x.shape[1])
    parts = (slice(start, start + size) for start in range(0, len(x), size))
    squares = sum(float(np.square(x[part] - means[codes[part]]).sum()) for part in parts)
    within, between = squares / max(1, freedom) / x.shape[1], float(np.square(means - means.mean(0)).mean())
    rounding = float(np.square(resolution(x.dtype) * means).mean())
    return within if within > rounding else between if between > rounding else 1.0


READERS: dict[Kind, Callable[[Any, np.ndarray, np.ndarray], Reader]] = {
    "linear": _linear,
    "quadratic": _Quadratic,
    "neighbours": _Neighbours,
    "nearest_mean": _NearestMean,
}


class Logistic(NamedTuple):
    """A fitted classifier of codes ``0 … K - 1``."""

    weight: np.ndarray
    """Of raw features, ``(K, D)``."""
    bias: np.ndarray
    """At the mean of the features, ``(K,)``."""
    mean: np.ndarray
    """Of what was learned from, ``(D,)``."""

    def logits(self, x: np.ndarray) -> np.ndarray:
        """float64 ``(N, K)``."""
        return (x - self.mean) @ self.weight.T + self.bias


def fit_logistic(
    x: Any,
    codes: np.ndarray,
    rows: np.ndarray | None = None,
    *,
    c: float = 1.0,
    max_iter: int = 1_000,
    tolerance: float = 1e-5,
) -> Logistic:
    """Fit a classifier of integer codes.

    Parameters
    ----------
    x
        Features ``(N, D)``, an array or a memory-map; read in blocks.
    codes
        ``0 … K - 1`` of all rows of ``x``.
    rows
        Rows to learn from; all by default.
    c
        Inverse strength of the penalty, as in scikit-learn.
    max_iter
        L-BFGS iterations.
    tolerance
        Stop when no component of the gradient is larger, in coordinates in which the curvature is near 1: what is then
        left to gain is about half its squared norm.

    Warns
    -----
    UserWarning
        If the iterations end before.
    """
    from scipy.optimize import minimize

    rows = np.arange(len(x)) if rows is None else rows
    n, k = len(rows), int(codes[rows].max()) + 1
    mean, sd, variance, axes = principal_axes(x, rows)
    turned = axes / sd[:, None]
    share = (np.bincount(codes[rows], minlength=k) + 0.5) / (n + 0.5 * k)
    penalty = np.append(np.full(len(variance), 1 / (c * n)), 0.0)
    unit = 1 / np.sqrt((share * (1 - share))[:, None] * np.append(variance, 1.0) + penalty)

    learned, basis = (x, codes, rows, mean), turned
    if n * min(n, x.shape[1]) <= _VALUES:  # turn few cells once, and not the weights at each step
        learned, basis = ((x[rows] - mean) @ turned, codes[rows], np.arange(n), np.zeros(1)), None

    def centred(values: np.ndarray) -> np.ndarray:
        return values - values.mean(axis=0)  # what all labels have in common changes no probability

    def value(scaled: np.ndarray) -> tuple[float, np.ndarray]:
        weight = centred(scaled.reshape(unit.shape) * unit)
        of_features = weight[:, :-1] if basis is None else weight[:, :-1] @ basis.T
        total, by_weight, by_bias = _cross_entropy(*learned, of_features, weight[:, -1])
        if basis is not None:
            by_weight = by_weight @ basis
        gradient = np.column_stack([by_weight, by_bias]) / n + penalty * weight
        return total / n + 0.5 * float((penalty * weight**2).sum()), (centred(gradient) * unit).ravel()

    start = np.zeros_like(unit)
    start[:, -1] = np.log(share) / unit[:, -1]
    options = {"maxiter": max_iter, "gtol": tolerance, "ftol": 0.0}
    result = minimize(value, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    if result.status == _UNFINISHED:
        msg = f"Logistic regression of {n:,} cells and {k:,} labels has not converged in {result.nit} steps."
        warnings.warn(msg, UserWarning, stacklevel=2)
    weight = centred(result.x.reshape(unit.shape) * unit)
    return Logistic(weight[:, :-1] @ turned.T, weight[:, -1], mean)


def _cross_entropy(
    x: Any, codes: np.ndarray, rows: np.ndarray, mean: np.ndarray, weight: np.ndarray, bias: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Sum over cells, and its gradients, ``(K, D)`` and ``(K,)``."""
    total, by_weight, by_bias = 0.0, np.zeros_like(weight), np.zeros_like(bias)
    for block in _parts(rows, max(_CELLS, _LOGITS // len(bias))):
        features, own = x[block] - mean, (np.arange(len(block)), codes[block])
        p = features @ weight.T + bias
        p -= p.max(axis=1, keepdims=True)
        total -= p[own].sum()
        np.exp(p, out=p)
        normaliser = p.sum(axis=1, keepdims=True)
        total += np.log(normaliser).sum()
        p /= normaliser
        p[own] -= 1
        by_weight += p.T @ features
        by_bias += p.sum(axis=0)
    return total, by_weight, by_bias


class PrincipalAxes(NamedTuple):
    """Of standardised features: in falling order of their variance, without those that have none, but always one."""

    mean: np.ndarray
    """Of the features, ``(D,)``."""
    sd: np.ndarray
    """Of the features, ``(D,)``; 1 for those that do not vary."""
    variance: np.ndarray
    """Along each axis, ``(R,)``; ``R`` is at most the number of rows."""
    axes: np.ndarray
    """Orthonormal columns, ``(D, R)``."""


def principal_axes(x: Any, rows: np.ndarray) -> PrincipalAxes:
    """Of some rows of an array or a memory-map ``(N, D)``, read in blocks, in float64."""
    n, d = len(rows), x.shape[1]
    origin = np.asarray(x[rows[0]], dtype=np.float64)  # close to the data: squares lose no digits to a large mean
    blocks = list(_parts(rows, max(_VALUES // d, d)))
    shift = sum((x[block] - origin).sum(axis=0) for block in blocks) / n
    if n < d:
        # the square of few rows is smaller than that of many features, and as good
        centred = x[rows] - origin - shift
        sd = _not_zero(np.sqrt(np.square(centred).mean(axis=0)))
        centred /= sd
        variance, of_rows = _decomposed(centred @ centred.T / n)
        axes = centred.T @ of_rows / np.sqrt(n * _not_zero(variance))
    else:
        squares = sum((part := x[block] - origin).T @ part for block in blocks)
        covariance = squares / n - np.outer(shift, shift)
        sd = _not_zero(np.sqrt(np.clip(np.diag(covariance), 0, None)))
        variance, axes = _decomposed(covariance / np.outer(sd, sd))
    return PrincipalAxes(shift + origin, sd, variance, axes)


def _decomposed(square: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, vectors = np.linalg.eigh(square)
    keep = values > _NOTHING * values[-1]
    keep[-1] = True
    return np.clip(values[keep], 0, None)[::-1], vectors[:, keep][:, ::-1]


def _not_zero(values: np.ndarray) -> np.ndarray:
    return np.where(values > 0, values, 1.0)
