"""Embeddings of any origin beside each other, as they are and corrected, on cells that were not learned from."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._seen import warn_of_seen
from scbd.baselines import check_correction, correct
from scbd.metrics import (
    Relations,
    aggregate,
    benchmark,
    check_reference_of,
    label_names,
    label_probe,
    named_embeddings,
    nets_by_name,
    of_net,
    probe_groups,
    reduced,
    relationship_retrieval,
    trained_rows,
)
from scbd.workflows._known import known_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

    from scbd.metrics import Embeddings

logger = logging.getLogger(__name__)

_KINDS = ("linear", "quadratic", "neighbours")
# unseen perturbations of which a probe may say anything, whatever the embedding
_FEW = 10
# of probes, where nothing else is asked for: as in a benchmark
_MAX_CELLS = 100_000


def compare(
    adata: AnnData,
    embeddings: Embeddings,
    *,
    trained_on: str | ArrayLike,
    y_key: str,
    e_key: str | Sequence[str],
    control: str | Sequence[str] | None = None,
    corrections: Sequence[str | None] = (None, "standardised"),
    **how: Any,
) -> pd.DataFrame:
    """Score embeddings as they are and after corrections, on cells that were not learned from.

    Of what was learned from, an encoder may know the perturbation by heart, and a correction has seen it: both flatter.
    Corrections learn from the cells in ``trained_on`` alone, except for ComBat and Harmony, which by construction see
    all cells of the table, those that are scored among them (their labels of perturbation they do not see).

    Parameters
    ----------
    adata
        Cells, those that were learned from among them.
    embeddings
        Of all these cells: keys of ``obsm``, such as features of a pretrained network; arrays; or files, see
        :func:`scbd.metrics.benchmark`.
    trained_on
        What encoders were trained on, and corrections learn from: a mask ``(N,)``, row numbers, or a column of ``obs``
        that says ``True`` or ``"train"`` there. Every environment needs such cells. Perturbations without any are
        *unseen*.
    y_key, e_key
        Columns of ``obs`` with the perturbation and the environment.
    control
        Value of ``y_key`` for what was not perturbed.
    corrections
        Names, see :func:`scbd.baselines.correct`; `None` for the embedding as it is.
    **how
        Further arguments of :func:`scbd.metrics.benchmark`, such as ``guide_key`` and ``net``.

    Returns
    -------
    The frame of :func:`scbd.metrics.benchmark`, of the cells that were not learned from; the representation says the
    correction, as in ``"mine, standardised"``. The environment is read by three probes. Where perturbations are unseen,
    ``y_probe_unseen_f1`` and ``y_probe_unseen_auroc`` tell how well these are told from each other; and with ``net``,
    ``relationship_map_seen`` and ``relationship_map_unseen`` how well seen and unseen genes find those that they are
    related to among all: see :func:`scbd.metrics.relationship_retrieval`.

    Probes learn from a part of these new cells, and are tested on the rest. :func:`scbd.workflows.evaluate` has probes
    that learn from the cells in ``trained_on``, which are more, so that its scores are higher: compare within a table.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If a correction is not known or learns from what is not given, all cells were learned from or none, or see
        :func:`scbd.metrics.benchmark`.

    Warns
    -----
    UserWarning
        With ``replicates``, if some are of perturbations that were trained on.

    Examples
    --------
    >>> adata.obsm["X_pixels"] = scbd.baselines.pixel_pca(adata, n_components=16, fit=np.arange(240) < 160)
    >>> mine = {"SCBD": "X_scbd_c", "pixels": "X_pixels"}
    >>> keys = {"y_key": "gene", "e_key": "well", "control": "nontargeting"}
    >>> frame = scbd.workflows.compare(adata, mine, trained_on=np.arange(160), **keys, n_neighbors=10)
    >>> frame["representation"].unique().tolist()
    ['SCBD', 'SCBD, standardised', 'pixels', 'pixels, standardised']
    """
    fit = trained_rows(adata, trained_on)
    if fit.all() or not fit.any():
        msg = (
            f"trained_on marks {fit.sum()} of {len(fit)} cells: some must have been learned from, and some not. "
            "train(train_size=0.7) holds cells out; by default, the linear encoder of features holds out none."
        )
        raise ValueError(msg)
    known = known_of(adata, y_key=y_key, e_key=e_key, control=control, fit=fit)
    for correction in corrections:
        if correction is not None:
            check_correction(correction, known)
    compared = [
        (name if correction is None else f"{name}, {correction}", key, values, correction)
        for name, key, values in named_embeddings(adata, embeddings)
        for correction in corrections
    ]
    check_reference_of(how.get("reference"), [name for name, *_ in compared], how.get("n_bootstrap", 0))
    corrected: dict[str, dict[str, np.ndarray]] = {}
    for name, key, values, correction in compared:
        z = np.asarray(values) if correction is None else correct(values, correction, **known)
        corrected.setdefault(name, {})[key] = z[~fit]
    new, names = adata[~fit], label_names(adata, y_key)
    if how.get("replicates"):
        perturbed = slice(None) if known.get("controls") is None else ~known["controls"][~fit]
        warn_of_seen(names, fit, names[~fit][perturbed])
    asked: dict[str, Any] = {"y_key": y_key, "e_key": e_key, "gene_key": y_key, "control": control, "kinds": _KINDS}
    unseen = _unseen(known["labels"], fit, known.get("controls"))
    if 1 < len(unseen) < _FEW:
        logger.warning(
            "y_probe_unseen_f1 and y_probe_unseen_auroc are of %d perturbations that were not learned from: of so few "
            "they say little, noise may have 1.",
            len(unseen),
        )
    cells = _NewCells(new, unseen, y_key, e_key, control)
    frame = benchmark(cells.adata, {name: list(of_key.values()) for name, of_key in corrected.items()}, **asked | how)
    key_of = {f"{name}[{i}]": key for name, of_key in corrected.items() for i, key in enumerate(of_key)}
    more = [
        {"representation": name, "key": key, **row}
        for name, of_key in corrected.items()
        for key, z in of_key.items()
        for row in cells.of_unseen(reduced(z, how.get("n_pcs"), how.get("seed", 0)), how)
    ]
    return pd.concat(
        [frame.assign(key=frame["key"].map(key_of)), *([pd.DataFrame(more)] if more else [])], ignore_index=True
    )


class _NewCells(NamedTuple):
    """Cells that were not learned from."""

    adata: AnnData
    unseen: np.ndarray
    """Names of perturbations of which no cell was learned from."""
    y_key: str
    e_key: str | Sequence[str]
    control: str | Sequence[str] | None

    def of_unseen(self, z: np.ndarray, how: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What is told of unseen perturbations, beside the same of seen ones."""
        labels = label_names(self.adata, self.y_key)
        rows = np.isin(labels, self.unseen)
        if len(self.unseen) > 1:
            groups = probe_groups(
                self.adata[rows], self.y_key, self.e_key, how.get("guide_key"), how.get("group_key", "auto")
            )
            few = {"max_cells": how.get("max_cells", _MAX_CELLS), "seed": how.get("seed", 0)}
            probe = label_probe(z[rows], labels[rows], groups=groups, **few)
            for score, chance in (("f1", probe["chance_f1"]), ("auroc", 0.5)):
                yield _row(f"y_probe_unseen_{score}", probe[score], chance)
        nets = nets_by_name(how.get("net"))
        if len(self.unseen) and nets:
            from anndata import AnnData

            table = AnnData(obs=self.adata.obs, obsm={"z": z})
            guides = how.get("guide_key")
            profiles = aggregate(table, "z", gene_key=self.y_key, guide_key=guides, control=self.control)
            for net_name, net in nets.items():
                found = _retrieved(Relations(profiles, net, max_set_size=how.get("max_set_size")))
                is_unseen = found.index.isin(self.unseen)
                for name, part in {"seen": found[~is_unseen], "unseen": found[is_unseen]}.items():
                    metric = of_net(f"relationship_map_{name}", net_name)
                    yield _row(metric, part["average_precision"].mean(), part["chance"].mean())


def _retrieved(relations: Relations) -> pd.DataFrame:
    """Average precision of each gene, and of chance: of none, where all are related and there is nothing to tell."""
    n = len(relations.genes)
    if relations.known.nnz == n * (n - 1):
        return pd.DataFrame({"average_precision": [], "chance": []}, index=pd.Index([], dtype=object))
    return relationship_retrieval(relations, n_permutations=1).table


def _unseen(labels: np.ndarray, fit: np.ndarray, controls: np.ndarray | None) -> np.ndarray:
    """Names of perturbations of which no cell was learned from."""
    perturbed = np.ones(len(fit), dtype=bool) if controls is None else ~controls
    return np.setdiff1d(labels[perturbed], labels[fit])


def _row(metric: str, value: float, chance: float) -> dict[str, Any]:
    return {"metric": metric, "value": float(value), "chance": float(chance), "better": "higher"}
