"""Whether wells find replicates of their perturbation, and perturbations others of their mechanism or target.

References
----------
Kalinin et al. (2025), A versatile information retrieval framework for evaluating profile strength and similarity.
"""

from __future__ import annotations

import warnings
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from scipy import sparse
from scipy.stats import false_discovery_control

from scbd._anndata import control_names
from scbd._checks import check_choice, check_count
from scbd._linear_maps import label_means
from scbd.metrics._average_precision import Null, Scores, chance, score_queries, unit_rows
from scbd.metrics._resampling import blocks_of
from scbd.metrics._table import (
    check_keys,
    chosen_rows,
    label_names,
    learned_rows,
    representation,
    warn_of_folds,
    warn_of_learned,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

# q values below are called, as everywhere in the field
_CALLED = 0.05
# with fewer wells of other perturbations in the environments of a perturbation, those of all environments are negatives
MIN_OTHERS = 20
# queries whose negatives are counted, to decide which negatives a ranking has
_MAX_COUNTED = 200

Against = Literal["controls", "perturbations"]


@dataclass(frozen=True, repr=False)
class Retrieval:
    """How well perturbations with a common label, or replicates, find each other.

    What :func:`retrieval` and :func:`replicate_retrieval` return.

    Parameters
    ----------
    table
        One row a perturbation: ``average_precision``, its ``chance`` in a random order, ``p_value`` and ``q_value``
        (Benjamini and Hochberg), ``n_queries``, and ``n_positives`` and ``n_negatives`` of a query on average.
    left_out
        Perturbations that were asked for and have nothing to find.
    units
        Code ``(P,)`` of what each row of the table is drawn with for an interval, such as its mechanism; `None`: each
        row is drawn by itself.
    floor_table
        Of replicates, one row a position of controls, scored as if it were a perturbation; empty without positions.
    cross_position_table
        Of replicates, one row a perturbation that has some at another position and environment; empty where none has.

    Examples
    --------
    >>> table = pd.DataFrame({"average_precision": [0.9, 0.3], "chance": 0.1, "q_value": [0.01, 0.4]}, index=["a", "b"])
    >>> scbd.metrics.Retrieval(table)
    Retrieval of 2 perturbations: average precision 0.600 (chance 0.100), 1 called at q < 0.05
    >>> controls = table.assign(average_precision=[0.1, 0.3], q_value=1.0)
    >>> found = scbd.metrics.Retrieval(table, floor_table=controls)
    >>> round(found.floor, 3), round(found.floor_corrected, 3)
    (0.2, 0.5)
    """

    table: pd.DataFrame
    left_out: tuple[str, ...] = ()
    units: np.ndarray | None = field(default=None, kw_only=True)
    floor_table: pd.DataFrame = field(default_factory=pd.DataFrame, kw_only=True)
    cross_position_table: pd.DataFrame = field(default_factory=pd.DataFrame, kw_only=True)

    @property
    def mean_average_precision(self) -> float:
        """Mean over perturbations."""
        return _mean(self.table, "average_precision")

    @property
    def chance(self) -> float:
        """Mean average precision of random orders, which is what an uninformative or collapsed embedding scores."""
        return _mean(self.table, "chance")

    @property
    def n_called(self) -> int:
        """Perturbations with a q value below 0.05."""
        return _n_called(self.table)

    @property
    def floor(self) -> float:
        """Mean average precision of positions of controls, as of what has no effect and was not trained on; or NaN."""
        return _mean(self.floor_table, "average_precision")

    @property
    def floor_corrected(self) -> float:
        """Mean average precision on a scale where the floor is 0, and 1 is 1.

        Of noise it is 0 only where perturbations and positions of controls have as many wells to find, among as many:
        :func:`benchmark` has what it is by chance.
        """
        return (self.mean_average_precision - self.floor) / (1 - self.floor) if self.floor < 1 else np.nan

    @property
    def cross_position(self) -> float:
        """Mean average precision of replicates at other positions, or NaN where no perturbation has several."""
        return _mean(self.cross_position_table, "average_precision")

    @property
    def cross_position_chance(self) -> float:
        """The same in random orders."""
        return _mean(self.cross_position_table, "chance")

    def scores(self) -> dict[str, float]:
        """The numbers by name, for a table of several embeddings."""
        scores = {name: getattr(self, name) for name in ("mean_average_precision", "chance", "n_called")}
        if len(self.floor_table):
            scores |= {"floor": self.floor, "floor_corrected": self.floor_corrected}
            scores |= {"n_floor_called": _n_called(self.floor_table)}
        if len(self.cross_position_table):
            scores |= {"cross_position": self.cross_position, "cross_position_chance": self.cross_position_chance}
        return scores

    def __repr__(self) -> str:
        """The numbers, for a person."""
        lines = [f"Retrieval of {_said(self.table, 'perturbations')}"]
        if len(self.floor_table):
            lines += [f"  floor of {_said(self.floor_table, 'positions of controls')}"]
            lines += [f"  floor-corrected: {self.floor_corrected:.3f}"]
        if len(self.cross_position_table):
            lines += [f"  across positions of {_said(self.cross_position_table, 'perturbations')}"]
        return "\n".join(lines)


def _mean(table: pd.DataFrame, column: str) -> float:
    return float(table[column].mean()) if len(table) else np.nan


def _n_called(table: pd.DataFrame) -> int:
    return int((table["q_value"] < _CALLED).sum()) if len(table) else 0


def _said(table: pd.DataFrame, what: str) -> str:
    value, expected = _mean(table, "average_precision"), _mean(table, "chance")
    return (
        f"{len(table):,} {what}: average precision {value:.3f} (chance {expected:.3f}), {_n_called(table):,} called at "
        f"q < {_CALLED}"
    )


def _by_label(scores: Scores, labels: np.ndarray, null: Null) -> pd.DataFrame:
    """The mean over the queries of each label ``(N,)`` of all rows, with its chance, p and q value."""
    if not len(scores.rows):
        return pd.DataFrame()
    sizes = np.stack([scores.n_positives, scores.n_negatives], axis=1)
    pairs, which = np.unique(sizes, axis=0, return_inverse=True)
    queries = pd.DataFrame(
        {
            "average_precision": scores.average_precision,
            "chance": np.array([chance(*map(int, pair)) for pair in pairs])[which],
            "n_positives": scores.n_positives,
            "n_negatives": scores.n_negatives,
        }
    )
    of_label = queries.groupby(labels[scores.rows], sort=True)
    table = of_label.mean()
    table.insert(2, "n_queries", of_label.size())
    rows_of = of_label.indices
    p = [null.p_value(score, *sizes[rows_of[label]].T) for label, score in table["average_precision"].items()]
    table.insert(2, "p_value", p)
    table.insert(3, "q_value", false_discovery_control(p))
    return table


def retrieval(
    adata: AnnData,
    rep: str | ArrayLike,
    *,
    label_key: str,
    y_key: str | Sequence[str] | None = None,
    control: object | Sequence[object] | None = None,
    queries: ArrayLike | None = None,
    separator: str = "|",
    n_permutations: int = 10_000,
    seed: int = 0,
) -> Retrieval:
    """Average precision with which a perturbation finds others of its mechanism or target.

    Rows of a perturbation are averaged. Each perturbation then ranks all others by cosine: those that share one of its
    labels should come first. Perturbations without a label take no part; those whose labels nobody shares are found by
    others, wrongly, and are not scored themselves.

    Parameters
    ----------
    adata
        Wells, cells, or profiles.
    rep
        Key of ``obsm``, a layer, ``"X"``, or an array ``(N, D)``.
    label_key
        Column of ``obs`` with the label of the perturbation, or several labels with ``separator`` between them; empty
        where it is not known. Where rows of a perturbation differ in it, it has all their labels.
    y_key
        Column of ``obs`` with the perturbation, or several for their cross; each row is one by default.
    control
        Value or values of ``y_key`` that are no perturbation, and take no part; `None`: all are.
    queries
        Mask ``(N,)`` or row numbers: perturbations with such a row are scored, against all others. All by default.
    separator
        Between several labels.
    n_permutations
        Random orders for p values, of which none is below ``1 / (n_permutations + 1)``.
    seed
        Seed of these orders.

    Returns
    -------
    :class:`Retrieval`: a table with a row a perturbation, and its mean. Orders of equal cosines are averaged over.
    Perturbations that a label links are one of its ``units``: they look for each other, and score together.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If values are not finite, or no two perturbations share a label.

    Warns
    -----
    UserWarning
        If rows of several models of :func:`scbd.cross_fit` are compared.

    Examples
    --------
    >>> adata.obs["complex"] = adata.obs["gene"].map(net.set_index("target")["source"])
    >>> found = scbd.metrics.retrieval(adata, "X_scbd_c", label_key="complex", y_key="gene", n_permutations=100)
    >>> found.table[["n_positives", "n_negatives"]].drop_duplicates().values.tolist()  # the other gene of two complexes
    [[1.0, 2.0]]
    """
    check_count("n_permutations", n_permutations)
    check_keys(adata, [], [label_key])
    warn_of_folds(adata)
    x = representation(adata, rep)
    asked = chosen_rows("queries", queries, len(x))
    control = () if control is None else control
    if y_key is None and not (isinstance(control, Sized) and not len(control)):
        msg = f"control={control!r} is a value of y_key: give y_key, too."
        raise ValueError(msg)
    if y_key is None:  # each row is one, be it that two have the same name
        no_control, perturbations = np.arange(len(x)), np.asarray(adata.obs_names.astype(str))
        codes = no_control
    else:
        names = label_names(adata, y_key)
        no_control = np.flatnonzero(~np.isin(names, control_names(control, names, y_key)))
        codes, perturbations = pd.factorize(names[no_control], sort=True)
    member = _labels_of(codes, adata.obs[label_key].iloc[no_control], len(perturbations), separator)
    labelled = np.flatnonzero(np.diff(member.indptr))
    unit = unit_rows(label_means(x[no_control], codes)[1])
    is_query = np.bincount(codes, weights=asked[no_control], minlength=len(perturbations)) > 0
    related = (member @ member.T).tocsr()
    scores = score_queries(
        unit,
        np.intersect1d(labelled, np.flatnonzero(is_query)),
        labelled,
        positives=lambda row: (found := related[[row]].indices)[found != row],
        negatives=lambda rows: related[rows][:, labelled].toarray() == 0,
    )
    if not len(scores.rows):
        msg = (
            f"No two perturbations share a label of obs[{label_key!r}], or none has another: {len(labelled)} of "
            f"{len(perturbations)} have one. Is {separator!r} the separator of labels?"
        )
        raise ValueError(msg)
    left_out = np.setdiff1d(np.flatnonzero(is_query), scores.rows)
    table = _by_label(scores, np.arange(len(perturbations)), Null(n_permutations, seed))
    table.index = pd.Index(perturbations[table.index], name="perturbation")
    related.setdiag(0)
    related.eliminate_zeros()
    return Retrieval(table, tuple(perturbations[left_out]), units=blocks_of(related)[scores.rows])


def _labels_of(codes: np.ndarray, labels: pd.Series, n: int, separator: str) -> sparse.csr_array:
    """Which perturbation has which labels, ``(n, L)`` of ones."""
    given = pd.DataFrame({"code": codes, "label": labels.to_numpy(dtype=object)}).dropna().drop_duplicates()
    given["label"] = [str(label).split(separator) for label in given["label"]]
    single = given.explode("label")
    single["label"] = single["label"].str.strip()
    single = single[single["label"] != ""].drop_duplicates()
    places, found = pd.factorize(single["label"])
    ones = np.ones(len(single), dtype=np.int32)
    return sparse.csr_array((ones, (single["code"].to_numpy(dtype=np.int64), places)), shape=(n, len(found)))


def replicate_retrieval(
    adata: AnnData,
    rep: str | ArrayLike,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    control: object | Sequence[object] | None,
    against: Against = "controls",
    position_key: str | Sequence[str] | None = None,
    queries: ArrayLike | None = None,
    trained_on: str | ArrayLike | None = None,
    n_permutations: int = 10_000,
    seed: int = 0,
) -> Retrieval:
    """Compute the average precision with which wells retrieve their replicates in other environments.

    Each well of a perturbation ranks wells by cosine: those of its perturbation in *other* environments should come
    before controls of *these* environments. Controls of environments that the perturbation is not in are left out:
    where several layouts are in batches of their own, what a batch adds would tell them apart. Means over its wells are
    a perturbation's score, and over perturbations the mean average precision.

    With ``against="perturbations"`` the wells of all other perturbations take the place of the controls. This is the
    measure that the verdict of :func:`scbd.run` rests on, where each row is the mean of the cells of one perturbation
    in one environment: does a profile resemble its own perturbation elsewhere more than it resembles other
    perturbations?

    Where all plates share a layout, a perturbation is a position, and wells find each other by it. The **floor** says
    how far: controls are scored as if each position were a perturbation, against controls at other positions. It is
    what a perturbation without effect gets, if the embedding was not trained on it: of trained ones an encoder knows
    the label by heart, and neither the floor nor q values show that. An embedding with a higher score *and* a higher
    floor has learned positions. **Across positions**, where some perturbations have several, position cannot help:
    wells of the same perturbation at another position and environment are looked for among the wells of all other
    perturbations, of all environments that it is in.

    Parameters
    ----------
    adata
        Wells (or cells). What is not in the table is not in the gallery: for replicates on unseen plates alone, give
        the wells of these plates.
    rep
        Key of ``obsm``, a layer, ``"X"``, or an array ``(N, D)``.
    y_key, e_key
        Columns of ``obs`` with the perturbation and with the environment, each one or several for their cross.
    control
        Value or values of ``y_key`` for wells that were not perturbed. `None`, with ``against="perturbations"`` only:
        there are none.
    against
        The negatives of a ranking. ``"controls"``: controls in those other environments that hold the perturbation.
        ``"perturbations"``: wells of all other perturbations in the environments that hold the perturbation, that of
        the query included, so that an embedding which keeps the environment ranks these first. Where these are fewer
        than 20 (median over queries; arrayed screens have one perturbation per well), those of all environments.
    position_key
        Column of ``obs`` with the position on a plate, or several (row and column). Needed for cross-position and, with
        ``against="controls"``, for the floor.
    queries
        Mask ``(N,)`` or row numbers of wells to score, for example those of perturbations that a model has not seen.
        Replicates and controls are still found among all rows. All wells of perturbations by default. The floor has
        controls of the same environments as queries.
    trained_on
        Rows that the embedding, or a transform of it, was trained or fitted on: a mask ``(N,)``, row numbers, or a
        column of ``obs`` that says ``True`` or ``"train"`` there. By default ``obs["scbd_split"]``, where
        ``scbd run`` wrote it.
    n_permutations
        Random orders for p values, of which none is below ``1 / (n_permutations + 1)``: with more than a twentieth as
        many perturbations, a single one cannot be called.
    seed
        Seed of these orders.

    Returns
    -------
    :class:`Retrieval`: tables with a row a perturbation, and their means. Orders of equal cosines are averaged over, so
    that an embedding that is a point has the score of chance. P values hold against random orders, not against the
    floor: see how many positions of controls are called.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If values are not finite, there is no control, or no perturbation has both a replicate in another environment
        and negatives to be ranked against.

    Warns
    -----
    UserWarning
        If perturbations that are scored were trained on, a transform was fitted on controls that serve as negatives
        (on some of them, or on nothing else), or rows of several models of :func:`scbd.cross_fit` are compared.

    Examples
    --------
    >>> keys = {"y_key": "gene", "e_key": "well", "control": "nontargeting"}
    >>> found = scbd.metrics.replicate_retrieval(adata, "X_scbd_c", **keys, n_permutations=100)
    >>> found.table.columns.to_list()[:4]
    ['average_precision', 'chance', 'p_value', 'q_value']
    >>> bool(found.mean_average_precision > found.chance)
    True
    """
    check_count("n_permutations", n_permutations)
    check_choice("against", against, Against)
    x = representation(adata, rep)
    y = label_names(adata, y_key)
    if control is None and against == "controls":
        msg = "control=None: name the controls that replicates are ranked against, or give against='perturbations'."
        raise ValueError(msg)
    is_control = np.isin(y, () if control is None else control_names(control, y, y_key))
    wells = _Wells(unit_rows(x), _Labels(y), _Labels(label_names(adata, e_key)), is_control)
    position = None if position_key is None else _Labels(label_names(adata, position_key))
    is_query = chosen_rows("queries", queries, len(x)) & ~is_control
    learned = learned_rows(adata, trained_on)
    if learned is not None and trained_on is not None and against == "controls":
        _warn_of_fitted(is_control, learned)
    null = Null(n_permutations, seed)
    rows = np.flatnonzero(is_query)
    if against == "controls":
        scores = _against_controls(wells, rows)
    else:
        scores = _against_perturbations(wells, rows, apart=[wells.e], widen=True)
    if not len(scores.rows):
        msg = (
            f"None of {is_query.sum()} wells has a replicate in another environment of {e_key!r} and {against} to be "
            f"ranked against: a replicate score needs perturbations in two environments or more, with {against} there."
        )
        raise ValueError(msg)
    table = _by_label(scores, y, null)
    warn_of_learned(y, learned, table.index)
    warn_of_folds(adata, e_key, *([] if position_key is None else [position_key]))
    floor = across = pd.DataFrame()
    if position is not None:
        if against == "controls":
            floor = _by_label(_floor(wells, position, scores.rows), position.of_rows, null)
        apart, widen = [wells.e, position], against == "perturbations"
        across = _by_label(_against_perturbations(wells, rows, apart, widen=widen), y, null)
    left_out = sorted(set(y[is_query]) - set(table.index))
    return Retrieval(table, tuple(left_out), floor_table=floor, cross_position_table=across)


class _Labels:
    """Labels of rows, as text and as numbers, which compare faster."""

    def __init__(self, of_rows: np.ndarray) -> None:
        self.of_rows = of_rows
        self.codes = pd.factorize(of_rows)[0]
        order = np.argsort(self.codes, kind="stable")
        self._rows = np.split(order, np.bincount(self.codes).cumsum()[:-1])

    def rows_like(self, row: int) -> np.ndarray:
        """Rows of the same label, itself included."""
        return self._rows[self.codes[row]]

    def differ(self, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Mask ``(len(rows), len(others))`` of pairs with different labels."""
        return self.codes[rows][:, None] != self.codes[others]


@dataclass(frozen=True)
class _Wells:
    unit: np.ndarray
    y: _Labels
    e: _Labels
    is_control: np.ndarray

    def elsewhere(self, row: int, alike: _Labels) -> np.ndarray:
        """Rows of the same label in other environments."""
        rows = alike.rows_like(row)
        return rows[self.e.codes[rows] != self.e.codes[row]]

    def beside(self, alike: _Labels, among: np.ndarray, gallery: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """From rows ``(B,)`` to a mask ``(B, G)`` of the gallery in environments that have their label, ``among`` some.

        What an environment adds is in both, so that it tells none of the gallery from replicates.
        """
        holds = np.zeros((alike.codes.max() + 1, self.e.codes.max() + 1), dtype=bool)
        holds[alike.codes[among], self.e.codes[among]] = True
        return lambda rows: holds[alike.codes[rows]][:, self.e.codes[gallery]]


def _against_controls(wells: _Wells, queries: np.ndarray) -> Scores:
    """The same perturbation in other environments, among controls there."""
    controls = np.flatnonzero(wells.is_control)
    beside = wells.beside(wells.y, np.arange(len(wells.unit)), controls)
    return score_queries(
        wells.unit,
        queries,
        controls,
        positives=lambda row: wells.elsewhere(row, wells.y),
        negatives=lambda rows: wells.e.differ(rows, controls) & beside(rows),
    )


def _floor(wells: _Wells, position: _Labels, scored: np.ndarray) -> Scores:
    """Controls at the same position in other environments, among controls at other positions there."""
    controls = np.flatnonzero(wells.is_control)
    queries = controls[np.isin(wells.e.codes[controls], wells.e.codes[scored])]
    beside = wells.beside(position, controls, controls)

    def positives(row: int) -> np.ndarray:
        rows = wells.elsewhere(row, position)
        return rows[wells.is_control[rows]]

    def negatives(rows: np.ndarray) -> np.ndarray:
        return wells.e.differ(rows, controls) & position.differ(rows, controls) & beside(rows)

    return score_queries(wells.unit, queries, controls, positives, negatives)


def profile_retrieval(
    x: np.ndarray, y: np.ndarray, *, apart: Sequence[np.ndarray], within: np.ndarray, is_control: np.ndarray
) -> pd.DataFrame:
    """Compute how well profiles retrieve others of their label among all other perturbations.

    Parameters
    ----------
    x
        Profiles ``(N, D)``, compared by cosine.
    y
        Label that replicates share, ``(N,)``.
    apart
        Labels ``(N,)`` in each of which replicates have to differ from the query, such as the environment.
    within
        Label ``(N,)``: negatives come from the groups that hold the query's label, see :func:`replicate_retrieval`.
    is_control
        Rows that take no part, boolean ``(N,)``.

    Returns
    -------
    One row per label that has replicates: ``average_precision``, ``chance``, ``n_queries``, ``n_positives`` and
    ``n_negatives``.
    """
    wells = _Wells(unit_rows(x), _Labels(y), _Labels(within), is_control)
    queries, differ = np.flatnonzero(~is_control), [_Labels(labels) for labels in apart]
    scores = _against_perturbations(wells, queries, differ, widen=True)
    table = _by_label(scores, y, Null(1, 0))
    return table.drop(columns=["p_value", "q_value"], errors="ignore")


def _against_perturbations(wells: _Wells, queries: np.ndarray, apart: Sequence[_Labels], *, widen: bool) -> Scores:
    """Rank the same perturbation against all others; replicates differ from the query in each label of ``apart``.

    Negatives lie in the environments of the perturbation, or with ``widen``, where these hold few, in all.
    """
    perturbed = np.flatnonzero(~wells.is_control)
    in_same_environments = wells.beside(wells.y, perturbed, perturbed)

    def positives(row: int) -> np.ndarray:
        rows = wells.y.rows_like(row)
        for labels in apart:
            rows = rows[labels.codes[rows] != labels.codes[row]]
        return rows

    def others(rows: np.ndarray) -> np.ndarray:
        return wells.y.differ(rows, perturbed)

    def others_in_same_environments(rows: np.ndarray) -> np.ndarray:
        return others(rows) & in_same_environments(rows)

    sample = np.random.default_rng(0).permutation(queries)[:_MAX_COUNTED]
    is_few = widen and len(sample) and np.median(others_in_same_environments(sample).sum(axis=1)) < MIN_OTHERS
    negatives = others if is_few else others_in_same_environments
    return score_queries(wells.unit, queries, perturbed, positives, negatives)


def _warn_of_fitted(is_control: np.ndarray, fitted: np.ndarray) -> None:
    n, n_fitted = is_control.sum(), (is_control & fitted).sum()
    # all controls, and perturbations: an encoder, which has controls for one label of many
    if n_fitted and (n_fitted < n or not (fitted & ~is_control).any()):
        msg = (
            f"Negatives were used in the fit: {n_fitted} of {n} controls. A correction that was fitted on controls "
            "sets these apart, and scores against them rise: fit it on half of the positions of controls, and leave "
            "these wells out here."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)
