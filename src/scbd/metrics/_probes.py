r"""Probes: classifiers that measure how well an embedding predicts a label.

A good z_c has a high score for the perturbation and a low score for the environment. Cells are divided into training
cells and test cells, either as single cells or in whole groups, so that only the embedding can reveal the label of a
test cell.

The linear probe is a multinomial logistic regression, which minimises the same objective as in scikit-learn,

.. math:: \min_{W, b} \; \tfrac{1}{n} \sum_i \mathrm{CE}(W x_i + b, u_i) + \tfrac{1}{2nC} \lVert W \rVert^2

where :math:`x_i` are the standardised features and :math:`u_i` the label of cell :math:`i`, CE is the cross entropy,
and :math:`C` is the inverse strength of the penalty.

The objective is minimised along the principal axes of the features. Rotation to these axes does not change the penalty,
and makes the curvature of the objective nearly diagonal. For class :math:`k`, with a fraction :math:`p_k` of the cells,
and an axis of variance :math:`\lambda`, the curvature is about :math:`p_k (1 - p_k) \lambda + 1 / (nC)`. Coordinates
are multiplied by the inverse square root of the curvature, after which the optimiser L-BFGS needs tens of iterations
instead of hundreds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import pandas as pd

from scbd._shared.checks import check_choice, check_finite_rows, check_unmasked
from scbd._shared.linear_maps import label_means, relative_rounding_error
from scbd._shared.messages import warn_user
from scbd._shared.numeric_tables import check_dense
from scbd.metrics._arguments import get_embedding, get_label_texts, random_rows, row_mask
from scbd.metrics._average_precision import round_cosines, scale_to_unit_length
from scbd.metrics._resampling import draw_units

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

ProbeKind = Literal["linear", "quadratic", "neighbours", "nearest_mean"]
Classifier = Literal["linear", "nearest_mean"]

# Maximum number of predicted scores (one per cell and label) that are in memory at once. The AUROC is also computed
# from at most this number of scores, because more scores would change only the third digit of the AUROC.
_MAX_SCORES_IN_MEMORY = 1 << 24
# The F1 score expected by chance is a mean over several fits to permuted labels. The number of fits is this constant
# divided by the product of the number of training cells and the number of labels, but at least 1 and at most 5.
_PERMUTED_FIT_SIZE = 100_000
# maximum number of array elements, for example cosines, that are processed at once
_MAX_VALUES_IN_MEMORY = 1 << 22
# The features of the quadratic probe are 64 principal components, their squares, and the products of the 16 leading
# components. These 64 + 64 + 120 features can be fitted to a few hundred training cells. Components are clipped to 5
# standard deviations, because the square of an outlier would outweigh all other values.
_QUADRATIC_N_COMPONENTS, _QUADRATIC_N_MULTIPLIED, _QUADRATIC_MAX_DEVIATIONS = 64, 16, 5.0
# In the neighbours probe, the 15 nearest training cells vote on the label of a cell. The cosine of a training cell
# enters its vote with a weight of 0.001, which is so small that it only decides between labels with equal numbers of
# votes.
_N_NEIGHBOURS, _COSINE_TIE_BREAKER = 15, 1e-3
# Logistic regression is computed in blocks of cells. A block has at most 2^18 logits, which fit into the processor's
# cache. It has at least 128 cells, because the matrix product is slow for smaller blocks.
_LOGITS_PER_BLOCK, _MIN_CELLS_PER_BLOCK = 1 << 18, 128
# Principal axes are dropped if their variance is at most this fraction of the largest variance. Such a small variance
# is only rounding error.
_MIN_RELATIVE_VARIANCE = 1e-7
# status that scipy's optimiser L-BFGS-B returns if it has reached the maximum number of iterations
_LBFGS_ITERATION_LIMIT = 1


class ProbeImpossible(ValueError):
    """Error of a probe whose labels cannot be learned from some cells and tested on others."""


def label_probe(
    embedding: Any,
    labels: ArrayLike,
    *,
    kind: ProbeKind = "linear",
    train_fraction: float = 0.6,
    groups: ArrayLike | None = None,
    train: ArrayLike | None = None,
    max_cells: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Train a classifier to predict a label from an embedding, and score it on held-out cells.

    The protocol is that of Makino et al. (2025; appendix, batch prediction): a random 60 % of the cells are training
    cells, and the other cells are test cells.

    Parameters
    ----------
    embedding
        ``(N, D)``, an array, a DataFrame, or a memory-map, which is read in blocks.
    labels
        Label of each cell, ``(N,)``. Labels with a single cell are excluded.
    kind
        Type of the classifier:

        - ``"linear"``: multinomial logistic regression on standardised components
        - ``"quadratic"``: multinomial logistic regression on the 64 whitened principal components with the largest
          variance, their squares, and the products of the first 16. This classifier also distinguishes environments
          that differ in variance.
        - ``"neighbours"``: votes of the 15 nearest training cells by cosine
        - ``"nearest_mean"``: the label with the nearest mean, by Euclidean distance in the unscaled embedding
    train_fraction
        Fraction of cells that are used for training; with ``groups``, fraction of the groups of each label.
    groups
        Group of each cell, ``(N,)``. All cells of a group are training cells, or all are test cells. Each label has
        some training groups and some test groups. Labels with cells in one group only are excluded, and the number of
        these labels is logged.
    train
        Mask ``(N,)`` or row numbers of the training cells, in place of a random split. All other cells are test cells.
    max_cells
        Maximum number of cells; a random subset is used if there are more. `None` uses all cells.
    seed
        Seed of the subset, the split and the permutation of labels.

    Returns
    -------
    Dictionary of these scores of the test cells:

    - ``f1``: macro F1, the unweighted mean of the F1 scores of all labels that occur among the true or predicted labels
    - ``auroc``: area under the ROC curve of one label against the rest, averaged over labels. A random part of the test
      cells is used if there are many labels.
    - ``accuracy``: fraction of cells with the correct label
    - ``chance_f1``: macro F1 of the same classifier after training on permuted labels. With few cells, it is the mean
      over up to five permutations.

    Raises
    ------
    TypeError
        If the embedding is a DataFrame with a column that is not numeric.
    ValueError
        If the embedding is sparse, not finite, or has not one row per label; if fewer than two labels have two cells or
        two groups; or if a split leaves fewer than two labels for training, or no test cell.

    Warns
    -----
    UserWarning
        If a logistic regression has not converged.

    Examples
    --------
    >>> embedding = np.repeat(np.eye(3), 50, axis=0)  # distinguishes three labels
    >>> scbd.metrics.label_probe(embedding, np.repeat(["a", "b", "c"], 50))["accuracy"]
    1.0
    """
    return run_probe(embedding, labels, kind, train_fraction, groups, train, max_cells, seed).scores


def batch_probe(
    adata: AnnData,
    embedding_key: str,
    e_key: str | Sequence[str],
    *,
    kind: ProbeKind = "linear",
    group_key: str | None = None,
    train_fraction: float = 0.6,
    max_cells: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Train a classifier to predict the environment from an embedding, and score it; a low score is good for z_c.

    Parameters
    ----------
    adata
        Embedded cells.
    embedding_key
        Key of ``obsm``, a layer, or ``"X"``.
    e_key
        Column of ``obs`` with the environment, or several columns for their cross.
    group_key
        Column of ``obs`` with groups of cells that are not split between training and test, for example the guide: see
        ``groups`` of :func:`label_probe`.
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
    x, labels = get_embedding(adata, embedding_key), get_label_texts(adata, e_key)
    groups = None if group_key is None else get_label_texts(adata, group_key)
    return label_probe(
        x, labels, kind=kind, train_fraction=train_fraction, groups=groups, max_cells=max_cells, seed=seed
    )


def predict_labels(
    train_embedding: np.ndarray, train_labels: ArrayLike, embedding: np.ndarray, *, classifier: Classifier = "linear"
) -> np.ndarray:
    """Train a classifier on one embedding, and predict the labels of another embedding.

    Parameters
    ----------
    train_embedding, embedding
        Embedding of the training cells, ``(N, D)``, and embedding of the cells whose labels are predicted, ``(M, D)``.
    train_labels
        Labels of the training cells, ``(N,)``.
    classifier
        ``"linear"`` or ``"nearest_mean"``, see ``kind`` of :func:`label_probe`.

    Returns
    -------
    Predicted labels, ``(M,)``.

    Raises
    ------
    TypeError
        If an embedding is a DataFrame with a column that is not numeric.
    ValueError
        If an embedding is sparse or not finite, if both embeddings differ in their numbers of components, if there is
        not one label per training cell, or if all training cells have the same label.

    Examples
    --------
    >>> known = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> scbd.metrics.predict_labels(known, ["a", "b"], np.array([[0.1, 0.9]]), classifier="nearest_mean").tolist()
    ['a']
    """
    train = np.asarray(_check_embedding(train_embedding, "train_embedding"), dtype=np.float64)
    codes, names = _encode_values(train_labels, "label", len(train), "embeddings")
    if len(names) < 2:
        msg = "A probe needs at least two different labels to tell apart."
        raise ValueError(msg)
    check_choice("classifier", classifier, ("linear", "nearest_mean"))
    new = np.asarray(_check_embedding(embedding, "embedding"))
    if new.shape[1] != train.shape[1]:
        msg = f"What is learned from has {train.shape[1]} components, and what is predicted from has {new.shape[1]}."
        raise ValueError(msg)
    reader = READERS[classifier](train, codes, np.arange(len(train)))
    return np.asarray(names)[_predict_codes(reader, new, np.arange(len(new)), len(names))]


class ProbeResult(NamedTuple):
    """Scores of a probe, which is a classifier trained on an embedding, and its predictions for ``T`` test cells."""

    scores: dict[str, float]
    """Scores of the probe by name, as :func:`label_probe` returns them."""
    truth: np.ndarray
    """Integer code of each test cell's true label, ``(T,)``."""
    predicted: np.ndarray
    """Integer code of each test cell's predicted label, ``(T,)``."""
    units: np.ndarray
    """Integer code of the unit of each test cell that the bootstrap resamples, ``(T,)``.

    The unit is the cell's group if groups were held out as a whole, otherwise the cell.
    """

    def bootstrap_scores(self, n: int, seed: int) -> dict[str, np.ndarray]:
        """Return ``n`` bootstrap samples of macro F1 (``"f1"``) and of the accuracy, each ``(n,)``.

        Each sample draws units (groups of test cells, or single test cells) with replacement, as many as there are
        units. Calls with equal seeds draw the same units.
        """
        names, units = np.unique(self.units, return_inverse=True)
        found: dict[str, list[float]] = {"f1": [], "accuracy": []}
        hit = self.truth == self.predicted
        for counts in draw_units(len(names), n, seed):
            weight = counts[units]
            found["f1"].append(macro_f1(self.truth, self.predicted, weight))
            found["accuracy"].append(float(weight[hit].sum() / weight.sum()))
        return {name: np.array(values) for name, values in found.items()}


def run_probe(
    embedding: Any,
    labels: ArrayLike,
    kind: ProbeKind,
    train_fraction: float = 0.6,
    groups: ArrayLike | None = None,
    train: ArrayLike | None = None,
    max_cells: int | None = None,
    seed: int = 0,
) -> ProbeResult:
    """Train a classifier on an embedding, and test it on held-out cells; for the arguments see :func:`label_probe`."""
    check_choice("kind", kind, ProbeKind)
    embedding = _check_embedding(embedding, "embedding")
    codes, _ = _encode_values(labels, "label", len(embedding), "embeddings")
    rng = np.random.default_rng(seed)
    rows = random_rows(len(codes), max_cells, rng)
    rows = rows[np.bincount(codes[rows])[codes[rows]] > 1]
    if len(np.unique(codes[rows])) < 2:
        msg = "A probe needs at least two labels with two cells each, one to learn from and one to be tested on."
        raise ProbeImpossible(msg)
    of_group = None if groups is None else _encode_values(groups, "group", len(codes), "labels")[0]
    if train is None:
        learned, test = _split(rows, codes, of_group, train_fraction, rng)
    else:
        is_train = row_mask("train", train, len(codes))[rows]
        learned, test = rows[is_train], rows[~is_train]
    # Test cells are kept even if no training cell has their label. Such test cells cannot be predicted correctly, and
    # count as errors.
    known = np.unique(codes[learned])
    if len(known) < 2 or not len(test):
        msg = "The split leaves fewer than two labels to learn from: use smaller groups, or more cells."
        raise ProbeImpossible(msg)
    of_known = np.full(codes.max() + 1, -1)
    of_known[known] = np.arange(len(known))
    fit = READERS[kind]
    model = fit(embedding, of_known[codes], learned)
    predicted = known[_predict_codes(model, embedding, test, len(known))]
    chance = []
    for _ in range(int(np.clip(_PERMUTED_FIT_SIZE // (len(learned) * len(known)), 1, 5))):
        permuted = of_known[codes]
        permuted[learned] = rng.permutation(permuted[learned])
        permuted_model = fit(embedding, permuted, learned)
        named = known[_predict_codes(permuted_model, embedding, test, len(known))]
        chance.append(macro_f1(codes[test], named))
    scores = {
        "f1": macro_f1(codes[test], predicted),
        "auroc": _mean_auroc(model, embedding, of_known[codes], rng.permutation(test), len(known)),
        "accuracy": float(np.mean(codes[test] == predicted)),
        "chance_f1": float(np.mean(chance)),
    }
    return ProbeResult(scores, codes[test], predicted, test if of_group is None else of_group[test])


def macro_f1(truth: np.ndarray, predicted: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Compute macro F1: the mean F1 score of the labels that occur in ``truth`` or ``predicted``, as in scikit-learn.

    ``weight`` is the weight of each cell; `None` weights all cells equally.
    """
    size, hit = int(max(truth.max(), predicted.max())) + 1, truth == predicted
    hits = np.bincount(truth[hit], None if weight is None else weight[hit], minlength=size)
    total = np.bincount(truth, weight, minlength=size) + np.bincount(predicted, weight, minlength=size)
    return float(np.mean(2 * hits[total > 0] / total[total > 0]))


def _check_embedding(embedding: Any, name: str) -> Any:
    """Return an embedding in a form whose rows can be read by slicing, if it is a finite dense matrix.

    ``name`` is the name of the argument in error messages.
    """
    embedding = check_dense(embedding, name)
    shape = np.shape(embedding)
    if len(shape) != 2:
        msg = f"The embedding has the shape {shape}: give one row per cell and one column per component."
        raise ValueError(msg)
    check_finite_rows(embedding)
    return embedding


def _encode_values(values: ArrayLike, what: str, n: int, beside: str) -> tuple[np.ndarray, Any]:
    """Return the label or group of each of ``n`` cells as an integer code, and the distinct labels or groups.

    ``what`` is the word for the values, and ``beside`` the word for the cells, in error messages.
    """
    check_unmasked(f"An array of {what}s", values)
    # A list is converted to a pandas series first. Numpy would convert a list of texts and NaN to texts only, and the
    # text "nan" would not be recognised as missing.
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
    """Divide cells at random into training cells and test cells, and return the row numbers of both in ascending order.

    With ``groups``, whole groups are divided, see :func:`split_groups`.
    """
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
        logger.warning("The probe excludes %d of %d labels, whose cells are in one group only.", n - n_scored, n)
    return rows[is_train], rows[is_test]


def _iterate_blocks(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _predict_codes(model: Reader, x: Any, rows: np.ndarray, n_labels: int) -> np.ndarray:
    size = max(1, _MAX_SCORES_IN_MEMORY // n_labels)
    return np.concatenate([model.logits(x[part]).argmax(axis=1) for part in _iterate_blocks(rows, size)])


def _mean_auroc(model: Reader, x: Any, codes: np.ndarray, rows: np.ndarray, n_labels: int) -> float:
    """Compute the AUROC of each label against all other labels, and return the mean over labels.

    Labels are excluded if all cells or no cells have them. The result is NaN if this excludes all labels.
    """
    from scipy.special import softmax
    from scipy.stats import rankdata

    rows = np.sort(rows[: max(1, _MAX_SCORES_IN_MEMORY // n_labels)])
    of_label, truth = softmax(model.logits(x[rows]), axis=1).T, codes[rows]
    areas = []
    for scores, own in zip(of_label, truth == np.arange(n_labels)[:, None], strict=True):
        if 0 < (n := int(own.sum())) < len(own):
            areas.append((rankdata(scores)[own].sum() - n * (n + 1) / 2) / (n * (len(own) - n)))
    return float(np.mean(areas)) if areas else np.nan


def split_groups(
    codes: np.ndarray, groups: np.ndarray, train_fraction: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Divide groups of cells at random into training and test groups, so that each label has groups in both parts.

    Return the masks ``(N,)`` of the training cells and of the test cells.

    Labels are processed one by one, starting with the label that has the fewest groups. Those groups of the label that
    are not yet assigned are assigned at random: to training until ``train_fraction`` is reached, and then to test.
    Cells of a label are in neither mask if all groups of the label are in training or all are in test.

    Parameters
    ----------
    codes, groups
        Label and group of each cell, integers ``(N,)``. A group may hold several labels.
    train_fraction
        Fraction of each label's groups that are used for training; at least one group is used for training, and at
        least one for testing.
    rng
        Random generator that draws the groups.
    """
    of_label = pd.DataFrame({"label": codes, "group": groups}).drop_duplicates().groupby("label")["group"]
    # part of each group: -1 for groups that are not yet assigned, 0 for test groups, 1 for training groups
    learns = np.full(groups.max() + 1, -1)
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


def resolve_probe_groups(
    adata: AnnData,
    y_key: str,
    e_key: str | Sequence[str] | None,
    guide_key: str | None,
    group_key: str | Sequence[str] | None,
) -> np.ndarray | None:
    """Return the groups of cells that the probe of the perturbation keeps together, or `None` to split single cells.

    All cells of a group are training cells, or all are test cells. The groups ``(N,)`` follow from ``group_key`` as
    described in :func:`scbd.metrics.benchmark`.

    Warns
    -----
    UserWarning
        If perturbations and environments are nested, so that an embedding of the environment alone predicts the
        perturbation in any split.
    """
    if group_key != "auto":
        return None if group_key is None else get_label_texts(adata, group_key)
    e, guide = (None if key is None else get_label_texts(adata, key) for key in (e_key, guide_key))
    groups, wrong = choose_probe_groups(get_label_texts(adata, y_key), e, guide)
    if wrong is not None:
        msg = (
            f"Between y_key={y_key!r} and e_key={e_key!r}, {wrong}: an embedding that holds the environment alone "
            "also predicts the perturbation. y_probe_f1 and similar scores do not measure biology alone here."
        )
        warn_user(msg)
    return groups


def choose_probe_groups(
    y: np.ndarray, e: np.ndarray | None, guide: np.ndarray | None
) -> tuple[np.ndarray | None, str | None]:
    """Choose the groups of cells that a probe of the perturbation should keep together.

    All cells of a group are training cells, or all are test cells. Without groups, a probe may recognise the
    environment or the guide of a test cell, and infer the perturbation from it. The choice is:

    1. Environments, if most cells lie in an environment that holds a single perturbation (wells of an arrayed screen).
       Environments that share a guide are merged, provided that most cells have a guide of a single perturbation. If
       the merged groups cannot be divided between training and test, the environments themselves are used.
    2. Otherwise guides, if most cells have a guide of a single perturbation.
    3. Otherwise no groups.

    Groups can be divided between training and test if at least two perturbations have several groups. Groups that
    cannot be divided are not used.

    Parameters
    ----------
    y, e, guide
        Perturbation, environment and guide of each cell, ``(N,)``.

    Returns
    -------
    Groups ``(N,)``, or `None` for single cells; and a part of a sentence that describes a problem of the experimental
    design, or `None` if there is no problem.
    """
    guide = guide if guide is not None and _is_mostly_nested(guide, y) else None
    if e is None or len(np.unique(e)) < 2:
        return _first_divisible_grouping(y, guide), None
    if not _is_mostly_nested(e, y):
        wrong = "most perturbations lie in one environment only" if _is_mostly_nested(y, e) else None
        return _first_divisible_grouping(y, guide), wrong
    groups = _first_divisible_grouping(y, None if guide is None else _merge_groupings(e, guide), e)
    wrong = "most environments hold one perturbation, and fewer than two perturbations have two environments"
    return groups, wrong if groups is None else None


def _first_divisible_grouping(label: np.ndarray, *candidates: np.ndarray | None) -> np.ndarray | None:
    """Return the first of several candidate groupings that can be divided between training and test, or `None`.

    A grouping can be divided if at least two labels have cells in several groups.
    """
    for group in candidates:
        if group is not None:
            pairs = pd.DataFrame({"label": label, "group": group}).drop_duplicates()
            if (pairs.groupby("label").size() > 1).sum() > 1:
                return group
    return None


def _is_mostly_nested(group: np.ndarray, label: np.ndarray) -> bool:
    """Return whether more than half of the cells lie in groups that hold a single label."""
    pairs = pd.DataFrame({"group": group, "label": label}).value_counts()
    sizes, n_labels = pairs.groupby(level="group").sum(), pairs.groupby(level="group").size()
    return bool(sizes[n_labels == 1].sum() > 0.5 * len(group))


def _merge_groupings(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Merge two groupings of the same cells, and return the merged group of each cell as an integer, ``(N,)``.

    Cells that share a group in either grouping are in the same merged group. Merged groups are the connected components
    of the graph in which a cell links its groups of both groupings.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    (first, a), (second, b) = (np.unique(groups, return_inverse=True) for groups in (one, other))
    size = len(first) + len(second)
    links = coo_array((np.ones(len(a)), (a, len(first) + b)), shape=(size, size))
    return connected_components(links, directed=False)[1][a]


class Reader(Protocol):
    """Interface of a fitted classifier, which predicts labels from embeddings."""

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Return the logits ``(N, K)`` of the labels for embeddings ``(N, D)``; their softmax gives probabilities."""


class _Quadratic:
    """Logistic regression on whitened principal components of an embedding, their squares and their products."""

    def __init__(self, x: Any, codes: np.ndarray, rows: np.ndarray) -> None:
        mean, sd, variance, axes = principal_axes(x, rows)
        length = np.sqrt(_not_zero(variance))
        self._mean, self._matrix = mean, (axes / length / sd[:, None])[:, :_QUADRATIC_N_COMPONENTS]
        size = min(self._matrix.shape[1], _QUADRATIC_N_MULTIPLIED)
        self._pairs = np.triu_indices(size, k=1)
        self._model = fit_logistic(self._expand(x[rows]), codes[rows])

    def logits(self, x: np.ndarray) -> np.ndarray:
        return self._model.logits(self._expand(x))

    def _expand(self, x: np.ndarray) -> np.ndarray:
        v = ((np.asarray(x, dtype=np.float64) - self._mean) @ self._matrix).astype(np.float32)
        v = v.clip(-_QUADRATIC_MAX_DEVIATIONS, _QUADRATIC_MAX_DEVIATIONS)
        one, two = self._pairs
        return np.concatenate([v, np.square(v), v[:, one] * v[:, two]], axis=1)


class _Neighbours:
    """Classifier in which the nearest training cells, by cosine, vote on the label of a cell.

    The number of votes is fixed. If several training cells have equal cosines and compete for the last votes, these
    votes are divided equally between them.
    """

    def __init__(self, x: Any, codes: np.ndarray, rows: np.ndarray) -> None:
        self._unit = scale_to_unit_length(np.asarray(x[rows]))
        self._codes, self._n_labels = codes[rows], int(codes[rows].max()) + 1
        self._n = min(_N_NEIGHBOURS, len(rows))

    def logits(self, x: np.ndarray) -> np.ndarray:
        size = max(1, _MAX_VALUES_IN_MEMORY // len(self._unit))
        votes = np.concatenate([self._votes(x[start : start + size]) for start in range(0, len(x), size)])
        # A small constant is added to the votes of each label, because the logarithm of 0 votes is not defined.
        return np.log(votes / self._n + 1e-6)

    def _votes(self, x: np.ndarray) -> np.ndarray:
        cosine = round_cosines(scale_to_unit_length(np.asarray(x)) @ self._unit.T)
        last = np.partition(cosine, -self._n, axis=1)[:, -self._n, None]
        row, cell = np.nonzero(cosine >= last)
        near = cosine[row, cell]
        nearer = near > last[row, 0]
        n_nearer = np.bincount(row, weights=nearer, minlength=len(x))
        n_last = np.bincount(row, minlength=len(x)) - n_nearer
        share = np.where(nearer, 1, ((self._n - n_nearer) / n_last)[row])
        label = row * self._n_labels + self._codes[cell]
        votes = np.bincount(label, weights=share * (1 + _COSINE_TIE_BREAKER * near), minlength=len(x) * self._n_labels)
        return votes.reshape(len(x), self._n_labels)


class _NearestMean:
    """Classifier that predicts the label with the nearest mean, by Euclidean distance in the unscaled embedding.

    Squared distances are divided by the variance within labels. This division changes no prediction, but keeps the
    predicted probabilities informative. Without it, all probabilities would be near 0 or 1 for an embedding in large
    units, and nearly equal for an embedding in small units.
    """

    def __init__(self, x: Any, codes: np.ndarray, rows: np.ndarray) -> None:
        learned = np.asarray(x[rows])
        of_row, means, counts = label_means(learned, codes[rows])
        squares = 0.0
        for part in _iterate_blocks(np.arange(len(rows)), max(1, _MAX_VALUES_IN_MEMORY // learned.shape[1])):
            squares += float(np.square(learned[part] - means[of_row[part]]).sum())
        within = squares / max(1, len(rows) - len(counts)) / learned.shape[1]
        between = float(np.square(means - means.mean(0)).mean())
        rounding = float(np.square(relative_rounding_error(learned.dtype) * means).mean())
        # If the variance within labels is 0 up to rounding, the variance of the label means takes its place, and if
        # this is 0 as well, 1.
        self._means = means
        self._variance = next((variance for variance in (within, between) if variance > rounding), 1.0)

    def logits(self, x: np.ndarray) -> np.ndarray:
        # Minus half the squared distance between a cell and the mean of a label. The squared length of the cell is
        # omitted, because it is equal for all labels.
        return (np.asarray(x) @ self._means.T - np.square(self._means).sum(1) / 2) / self._variance


class Logistic(NamedTuple):
    """Fitted multinomial logistic regression, which predicts label codes ``0 … K - 1`` from ``D`` features."""

    weight: np.ndarray
    """Weights of the features in their original units, not standardised, ``(K, D)``."""
    bias: np.ndarray
    """Logits of the labels for a cell at the mean of the training cells, ``(K,)``."""
    mean: np.ndarray
    """Mean of each feature over the training cells, ``(D,)``."""

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Return the logits of ``K`` labels for the features ``(N, D)`` of ``N`` cells, float64 ``(N, K)``."""
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
    """Fit a multinomial logistic regression that predicts integer codes of labels from features.

    Parameters
    ----------
    x
        Features ``(N, D)``, an array or a memory-map, which is read in blocks.
    codes
        Label code of each row of ``x``, an integer from 0 to ``K - 1``.
    rows
        Row numbers of the training cells; all rows by default.
    c
        Inverse strength of the L2 penalty, as in scikit-learn.
    max_iter
        Maximum number of L-BFGS iterations.
    tolerance
        Iterations stop when no component of the gradient exceeds this value. The gradient is taken in scaled
        coordinates, in which the curvature is near 1. The objective then exceeds its minimum by about half the squared
        norm of the gradient.

    Warns
    -----
    UserWarning
        If the maximum number of iterations is reached.
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
    # If there are few cells, the cells are rotated to the principal axes once. Otherwise, the weights are rotated in
    # each iteration.
    if n * min(n, x.shape[1]) <= _MAX_VALUES_IN_MEMORY:
        learned, basis = ((x[rows] - mean) @ turned, codes[rows], np.arange(n), np.zeros(1)), None

    def centred(values: np.ndarray) -> np.ndarray:
        # The mean over labels is arbitrary and is set to 0. Adding the same value to the logits of all labels changes
        # no probability.
        return values - values.mean(axis=0)

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
    options: Any = {"maxiter": max_iter, "gtol": tolerance, "ftol": 0.0}
    result: Any = minimize(value, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    if result.status == _LBFGS_ITERATION_LIMIT:
        msg = f"Logistic regression of {n:,} cells and {k:,} labels has not converged in {result.nit} steps."
        warn_user(msg)
    weight = centred(result.x.reshape(unit.shape) * unit)
    return Logistic(weight[:, :-1] @ turned.T, weight[:, -1], mean)


def _cross_entropy(
    x: Any, codes: np.ndarray, rows: np.ndarray, mean: np.ndarray, weight: np.ndarray, bias: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Compute the cross entropy of a logistic regression, summed over cells, and its gradients.

    The gradients are those with respect to the weight, ``(K, D)``, and the bias, ``(K,)``.
    """
    total, by_weight, by_bias = 0.0, np.zeros_like(weight), np.zeros_like(bias)
    for block in _iterate_blocks(rows, max(_MIN_CELLS_PER_BLOCK, _LOGITS_PER_BLOCK // len(bias))):
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
    """Principal axes of standardised features, in descending order of variance.

    Axes along which the variance is 0 are dropped, but at least one axis is kept.
    """

    mean: np.ndarray
    """Mean of each feature, ``(D,)``."""
    sd: np.ndarray
    """Standard deviation of each feature, ``(D,)``; 1 for constant features."""
    variance: np.ndarray
    """Variance of the standardised features along each axis, ``(R,)``.

    ``R`` is at most the number of rows, and at most ``D``.
    """
    axes: np.ndarray
    """Directions of the axes as orthonormal columns, ``(D, R)``."""


def principal_axes(x: Any, rows: np.ndarray) -> PrincipalAxes:
    """Compute the principal axes of selected rows of ``x``, an array or a memory-map ``(N, D)``.

    ``rows`` are the row numbers. They are read in blocks, and computations use float64.
    """
    n, d = len(rows), x.shape[1]
    # The first row is subtracted from all rows, so that all values are near 0. Squares of values with a large mean
    # would lose digits.
    origin = np.asarray(x[rows[0]], dtype=np.float64)
    blocks = list(_iterate_blocks(rows, max(_MAX_VALUES_IN_MEMORY // d, d)))
    shift = sum((x[block] - origin).sum(axis=0) for block in blocks) / n
    if n < d:
        # With fewer rows than features, the matrix of products between rows is used. It is smaller than the covariance
        # matrix of the features, and has the same nonzero eigenvalues (variances).
        centred = x[rows] - origin - shift
        sd = _not_zero(np.sqrt(np.square(centred).mean(axis=0)))
        centred /= sd
        variance, of_rows = _descending_eigenpairs(centred @ centred.T / n)
        axes = centred.T @ of_rows / np.sqrt(n * _not_zero(variance))
    else:
        squares = sum((part := x[block] - origin).T @ part for block in blocks)
        covariance = squares / n - np.outer(shift, shift)
        sd = _not_zero(np.sqrt(np.clip(np.diag(covariance), 0, None)))
        variance, axes = _descending_eigenpairs(covariance / np.outer(sd, sd))
    return PrincipalAxes(shift + origin, sd, variance, axes)


def _descending_eigenpairs(square: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, vectors = np.linalg.eigh(square)
    keep = values > _MIN_RELATIVE_VARIANCE * values[-1]
    keep[-1] = True
    return np.clip(values[keep], 0, None)[::-1], vectors[:, keep][:, ::-1]


def _not_zero(values: np.ndarray) -> np.ndarray:
    return np.where(values > 0, values, 1.0)


READERS: dict[ProbeKind, Callable[[Any, np.ndarray, np.ndarray], Reader]] = {
    "linear": fit_logistic,
    "quadratic": _Quadratic,
    "neighbours": _Neighbours,
    "nearest_mean": _NearestMean,
}
