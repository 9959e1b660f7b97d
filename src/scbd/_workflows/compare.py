"""Score and compare embeddings on cells that were not used for training, with and without batch correction.

The module holds the public functions ``scbd.evaluate`` and ``scbd.compare``.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._shared.checks import named_errors
from scbd._shared.keys import CONTENT_KEY, PIXEL_PCA_KEY, STYLE_KEY
from scbd._shared.labels import check_control_labels
from scbd._shared.messages import warn_user
from scbd.corrections._correct import check_correction, correct
from scbd.data._splits import stratified_split
from scbd.metrics._arguments import (
    check_keys,
    get_embedding,
    get_label_texts,
    get_named_embeddings,
    training_mask,
    warn_if_seen_in_training,
)
from scbd.metrics._benchmark import benchmark, check_reference_keys, name_with_net, nets_by_name, probe_scores
from scbd.metrics._probes import ProbeImpossible, label_probe, resolve_probe_groups
from scbd.metrics._profiles import aggregate
from scbd.metrics._relationships import Relations, partner_average_precision

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

    from scbd.metrics._arguments import Embeddings
    from scbd.metrics._probes import ProbeKind

logger = logging.getLogger(__name__)

# Embeddings that scbd.evaluate scores by default. The mapping leads from the name of each embedding in the table of
# scores to its key in obsm.
_EMBEDDINGS = {"z_c": CONTENT_KEY, "z_s": STYLE_KEY, "pixel PCA": PIXEL_PCA_KEY}
# columns of the table of scbd.evaluate
_SCORES = ["embedding", "label", "tested_on", "f1", "f1_low", "f1_high", "auroc", "accuracy", "chance_f1"]
# Minimum number of held-out cells for which an embedding is scored on held-out cells. With fewer held-out cells, the
# score would be mostly noise.
MIN_HELD_OUT_CELLS = 50
# Kinds of probes (classifiers trained on an embedding) with which scbd.compare and scbd.run predict the environment.
PROBES: tuple[ProbeKind, ...] = ("linear", "quadratic", "neighbours")
# Minimum number of unseen perturbations (those without training cells) for which a score of unseen perturbations alone
# is reliable. With fewer, the score is mostly noise: scbd.compare warns, and scbd.run scores all perturbations.
MIN_UNSEEN_PERTURBATIONS = 10
# Maximum number of cells that are used for a probe (classifier) of unseen perturbations. It equals the default of
# scbd.metrics.benchmark.
_MAX_PROBE_CELLS = 100_000
# N_BOOTSTRAP_RESAMPLES: number of bootstrap resamples of the test cells. CONFIDENCE_LEVEL: level of confidence
# intervals.
N_BOOTSTRAP_RESAMPLES, CONFIDENCE_LEVEL = 200, 0.95

# function that trains and tests a probe on single cells, as in scbd.evaluate and in the verdict of scbd.run
score_probe = partial(probe_scores, groups=None, n_bootstrap=N_BOOTSTRAP_RESAMPLES)


def evaluate(
    adata: AnnData,
    label_keys: Sequence[str],
    *,
    embeddings: Mapping[str, str | np.ndarray] | None = None,
    train_indices: str | ArrayLike | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Evaluate how well labels can be predicted from embeddings, by linear classifiers (probes) on single cells.

    By default, the embeddings are z_c, z_s and principal components of the pixels.

    Parameters
    ----------
    adata
        Cells with embeddings and labels.
    label_keys
        Columns of ``obs`` with the labels to predict, such as perturbation and environment.
    embeddings
        Mapping from the name of each embedding to its key in ``obsm``, the name of a layer, ``"X"``, or an array
        ``(N, D)``. By default z_c, z_s and a PCA of the pixels, in ``X_scbd_c``, ``X_scbd_s`` and ``X_pixel_pca``.
    train_indices
        Cells that the encoders were trained on: row numbers, a mask ``(N,)``, or a column of ``obs`` that is ``True``
        or ``"train"`` for these cells, such as ``"scbd_split"`` of ``scbd run``. Probes are trained on these cells and
        tested on all other cells. Without ``train_indices``, or with fewer than 50 other cells, probes are trained and
        tested on a random split of all cells.
    seed
        Seed of the probes and of their random splits.

    Returns
    -------
    Data frame with one row per embedding and label, and these columns:

    - ``embedding`` and ``label``: name of the embedding, and column of the predicted label.
    - ``tested_on``: cells on which the probe is tested. ``"held-out cells"`` are cells that the encoders were not
      trained on, of labels that they were trained on; ``"unseen labels"`` is explained below; ``"all cells"`` stands
      for a random split of all cells.
    - ``f1``, ``auroc``, ``accuracy`` and ``chance_f1``: scores of the probe, see :func:`scbd.metrics.label_probe`.
    - ``f1_low`` and ``f1_high``: 95 % confidence interval of the F1. It describes the uncertainty due to the random
      choice of test cells, not that due to the training of the encoder and the probe. The interval is NaN if all cells
      are predicted correctly.

    A row is missing, and a warning is logged, if fewer than two values of its label have cells to train and to test a
    probe on. If at least two values, such as two perturbations, have no training cells, there is an
    additional row with ``"unseen labels"``. For this row, a probe is trained to distinguish these values on one half of
    their cells, and tested on the other half.

    An F1 far below ``chance_f1`` means the same as an F1 at chance: the label cannot be predicted. It occurs if the
    probe assigns the same label to all cells, for example because each environment was standardised to mean 0.

    Do not compare these scores with the lower scores of :func:`scbd.compare`. Probes of ``scbd.compare`` are trained on
    a part of the held-out cells, and thus on fewer cells.

    Raises
    ------
    KeyError
        If an embedding or a column is missing.
    TypeError
        If an embedding is a DataFrame with a column that is not numeric.
    ValueError
        If an embedding is sparse; see also :func:`scbd.metrics.label_probe`.

    Warns
    -----
    UserWarning
        If fewer than 50 cells are outside ``train_indices``, so that the scores include cells that the encoders were
        trained on, and are too high.

    Examples
    --------
    >>> adata.obsm["X_pixel_pca"] = scbd.baselines.pixel_pca(adata, n_components=16)
    >>> report = scbd.evaluate(adata, ["gene", "well"], train_indices=model.train_indices)
    >>> len(report)  # rows of three embeddings and two labels
    6
    """
    embeddings = _EMBEDDINGS if embeddings is None else embeddings
    label_keys = [label_keys] if isinstance(label_keys, str) else label_keys
    check_keys(adata, [key for key in embeddings.values() if isinstance(key, str)], label_keys)
    train = None if train_indices is None else training_mask(adata, train_indices, "train_indices")
    if train is not None and (left := int((~train).sum())) < MIN_HELD_OUT_CELLS:
        train = None
        is_large = 0.3 * adata.n_obs >= MIN_HELD_OUT_CELLS
        remedy = "To hold more out, train with train_size=0.7 or split=…" if is_large else "Use more cells."
        msg = (
            f"Scores are too high, because they include training cells: only {left} of {adata.n_obs:,} cells were held "
            f"out, and {MIN_HELD_OUT_CELLS} are needed. {remedy}"
        )
        warn_user(msg)
    spaces = {
        name: get_embedding(adata, given) if isinstance(given, str) else given for name, given in embeddings.items()
    }
    rows: list[dict[str, Any]] = []
    missing: dict[str, None] = {}  # sentences on scores that cannot be computed, each once
    for label in label_keys:
        parts = _evaluation_parts(adata.obs[label], train, seed)
        for name, space in spaces.items():
            for tested_on, of, learned in parts:
                x = space if of.all() else np.asarray(space)[of]
                try:
                    scores = score_probe(x, adata.obs[label][of], kind="linear", train=learned, seed=seed)
                except ProbeImpossible as error:
                    missing[f"No linear probe of {label!r} ({tested_on}): {error}"] = None
                    continue
                values = {score: scored.value for score, scored in scores.items()}
                low, high = np.clip(scores["f1"].interval(CONFIDENCE_LEVEL), 0, 1)
                row = {"embedding": name, "label": label, "tested_on": tested_on, "f1": values.pop("f1")}
                rows.append(row | {"f1_low": low, "f1_high": high} | values | {"chance_f1": scores["f1"].chance})
    for sentence in missing:
        logger.warning("%s", sentence)
    return pd.DataFrame(rows, columns=_SCORES)


def _evaluation_parts(
    labels: pd.Series, train: np.ndarray | None, seed: int
) -> list[tuple[str, np.ndarray, np.ndarray | None]]:
    """Return the groups of cells on which probes of a label are trained and tested, one group per row of the table.

    One group holds the cells of labels that the encoders were trained on, and one group holds the cells of labels
    without training cells ("unseen labels"). If ``train`` is `None`, all cells form a single group.

    Each group is a tuple of three items: its name in the column ``tested_on``; a boolean mask ``(N,)`` of its cells;
    and, within these cells, a boolean mask of those on which the probe is trained. This last mask is `None` if the
    probe should split the cells at random.
    """
    if train is None:
        return [("all cells", np.ones(len(labels), dtype=bool), None)]
    # Cells without a label are kept in the first group, so that the probe raises an error about the missing labels.
    known = (labels.isin(labels[train].unique()) | labels.isna()).to_numpy()
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
    """Score embeddings, without and with batch correction, on cells that were not used for training.

    Scores on training cells are too high, because encoders may have memorised the perturbations of these cells, and
    batch corrections have been fitted to these cells. Corrections are therefore fitted only to the cells in
    ``trained_on``, and all other cells are scored. The corrections ComBat and Harmony are exceptions: they are fitted
    to all cells, including the scored ones, but do not use the perturbations of the scored cells.

    Parameters
    ----------
    adata
        Cells, including those that were trained on.
    embeddings
        Embeddings of all cells of ``adata``, such as features of a pretrained network: keys of ``obsm``, arrays or
        files, see :func:`scbd.metrics.benchmark`.
    trained_on
        Cells that the encoders were trained on, and to which corrections are fitted: a mask ``(N,)``, row numbers, or a
        column of ``obs`` that is ``True`` or ``"train"`` for these cells. Each environment must contain some of them.
        Perturbations that have no cells in ``trained_on`` are called *unseen*.
    y_key, e_key
        Columns of ``obs`` with the perturbation and the environment.
    control
        Value of ``y_key`` that marks the controls.
    corrections
        Names of batch corrections that are applied to each embedding, see :func:`scbd.corrections.correct`; `None` in
        the list stands for the unmodified embedding.
    **how
        Further arguments of :func:`scbd.metrics.benchmark`, such as ``guide_key`` and ``net``.

    Returns
    -------
    Data frame of :func:`scbd.metrics.benchmark` for the cells that are not in ``trained_on``. The name of a corrected
    embedding includes the correction, as in ``"mine, standardised"``. The environment is predicted by three kinds of
    probes: linear, quadratic and nearest neighbours.

    If some perturbations are unseen, there are additional scores:

    - ``y_probe_unseen_f1`` and ``y_probe_unseen_auroc``: how well a probe distinguishes the unseen perturbations.
    - ``relationship_map_seen`` and ``relationship_map_unseen``, with ``net``: mean average precision with which seen or
      unseen genes retrieve the genes that they are related to, among all genes.

    Probes are trained on a part of the cells outside ``trained_on``, and tested on the rest of them. Scores of
    :func:`scbd.evaluate` are higher, because its probes are trained on more cells: all cells that the encoders were
    trained on. Compare only scores of the same table.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If a name in ``corrections`` does not exist; if an argument that a correction needs is missing; or if
        ``trained_on`` contains all cells or no cell. See also :func:`scbd.metrics.benchmark`.

    Warns
    -----
    UserWarning
        With the argument ``replicates``, if encoders were trained on some of the scored perturbations.

    Examples
    --------
    >>> adata.obsm["X_pixels"] = scbd.baselines.pixel_pca(adata, n_components=16, fit=np.arange(240) < 160)
    >>> mine = {"SCBD": "X_scbd_c", "pixels": "X_pixels"}
    >>> keys = {"y_key": "gene", "e_key": "well", "control": "nontargeting"}
    >>> frame = scbd.compare(adata, mine, trained_on=np.arange(160), **keys, n_neighbors=10)
    >>> frame["representation"].unique().tolist()
    ['SCBD', 'SCBD, standardised', 'pixels', 'pixels, standardised']
    """
    fit = training_mask(adata, trained_on)
    if fit.all() or not fit.any():
        msg = (
            f"trained_on marks {fit.sum()} of {len(fit)} cells: some must have been learned from, and some not. "
            "train(train_size=0.7) holds cells out; by default, the linear encoder of features holds out none."
        )
        raise ValueError(msg)
    known = correction_arguments(adata, y_key=y_key, e_key=e_key, control=control, fit=fit)
    for correction in corrections:
        if correction is not None:
            check_correction(correction, known)
    compared = [
        (name if correction is None else f"{name}, {correction}", key, values, correction)
        for name, key, values in get_named_embeddings(adata, embeddings)
        for correction in corrections
    ]
    check_reference_keys(how.get("reference"), [name for name, *_ in compared], how.get("n_bootstrap", 0))
    corrected: dict[str, dict[str, np.ndarray]] = {}
    for name, key, values, correction in compared:
        with named_errors(f"{name!r} ({key})"):
            z = np.asarray(values) if correction is None else correct(values, correction, **known)
        corrected.setdefault(name, {})[key] = z[~fit]
    new, names = adata[~fit], known["labels"]
    # Unseen perturbations have no training cells. Controls do not count as perturbations.
    perturbed = ~known.get("controls", np.zeros(len(fit), dtype=bool))
    unseen = np.setdiff1d(names[perturbed], names[fit])
    if how.get("replicates"):
        warn_if_seen_in_training(names, fit, names[~fit & perturbed])
    asked: dict[str, Any] = {"y_key": y_key, "e_key": e_key, "control": control, "kinds": PROBES}
    if 1 < len(unseen) < MIN_UNSEEN_PERTURBATIONS:
        logger.warning(
            "y_probe_unseen_f1 and y_probe_unseen_auroc are of %d perturbations that were not learned from: of so few "
            "they say little, noise may have 1.",
            len(unseen),
        )
    frame = benchmark(new, {name: list(of_key.values()) for name, of_key in corrected.items()}, **asked | how)
    key_of = {f"{name}[{i}]": key for name, of_key in corrected.items() for i, key in enumerate(of_key)}
    more: list[dict[str, Any]] = []
    for name, of_key in corrected.items():
        for key, z in of_key.items():
            with named_errors(f"scores of unseen perturbations (y_key={y_key!r}) of {name!r} ({key})"):
                rows = _score_unseen_perturbations(new, unseen, z, asked, how)
                more += [{"representation": name, "key": key, **row} for row in rows]
    return pd.concat(
        [frame.assign(key=frame["key"].map(key_of)), *([pd.DataFrame(more)] if more else [])], ignore_index=True
    )


def _score_unseen_perturbations(
    adata: AnnData, unseen: np.ndarray, z: np.ndarray, asked: dict[str, Any], how: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield scores of an embedding ``z`` on unseen perturbations, which have no training cells, as rows of a table.

    With ``net``, the relationship score of seen perturbations is included for comparison.
    """
    y_key = asked["y_key"]
    labels = get_label_texts(adata, y_key)
    rows = np.isin(labels, unseen)
    if len(unseen) > 1:
        groups = resolve_probe_groups(
            adata[rows], y_key, asked["e_key"], how.get("guide_key"), how.get("group_key", "auto")
        )
        few = {"max_cells": _MAX_PROBE_CELLS, "seed": how.get("seed", 0)}
        probe = label_probe(z[rows], labels[rows], groups=groups, **few)
        for score, chance in (("f1", probe["chance_f1"]), ("auroc", 0.5)):
            yield _metric_row(f"y_probe_unseen_{score}", probe[score], chance)
    nets = nets_by_name(how.get("net"))
    if len(unseen) and nets:
        from anndata import AnnData

        table = AnnData(obs=adata.obs, obsm={"z": z})
        guides = how.get("guide_key")
        profiles = aggregate(table, "z", gene_key=y_key, guide_key=guides, control=asked["control"])
        for net_name, net in nets.items():
            found = partner_average_precision(Relations(profiles, net))
            is_unseen = found.index.isin(unseen)
            for name, part in {"seen": found[~is_unseen], "unseen": found[is_unseen]}.items():
                metric = name_with_net(f"relationship_map_{name}", net_name)
                yield _metric_row(metric, part["average_precision"].mean(), part["chance"].mean())


def _metric_row(metric: str, value: float, chance: float) -> dict[str, Any]:
    return {"metric": metric, "value": float(value), "chance": float(chance), "better": "higher"}


def correction_arguments(
    adata: AnnData,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    control: object | Sequence[object] | None = None,
    position_key: str | None = None,
    fit: np.ndarray | None = None,
) -> dict[str, Any]:
    """Collect the labels of all cells, from columns of ``obs``, as arguments of :func:`scbd.corrections.correct`.

    Arguments for which no column, control or ``fit`` was given are missing from the returned dictionary.

    Raises
    ------
    KeyError
        If a column is missing.
    ValueError
        If a cell has no label, or no cell is a control.
    """
    keys = {"labels": y_key, "environments": e_key, "positions": position_key}
    known: dict[str, Any] = {name: get_label_texts(adata, key) for name, key in keys.items() if key is not None}
    if control is not None:
        labels = known["labels"]
        known["controls"] = np.isin(labels, check_control_labels(control, labels, y_key))
    return known if fit is None else known | {"fit": fit}
