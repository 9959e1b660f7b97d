"""Embeddings beside each other: how well labels are predicted, as they are and corrected, on new cells."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._anndata import CONTENT_KEY, PIXEL_PCA_KEY, STYLE_KEY, control_names
from scbd.baselines._corrections import check_correction, correct
from scbd.data._splits import stratified_split
from scbd.metrics._benchmark import benchmark, check_reference_of, nets_by_name, of_net, probe_scores
from scbd.metrics._probes import label_probe, probe_groups
from scbd.metrics._relationships import Relations, aggregate, partners_found
from scbd.metrics._table import (
    check_keys,
    label_names,
    named_embeddings,
    stored_embedding,
    trained_rows,
    warn_of_learned,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

    from scbd.metrics._probes import Kind
    from scbd.metrics._table import Embeddings

logger = logging.getLogger(__name__)

_EMBEDDINGS = {"z_c": CONTENT_KEY, "z_s": STYLE_KEY, "pixel PCA": PIXEL_PCA_KEY}
# with fewer, a score on cells that were not trained on is mostly noise
MIN_HELD_OUT_CELLS = 50
PROBES: tuple[Kind, ...] = ("linear", "quadratic", "neighbours")
# with fewer perturbations that were not trained on, scores of these alone are mostly noise
MIN_UNSEEN = 10
# of probes, where nothing else is asked for: as in a benchmark
_MAX_CELLS = 100_000
# resamples of the cells that are tested on, and the level of intervals
N_BOOTSTRAP, LEVEL = 200, 0.95


def evaluate(
    adata: AnnData,
    label_keys: Sequence[str],
    *,
    embeddings: Mapping[str, str | np.ndarray] | None = None,
    train_indices: str | ArrayLike | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """How well z_c, z_s and a PCA of the pixels predict each label, one row an embedding and label.

    Parameters
    ----------
    adata
        Embedded cells.
    label_keys
        Columns of ``obs``.
    embeddings
        Name of each and its key in ``obsm``, a layer or ``"X"``, or an array ``(N, D)``; by default z_c, z_s and a PCA
        of the pixels, in ``X_scbd_c``, ``X_scbd_s`` and ``X_pixel_pca``.
    train_indices
        Cells the encoders were trained on, row numbers, a mask ``(N,)``, or a column of ``obs`` that says ``True`` or
        ``"train"`` there, such as ``"scbd_split"`` of ``scbd run``: probes learn from these and are tested on all
        others. Without them, or where they leave too few others, probes split all cells at random.
        :func:`scbd.compare` has probes that learn from a part of the others, which are fewer: its scores are
        lower.
    seed
        Seed of the probes.

    Returns
    -------
    The scores of :func:`scbd.metrics.label_probe`; ``f1_low`` and ``f1_high``, a 95 % interval of the F1 over other
    cells, not over other training seeds (NaN where all cells are right); and ``tested_on``: ``"held-out cells"``, of
    labels that were trained on, or ``"all cells"``. Where two labels or more were not trained on at all, there is a row
    ``"unseen labels"``, too: how well these are told from each other, learned from one half of their cells and tested
    on the other.

    An F1 far below ``chance_f1`` says no more than one at chance: all cells are taken for the same label, as where each
    environment was given mean 0.

    Raises
    ------
    KeyError
        If an embedding or a column is missing.
    TypeError
        If an embedding is a DataFrame, and a column holds no numbers.
    ValueError
        If an embedding is sparse, or see :func:`scbd.metrics.label_probe`.

    Warns
    -----
    UserWarning
        If ``train_indices`` leave too few cells, so that cells are scored that the encoders were trained on.

    Examples
    --------
    >>> adata.obsm["X_pixel_pca"] = scbd.baselines.pixel_pca(adata, n_components=16)
    >>> report = scbd.evaluate(adata, ["gene", "well"], train_indices=model.train_indices)
    >>> len(report)  # three embeddings, two labels
    6
    """
    embeddings = _EMBEDDINGS if embeddings is None else embeddings
    label_keys = [label_keys] if isinstance(label_keys, str) else label_keys
    check_keys(adata, [key for key in embeddings.values() if isinstance(key, str)], label_keys)
    train = None if train_indices is None else trained_rows(adata, train_indices, "train_indices")
    if train is not None and (left := int((~train).sum())) < MIN_HELD_OUT_CELLS:
        train = None
        msg = (
            f"Scores are flattering: they are of all cells, as {left} of {adata.n_obs:,} were not trained on, and "
            f"{MIN_HELD_OUT_CELLS} are needed. To hold more out, train with train_size=0.7 or split=…"
        )
        warnings.warn(msg, UserWarning, stacklevel=2)
    spaces = {
        name: stored_embedding(adata, given) if isinstance(given, str) else given for name, given in embeddings.items()
    }
    rows: list[dict[str, Any]] = []
    for label in label_keys:
        parts = _parts(adata.obs[label], train, seed)
        for name, space in spaces.items():
            for tested_on, of, learned in parts:
                x = space if of.all() else np.asarray(space)[of]
                scores = probe_scores(
                    x,
                    adata.obs[label][of],
                    kind="linear",
                    groups=None,
                    train=learned,
                    n_bootstrap=N_BOOTSTRAP,
                    seed=seed,
                )
                values = {score: scored.value for score, scored in scores.items()}
                low, high = np.clip(scores["f1"].interval(LEVEL), 0, 1)
                row = {"embedding": name, "label": label, "tested_on": tested_on, "f1": values.pop("f1")}
                rows.append(row | {"f1_low": low, "f1_high": high} | values | {"chance_f1": scores["f1"].chance})
    return pd.DataFrame(rows)


def _parts(labels: pd.Series, train: np.ndarray | None, seed: int) -> list[tuple[str, np.ndarray, np.ndarray | None]]:
    """What a probe is tested on, which cells take part ``(N,)``, and which of these it learns from."""
    if train is None:
        return [("all cells", np.ones(len(labels), dtype=bool), None)]
    known = (labels.isin(labels[train].unique()) | labels.isna()).to_numpy()  # what is missing, the probe names
    parts: list[tuple[str, np.ndarray, np.ndarray | None]] = []
    if (known & ~train).any():
        parts.append(("held-out cells", known, train[known]))
    new = labels[~known]
    several = (~known) & (labels.map(new.value_counts()).astype(float) > 1).to_numpy()
    if labels[several].nunique() > 1:
        half = stratified_split([labels[several].astype(str).to_numpy()], train_size=0.5, seed=seed).train
        parts.append(("unseen labels", several, np.isin(np.arange(several.sum()), half)))
    return parts


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
    related to among all: the mean over genes of their average precision.

    Probes learn from a part of these new cells, and are tested on the rest. :func:`scbd.evaluate` has probes
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
    >>> frame = scbd.compare(adata, mine, trained_on=np.arange(160), **keys, n_neighbors=10)
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
        warn_of_learned(names, fit, names[~fit][perturbed])
    asked: dict[str, Any] = {"y_key": y_key, "e_key": e_key, "control": control, "kinds": PROBES}
    unseen = _unseen(known["labels"], fit, known.get("controls"))
    if 1 < len(unseen) < MIN_UNSEEN:
        logger.warning(
            "y_probe_unseen_f1 and y_probe_unseen_auroc are of %d perturbations that were not learned from: of so few "
            "they say little, noise may have 1.",
            len(unseen),
        )
    frame = benchmark(new, {name: list(of_key.values()) for name, of_key in corrected.items()}, **asked | how)
    key_of = {f"{name}[{i}]": key for name, of_key in corrected.items() for i, key in enumerate(of_key)}
    more = [
        {"representation": name, "key": key, **row}
        for name, of_key in corrected.items()
        for key, z in of_key.items()
        for row in _of_unseen(new, unseen, z, asked, how)
    ]
    return pd.concat(
        [frame.assign(key=frame["key"].map(key_of)), *([pd.DataFrame(more)] if more else [])], ignore_index=True
    )


def _of_unseen(
    adata: AnnData, unseen: np.ndarray, z: np.ndarray, asked: dict[str, Any], how: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """What is told of unseen perturbations, beside the same of seen ones."""
    y_key = asked["y_key"]
    labels = label_names(adata, y_key)
    rows = np.isin(labels, unseen)
    if len(unseen) > 1:
        groups = probe_groups(adata[rows], y_key, asked["e_key"], how.get("guide_key"), how.get("group_key", "auto"))
        few = {"max_cells": _MAX_CELLS, "seed": how.get("seed", 0)}
        probe = label_probe(z[rows], labels[rows], groups=groups, **few)
        for score, chance in (("f1", probe["chance_f1"]), ("auroc", 0.5)):
            yield _row(f"y_probe_unseen_{score}", probe[score], chance)
    nets = nets_by_name(how.get("net"))
    if len(unseen) and nets:
        from anndata import AnnData

        table = AnnData(obs=adata.obs, obsm={"z": z})
        guides = how.get("guide_key")
        profiles = aggregate(table, "z", gene_key=y_key, guide_key=guides, control=asked["control"])
        for net_name, net in nets.items():
            found = partners_found(Relations(profiles, net))
            is_unseen = found.index.isin(unseen)
            for name, part in {"seen": found[~is_unseen], "unseen": found[is_unseen]}.items():
                metric = of_net(f"relationship_map_{name}", net_name)
                yield _row(metric, part["average_precision"].mean(), part["chance"].mean())


def _unseen(labels: np.ndarray, fit: np.ndarray, controls: np.ndarray | None) -> np.ndarray:
    """Names of perturbations of which no cell was learned from."""
    perturbed = np.ones(len(fit), dtype=bool) if controls is None else ~controls
    return np.setdiff1d(labels[perturbed], labels[fit])


def _row(metric: str, value: float, chance: float) -> dict[str, Any]:
    return {"metric": metric, "value": float(value), "chance": float(chance), "better": "higher"}


def known_of(
    adata: AnnData,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    control: object | Sequence[object] | None = None,
    position_key: str | None = None,
    fit: np.ndarray | None = None,
) -> dict[str, Any]:
    """Arguments of :func:`scbd.baselines.correct`, of all cells; what is not known is left out.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If a cell has no label, or none is a control.
    """
    keys = {"labels": y_key, "environments": e_key, "positions": position_key}
    known: dict[str, Any] = {name: label_names(adata, key) for name, key in keys.items() if key is not None}
    if control is not None:
        labels = known["labels"]
        known["controls"] = np.isin(labels, control_names(control, labels, y_key))
    return known if fit is None else known | {"fit": fit}
