"""Retrieval scores of perturbations.

Perturbations should retrieve their replicates, and other perturbations with the same mechanism or target.

Retrieval ranks rows of an embedding by their cosine with a query. The score is the average precision of this ranking.

References
----------
Kalinin et al. (2025), A versatile information retrieval framework for evaluating profile strength and similarity.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from scipy import sparse
from scipy.stats import false_discovery_control

from scbd._shared.checks import check_choice, check_count
from scbd._shared.linear_maps import label_means
from scbd._shared.messages import warn_user
from scbd.metrics._arguments import (
    check_keys,
    control_rows,
    get_finite_embedding,
    get_label_texts,
    row_mask,
    training_mask_or_none,
    warn_if_models_are_mixed,
    warn_if_seen_in_training,
)
from scbd.metrics._average_precision import (
    NullDistribution,
    scale_to_unit_length,
    score_queries,
)
from scbd.metrics._resampling import divide_into_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

# q value below which a perturbation counts as significant ("called"). The value 0.05 is the usual threshold of the
# field.
_MAX_Q_VALUE = 0.05
# Minimum number of negatives per query (median over queries) for which negatives come only from the environments that
# hold the query's perturbation. With fewer negatives, they come from all environments.
MIN_NEGATIVES_IN_ENVIRONMENTS = 20
# Maximum number of queries whose negatives are counted to compute the median number of negatives per query. With more
# queries, a random subset is counted.
_MAX_QUERIES_COUNTED = 200

Against = Literal["controls", "perturbations"]


@dataclass(frozen=True, repr=False)
class Retrieval:
    """Scores of how well replicates, or perturbations with the same mechanism or target, retrieve each other.

    :func:`retrieval` and :func:`replicate_retrieval` return this class. A perturbation is *called* (counted as
    significant) if its q value is below 0.05.

    Parameters
    ----------
    table
        Frame with one row per perturbation: ``average_precision``, ``chance`` (average precision of a random order),
        ``p_value`` and ``q_value`` (Benjamini and Hochberg), ``n_queries`` (number of queries), ``n_positives`` and
        ``n_negatives`` (mean numbers per query).
    left_out
        Names of requested perturbations without a score, because they have no positives or no negatives.
    units
        Unit of each row of the table as an integer code, ``(P,)``, for example its mechanism. For confidence intervals,
        rows of the same unit are resampled together. `None` resamples single rows.
    floor_table
        Frame for replicate retrieval, with the columns of ``table`` and one row per plate position of controls. Each
        position is scored as if it were a perturbation. The frame is empty if no positions were given.
    cross_position_table
        Frame for replicate retrieval, with the columns of ``table`` and one row per perturbation that has replicates at
        another plate position and in another environment. The frame is empty if there is no such perturbation.

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
        """Average precision, averaged over perturbations."""
        return _mean(self.table, "average_precision")

    @property
    def chance(self) -> float:
        """Mean average precision of random rankings.

        It is the expected score of an uninformative or collapsed embedding.
        """
        return _mean(self.table, "chance")

    @property
    def n_called(self) -> int:
        """Number of significant perturbations, that is, with a q value below 0.05."""
        return _n_called(self.table)

    @property
    def floor(self) -> float:
        """Mean average precision of controls that retrieve controls at the same plate position; NaN without positions.

        It is the expected score of perturbations that have no effect and were not seen in training.
        """
        return _mean(self.floor_table, "average_precision")

    @property
    def floor_corrected(self) -> float:
        """Mean average precision on a scale on which the floor is 0 and a perfect score is 1.

        An embedding of noise has an expected value of 0 only if perturbations and plate positions of controls have
        equal numbers of positives and of negatives. :func:`benchmark` returns the expected value for noise as
        ``chance``.
        """
        return (self.mean_average_precision - self.floor) / (1 - self.floor) if self.floor < 1 else np.nan

    @property
    def cross_position(self) -> float:
        """Mean average precision with which perturbations retrieve replicates at other plate positions.

        It is NaN if no perturbation has several positions.
        """
        return _mean(self.cross_position_table, "average_precision")

    @property
    def cross_position_chance(self) -> float:
        """Mean average precision of random rankings for the cross-position score (``cross_position``)."""
        return _mean(self.cross_position_table, "chance")

    def scores(self) -> dict[str, float]:
        """Return the mean average precision and the other scores as a dictionary from their names to their values.

        Scores of positions are included if they were computed.
        """
        scores = {name: getattr(self, name) for name in ("mean_average_precision", "chance", "n_called")}
        if len(self.floor_table):
            scores |= {"floor": self.floor, "floor_corrected": self.floor_corrected}
            scores |= {"n_floor_called": _n_called(self.floor_table)}
        if len(self.cross_position_table):
            scores |= {"cross_position": self.cross_position, "cross_position_chance": self.cross_position_chance}
        return scores

    def __repr__(self) -> str:
        """Return a short text with the scores of perturbations and, if they were computed, of positions."""
        lines = [f"Retrieval of {_summary_line(self.table, 'perturbations')}"]
        if len(self.floor_table):
            lines += [f"  floor of {_summary_line(self.floor_table, 'positions of controls')}"]
            lines += [f"  floor-corrected: {self.floor_corrected:.3f}"]
        if len(self.cross_position_table):
            lines += [f"  across positions of {_summary_line(self.cross_position_table, 'perturbations')}"]
        return "\n".join(lines)


def _mean(table: pd.DataFrame, column: str) -> float:
    return float(table[column].mean()) if len(table) else np.nan


def _n_called(table: pd.DataFrame) -> int:
    return int((table["q_value"] < _MAX_Q_VALUE).sum()) if len(table) else 0


def _summary_line(table: pd.DataFrame, what: str) -> str:
    value, expected = _mean(table, "average_precision"), _mean(table, "chance")
    return (
        f"{len(table):,} {what}: average precision {value:.3f} (chance {expected:.3f}), {_n_called(table):,} called at "
        f"q < {_MAX_Q_VALUE}"
    )


def _average_by_label(scores: pd.DataFrame, labels: np.ndarray, null: NullDistribution) -> pd.DataFrame:
    """Return the mean scores of the queries of each label as a frame, with p value and q value.

    The frame has one row per label and the columns of :attr:`Retrieval.table`. ``scores`` is a result of
    :func:`score_queries`. ``labels`` ``(N,)`` holds the label, for example the perturbation, of every row of the
    embedding and not only of queries.
    """
    if scores.empty:
        return pd.DataFrame()
    of_label = scores.groupby(labels[scores.index])
    table = of_label.mean()
    sizes, rows_of = scores[["n_positives", "n_negatives"]].to_numpy(), of_label.indices
    p = [null.p_value(score, *sizes[rows_of[label]].T) for label, score in table["average_precision"].items()]
    table.insert(2, "p_value", p)
    table.insert(3, "q_value", false_discovery_control(p))
    table.insert(4, "n_queries", of_label.size())
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
    """Compute the average precision with which perturbations retrieve others with the same mechanism or target.

    The mechanism or target of a perturbation is its label; a perturbation may have several labels. The rows of each
    perturbation are averaged. Each perturbation then ranks all other perturbations by cosine. Perturbations that share
    a label with it are positives and should be ranked first; all other perturbations with a label are negatives.
    Perturbations without a label are excluded. A perturbation that shares no label with another perturbation serves as
    a negative, but has no score of its own.

    Parameters
    ----------
    adata
        Wells, cells, or profiles of perturbations, one per row.
    rep
        Key of ``obsm``, a layer, ``"X"``, or an array ``(N, D)``.
    label_key
        Column of ``obs`` with the mechanism or target of the perturbation. One value of the column may hold several
        labels, joined by ``separator``. The value is empty if the label is not known. If rows of a perturbation have
        different labels, the perturbation has all of them.
    y_key
        Column of ``obs`` with the perturbation, or several columns for their cross. By default, each row is a
        perturbation of its own.
    control
        Value or values of ``y_key`` for unperturbed rows, which are excluded. `None` excludes no rows.
    queries
        Mask ``(N,)`` or row numbers. Only perturbations with at least one of these rows are scored, but they are
        compared with all other perturbations. All perturbations are scored by default.
    separator
        Text between several labels in one value of ``label_key``.
    n_permutations
        Number of random orders for p values. No p value is below ``1 / (n_permutations + 1)``.
    seed
        Seed of the random orders.

    Returns
    -------
    :class:`Retrieval`, with one row per perturbation. If cosines are equal, the average precision is the mean over all
    orders of these ties. Perturbations that share labels retrieve each other, so that their scores depend on each
    other: they form one of the ``units`` of the result, which are resampled together.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If values are not finite, ``control`` is given without ``y_key``, or no perturbation has both positives and
        negatives.

    Warns
    -----
    UserWarning
        If labels differ from those of controls only in blanks, case or punctuation; or if rows of several models of
        :func:`scbd.cross_fit` are compared.

    Examples
    --------
    >>> adata.obs["complex"] = adata.obs["gene"].map(net.set_index("target")["source"])
    >>> found = scbd.metrics.retrieval(adata, "X_scbd_c", label_key="complex", y_key="gene", n_permutations=100)
    >>> found.table[["n_positives", "n_negatives"]].drop_duplicates().values.tolist()  # the other gene of two complexes
    [[1.0, 2.0]]
    """
    check_count("n_permutations", n_permutations)
    check_keys(adata, [], [label_key])
    warn_if_models_are_mixed(adata)
    x = get_finite_embedding(adata, rep)
    asked = row_mask("queries", queries, len(x))
    control = () if control is None else control
    if y_key is None and not (isinstance(control, Sized) and not len(control)):
        msg = f"control={control!r} is a value of y_key: give y_key, too."
        raise ValueError(msg)
    if y_key is None:
        # Without a column of perturbations, each row is a perturbation of its own, even if several rows have the same
        # name.
        no_control, perturbations = np.arange(len(x)), np.asarray(adata.obs_names.astype(str))
        codes = no_control
    else:
        names = get_label_texts(adata, y_key)
        no_control = np.flatnonzero(~control_rows(names, control, y_key))
        codes, perturbations = pd.factorize(names[no_control], sort=True)
    member = _label_indicators(codes, adata.obs[label_key].iloc[no_control], len(perturbations), separator)
    labelled = np.flatnonzero(np.diff(member.indptr))
    unit = scale_to_unit_length(label_means(x[no_control], codes)[1])
    is_query = np.bincount(codes, weights=asked[no_control], minlength=len(perturbations)) > 0
    related = (member @ member.T).tocsr()
    scores = score_queries(
        unit,
        np.intersect1d(labelled, np.flatnonzero(is_query)),
        labelled,
        positives=lambda row: (found := related[[row]].indices)[found != row],
        negatives=lambda rows: related[rows][:, labelled].toarray() == 0,
    )
    if scores.empty:
        msg = (
            f"No two perturbations share a label of obs[{label_key!r}], or none has another: {len(labelled)} of "
            f"{len(perturbations)} have one. Is {separator!r} the separator of labels?"
        )
        raise ValueError(msg)
    left_out = np.setdiff1d(np.flatnonzero(is_query), scores.index)
    table = _average_by_label(scores, np.arange(len(perturbations)), NullDistribution(n_permutations, seed))
    table.index = pd.Index(perturbations[table.index], name="perturbation")
    related.setdiag(0)
    related.eliminate_zeros()
    return Retrieval(table, tuple(perturbations[left_out]), units=divide_into_blocks(related)[scores.index])


def _label_indicators(codes: np.ndarray, labels: pd.Series, n: int, separator: str) -> sparse.csr_array:
    """Return a matrix ``(n, L)`` that is 1 where a perturbation has a mechanism or target (label), and 0 elsewhere.

    ``codes`` holds the perturbation of each row, and ``labels`` the labels of each row, joined by ``separator``. ``n``
    is the number of perturbations.
    """
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

    Each well of a perturbation is a query. It ranks other wells by cosine. Wells of its perturbation in *other*
    environments are the positives and should be ranked before the controls of these *other* environments, the
    negatives. Controls of environments without the perturbation are excluded. If they were included, and each batch had
    a layout of its own, batch effects would distinguish replicates from controls. The score of a perturbation is the
    mean over its wells, and the mean average precision is the mean over perturbations.

    With ``against="perturbations"``, the wells of all other perturbations are the negatives. The score measures whether
    a profile is more similar to its own perturbation in other environments than to other perturbations. The verdict of
    :func:`scbd.run`, which states which embedding is best, is based on this score. Each row is then the mean of the
    cells of one perturbation in one environment.

    If all plates share a layout, a perturbation always has the same position, and its wells may retrieve each other by
    their position. Two scores measure or avoid such effects of position:

    - The **floor** measures how well positions on the plate are retrieved without any perturbation. Controls are scored
      as if each position were a perturbation, against controls at other positions. A perturbation without effect is
      expected to reach the floor, if the embedding was not trained on it. Neither the floor nor q values are valid for
      perturbations that were seen in training, because an encoder can memorise their labels. An embedding with a higher
      score *and* a higher floor than another one has learned positions.
    - The **cross-position** score excludes the effect of position, if some perturbations have several positions. Wells
      of the same perturbation at another position and in another environment are the positives. Wells of all other
      perturbations, in all environments of the perturbation, are the negatives.

    Parameters
    ----------
    adata
        Wells (or cells), one per row. Only rows of this table are ranked: to score replicates on unseen plates alone,
        give the wells of these plates.
    rep
        Key of ``obsm``, a layer, ``"X"``, or an array ``(N, D)``.
    y_key, e_key
        Columns of ``obs`` with the perturbation and with the environment; each is one column, or several for their
        cross.
    control
        Value or values of ``y_key`` for unperturbed wells. `None` if there are no controls, which is allowed with
        ``against="perturbations"`` only.
    against
        Negatives of a query:

        - ``"controls"``: controls in the other environments that hold the perturbation.
        - ``"perturbations"``: wells of all other perturbations in the environments that hold the perturbation. The
          environment of the query is included, so that an embedding that retains the environment ranks negatives of the
          query's environment first. If there are fewer than 20 negatives (median over queries), negatives come from all
          environments instead. This is the case in arrayed screens, with wells as environments and one perturbation per
          well.
    position_key
        Column of ``obs`` with the position on a plate, or several columns (row and column). It is required for the
        cross-position score and, with ``against="controls"``, for the floor.
    queries
        Mask ``(N,)`` or row numbers of the wells to be scored, for example of perturbations that a model has not seen.
        Positives and negatives still come from all rows. By default, all wells except controls are scored. The floor
        scores controls in the environments of the scored wells.
    trained_on
        Rows that the embedding was trained on, or that a transform of it was fitted on: a mask ``(N,)``, row numbers,
        or a column of ``obs`` with ``True`` or ``"train"`` in these rows. By default the column ``obs["scbd_split"]``
        is used, if it exists, in which ``scbd run`` stores the data split.
    n_permutations
        Number of random orders for p values. No p value is below ``1 / (n_permutations + 1)``. If there are more than
        ``n_permutations / 20`` perturbations, a perturbation that is significant alone cannot reach a q value below
        0.05.
    seed
        Seed of the random orders.

    Returns
    -------
    :class:`Retrieval`, with one row per perturbation. If cosines are equal, the average precision is the mean over all
    orders of these ties, so that an embedding that is a single point has the score of chance. P values compare with
    random orders, not with the floor: check how many positions of controls are called as well.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If values are not finite, there is no control, or no perturbation has both a replicate in another environment
        and negatives.

    Warns
    -----
    UserWarning
        If labels differ from those of controls only in blanks, case or punctuation; if scored perturbations were seen
        in training; if a transform was fitted on some of the controls that serve as negatives, or on controls alone; or
        if rows of several models of :func:`scbd.cross_fit` are compared.

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
    x = get_finite_embedding(adata, rep)
    y = get_label_texts(adata, y_key)
    if control is None and against == "controls":
        msg = "control=None: name the controls that replicates are ranked against, or give against='perturbations'."
        raise ValueError(msg)
    is_control = control_rows(y, () if control is None else control, y_key)
    e = pd.factorize(get_label_texts(adata, e_key))[0]
    position = None if position_key is None else get_label_texts(adata, position_key)
    is_query = row_mask("queries", queries, len(x)) & ~is_control
    learned = training_mask_or_none(adata, trained_on)
    if learned is not None and trained_on is not None and against == "controls":
        _warn_if_controls_were_fitted(is_control, learned)
    unit, codes = scale_to_unit_length(x), pd.factorize(y)[0]
    queries, controls, perturbed = (np.flatnonzero(mask) for mask in (is_query, is_control, ~is_control))
    if against == "controls":
        scores = _score_wells(unit, e, codes, queries, perturbed, controls, apart=[e], differ=[e])
    else:
        scores = _score_wells(unit, e, codes, queries, perturbed, perturbed, apart=[e], differ=[codes], widen=True)
    if scores.empty:
        msg = (
            f"None of {is_query.sum()} wells has a replicate in another environment of {e_key!r} and {against} to be "
            f"ranked against: a replicate score needs perturbations in two environments or more, with {against} there."
        )
        raise ValueError(msg)
    null = NullDistribution(n_permutations, seed)
    table = _average_by_label(scores, y, null)
    warn_if_seen_in_training(y, learned, table.index)
    warn_if_models_are_mixed(adata, e_key, *([] if position_key is None else [position_key]))
    floor = across = pd.DataFrame()
    if position is not None:
        place = pd.factorize(position)[0]
        if against == "controls":
            # Each control is scored against controls at other positions, as if its position were its perturbation.
            # Only controls in the environments of the scored wells are queries.
            near = controls[np.isin(e[controls], e[scores.index])]
            of_controls = _score_wells(unit, e, place, near, controls, controls, apart=[e], differ=[e, place])
            floor = _average_by_label(of_controls, position, null)
        how: dict[str, Any] = {"apart": [e, place], "differ": [codes], "widen": against == "perturbations"}
        across = _average_by_label(_score_wells(unit, e, codes, queries, perturbed, perturbed, **how), y, null)
    left_out = sorted(set(y[is_query]) - set(table.index))
    return Retrieval(table, tuple(left_out), floor_table=floor, cross_position_table=across)


def profile_retrieval(
    x: np.ndarray, y: np.ndarray, *, apart: Sequence[np.ndarray], within: np.ndarray, is_control: np.ndarray
) -> pd.DataFrame:
    """Compute the average precision with which profiles retrieve profiles that have the same label.

    Parameters
    ----------
    x
        Profiles ``(N, D)``, compared by cosine.
    y
        Label of each profile, which replicates share, for example the perturbation, ``(N,)``.
    apart
        One or several other labels, each ``(N,)``, for example the environment. A profile is a positive only if it
        differs from the query in each of these labels.
    within
        Group of each profile, ``(N,)``, for example its environment. Negatives come from groups that hold the query's
        label ``y``, as in :func:`replicate_retrieval` with ``against="perturbations"``.
    is_control
        Mask ``(N,)`` of the controls, which are excluded.

    Returns
    -------
    Frame with one row per label that has replicates, and the columns ``average_precision``, ``chance`` (average
    precision of a random order), ``n_queries``, ``n_positives`` and ``n_negatives``.
    """
    codes, e, rows = pd.factorize(y)[0], pd.factorize(within)[0], np.flatnonzero(~is_control)
    how: dict[str, Any] = {"apart": [pd.factorize(labels)[0] for labels in apart], "differ": [codes], "widen": True}
    scores = _score_wells(scale_to_unit_length(x), e, codes, rows, rows, rows, **how)
    table = _average_by_label(scores, y, NullDistribution(1, 0))
    return table.drop(columns=["p_value", "q_value"], errors="ignore")


def _score_wells(
    unit: np.ndarray,
    e: np.ndarray,
    label: np.ndarray,
    queries: np.ndarray,
    among: np.ndarray,
    gallery: np.ndarray,
    *,
    apart: Sequence[np.ndarray],
    differ: Sequence[np.ndarray],
    widen: bool = False,
) -> pd.DataFrame:
    """Score each query well with :func:`score_queries`: wells with its label should rank before all other wells.

    Negatives lie in environments that hold a well with the query's label. Positives and negatives then come from the
    same environments, so that the environment does not distinguish them.

    Parameters
    ----------
    unit
        Embeddings of all wells as rows of length 1, ``(N, D)``.
    e, label
        Environment of each well, and its perturbation or plate position, integer codes ``(N,)``.
    queries, among, gallery
        Row numbers of the queries, of the wells that may be positives, and of the wells that may be negatives. Only
        wells ``among`` count as wells that an environment holds.
    apart, differ
        Further codes of each well, each ``(N,)``. A positive differs from the query in each of the codes ``apart``, and
        a negative in each of the codes ``differ``.
    widen
        If `True` and the median number of negatives per query is below ``MIN_NEGATIVES_IN_ENVIRONMENTS``, negatives
        come from all environments instead.
    """
    places = pd.Series(among).groupby(label[among]).indices
    holds = np.zeros((label.max() + 1, e.max() + 1), dtype=bool)
    holds[label[among], e[among]] = True

    def positives(row: int) -> np.ndarray:
        rows = among[places[label[row]]]
        for codes in apart:
            rows = rows[codes[rows] != codes[row]]
        return rows

    def all_negatives(rows: np.ndarray) -> np.ndarray:
        return np.logical_and.reduce([codes[rows][:, None] != codes[gallery] for codes in differ])

    def negatives(rows: np.ndarray) -> np.ndarray:
        return all_negatives(rows) & holds[label[rows]][:, e[gallery]]

    sample = np.random.default_rng(0).permutation(queries)[:_MAX_QUERIES_COUNTED]
    are_few = widen and len(sample) and np.median(negatives(sample).sum(axis=1)) < MIN_NEGATIVES_IN_ENVIRONMENTS
    return score_queries(unit, queries, gallery, positives, all_negatives if are_few else negatives)


def _warn_if_controls_were_fitted(is_control: np.ndarray, fitted: np.ndarray) -> None:
    n, n_fitted = is_control.sum(), (is_control & fitted).sum()
    # There is no warning if the fit used all controls and also perturbations. Such a fit was probably the training of
    # an encoder, for which the controls are one label among many.
    if n_fitted and (n_fitted < n or not (fitted & ~is_control).any()):
        msg = (
            f"Negatives were used in the fit: {n_fitted} of {n} controls. A correction that was fitted on controls "
            "sets these apart, and scores against them rise: fit it on half of the positions of controls, and leave "
            "these wells out here."
        )
        warn_user(msg)
