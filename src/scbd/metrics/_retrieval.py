"""Whether perturbations of one mechanism, or of one target, look alike."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import sparse

from scbd._checks import check_count
from scbd._linear_maps import label_means
from scbd.metrics._average_precision import Null, score_queries, unit_rows
from scbd.metrics._resampling import blocks_of
from scbd.metrics._retrieval_result import Retrieval, by_label
from scbd.metrics._table import check_keys, chosen_rows, control_names, label_names, representation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike


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
        Key of ``obsm``, or an array ``(N, D)``, for example ``adata.X``.
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

    References
    ----------
    Kalinin et al. (2025), A versatile information retrieval framework for evaluating profile strength and similarity.

    Examples
    --------
    >>> adata.obs["complex"] = adata.obs["gene"].map(net.set_index("target")["source"])
    >>> found = scbd.metrics.retrieval(adata, "X_scbd_c", label_key="complex", y_key="gene", n_permutations=100)
    >>> found.table[["n_positives", "n_negatives"]].drop_duplicates().values.tolist()  # the other gene of two complexes
    [[1.0, 2.0]]
    """
    check_count("n_permutations", n_permutations)
    check_keys(adata, [], [label_key])
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
    wanted = np.intersect1d(labelled, np.flatnonzero(is_query))
    related = (member @ member.T).tocsr()
    scores = score_queries(
        unit,
        wanted,
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
    table = by_label(scores, np.arange(len(perturbations)), Null(n_permutations, seed))
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
