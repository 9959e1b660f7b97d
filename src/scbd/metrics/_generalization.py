"""How much of a score is left in environments, on guides, and of perturbations that were not learned from."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd._checks import check_count
from scbd.metrics._embeddings import Embeddings, named_embeddings
from scbd.metrics._probes import label_probe
from scbd.metrics._readers import check_kinds
from scbd.metrics._replicates import replicate_retrieval
from scbd.metrics._table import control_names, label_names, trained_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anndata import AnnData
    from numpy.typing import ArrayLike

    from scbd.metrics._readers import Kind

logger = logging.getLogger(__name__)

_COLUMNS = ["metric", "representation", "key", "held_out", "fold", "value", "chance", "n_labels"]


def generalization(
    adata: AnnData,
    embeddings: Embeddings,
    *,
    y_key: str,
    e_key: str | Sequence[str],
    guide_key: str | None = None,
    trained_on: str | ArrayLike | None = None,
    control: object | Sequence[object] | None = None,
    classifiers: Sequence[Kind] = ("linear", "nearest_mean"),
    n_folds: int = 10,
    max_cells: int | None = 100_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Read the perturbation where it was not learned: in other environments, from other guides, of other perturbations.

    **Environments**: each in turn is held out as a whole. A classifier learns the perturbation in all others, and is
    tested there. **Guides**, with ``guide_key``: one of each perturbation's guides is held out, in turn.
    **Perturbations**, with ``trained_on`` and ``control``: those that the embedding was never trained on; nothing could
    learn their names, so that it is asked whether their replicates find each other across environments, as in
    :func:`replicate_retrieval`.

    The classifier has never seen what is held out. Whether the *embedding* has, only you know: one that was trained on
    all environments may have learned to align them. The score of a new environment is that of an embedding whose model
    was trained without it (:func:`scbd.data.hold_out_environments`).

    Parameters
    ----------
    adata
        Embedded cells, or wells.
    embeddings
        Keys of ``obsm``; or names of representations with their key, or with several keys, such as those of several
        training seeds.
    y_key, e_key
        Columns of ``obs`` with the perturbation and with the environment, the latter one or several for their cross.
    guide_key
        Column of ``obs`` with the guide. Guides of two perturbations are two, whatever they are called.
    trained_on
        Rows that the embedding was trained on: a mask ``(N,)``, row numbers, or a column of ``obs`` that says ``True``
        or ``"train"`` there. A perturbation without such a row is unseen.
    control
        Value or values of ``y_key`` for what was not perturbed; ``trained_on`` needs it.
    classifiers
        Kinds of :func:`label_probe`.
    n_folds
        Where there are more environments, so many sets of whole environments are held out instead; where most
        perturbations have more guides, so many sets of guides.
    max_cells
        Use a random subset of this size; `None` for all. Which perturbations are unseen, all rows say.
    seed
        Seed of subset, sets, and permuted labels.

    Returns
    -------
    Tidy frame ``metric, representation, key, held_out, fold, value, chance, n_labels``, one row a metric, ``obsm`` key
    and fold; :func:`summarise` averages it, the folds of each key first. ``environment_linear_f1``,
    ``environment_linear_auroc``, and so on for other classifiers and for ``guide``: see :func:`label_probe`, over the
    ``n_labels`` perturbations that are on both sides; folds with fewer than two of them are left out, which is logged.
    ``replicates_unseen``: mean average precision of unseen perturbations, beside ``replicates_seen``, of new rows of
    seen ones, and ``replicates_trained_on``, of the rows that were trained on, where there are such rows in two
    environments. Controls that were not trained on are the negatives of all three; only where there are none, those
    that were. They may differ in how many replicates there are to find, and so in ``chance``.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If there is one environment only, a row has no label, nothing can be held out, no perturbation is unseen, the
        subset lacks such perturbations or controls, or an embedding is not finite.

    Warns
    -----
    UserWarning
        If the embedding was trained on all controls.

    Examples
    --------
    >>> how = {"y_key": "gene", "e_key": "well", "classifiers": ["nearest_mean"]}
    >>> frame = scbd.metrics.generalization(adata, ["X_scbd_c"], guide_key="sgRNA", **how)
    >>> frame.groupby("held_out")["fold"].nunique().to_dict()  # six wells, four guides of each gene
    {'environment': 6, 'guide': 4}
    """
    check_kinds(*classifiers)
    check_count("n_folds", n_folds, least=2)
    compared, rng = named_embeddings(adata, embeddings), np.random.default_rng(seed)
    n = adata.n_obs
    rows = np.arange(n) if max_cells is None or n <= max_cells else np.sort(rng.choice(n, max_cells, replace=False))
    names, e = label_names(adata, y_key), label_names(adata, e_key)[rows]
    y = names[rows]
    folds = _shared(_environment_folds(e, n_folds, rng), y, f"environments of {e_key!r}")
    if guide_key is not None:
        guides = label_names(adata, guide_key)[rows]
        folds += _shared(_guide_folds(y, guides, n_folds, rng), y, f"guides of {guide_key!r}")
    novelty = None
    if trained_on is not None:
        novelty = _novelty(names, trained_rows(adata, trained_on), control, y_key).of(rows)
    found = []
    for name, key, values in compared:
        x = np.asarray(values)[rows] if len(rows) < n else np.asarray(values)
        scores = [score for fold in folds for score in _read(x, y, fold, classifiers, seed)]
        if novelty is not None:
            scores += _retrieved(x, y, e, novelty, seed)
        found += [{"representation": name, "key": key, **score} for score in scores]
    return pd.DataFrame(found)[_COLUMNS]


class _Fold(NamedTuple):
    held_out: str
    name: str
    is_held: np.ndarray
    """Mask ``(N,)``."""


def _environment_folds(e: np.ndarray, n_folds: int, rng: np.random.Generator) -> list[_Fold]:
    names, codes = np.unique(e, return_inverse=True)
    if len(names) < 2:
        msg = f"Every row is in the one environment {names[0]!r}: there is no other one to test on."
        raise ValueError(msg)
    if len(names) <= n_folds:
        return [_Fold("environment", str(name), codes == code) for code, name in enumerate(names)]
    of_name = rng.permutation(np.arange(len(names)) % n_folds)
    return [_Fold("environment", f"{i + 1} of {n_folds}", of_name[codes] == i) for i in range(n_folds)]


def _guide_folds(y: np.ndarray, guides: np.ndarray, n_folds: int, rng: np.random.Generator) -> list[_Fold]:
    """Guides of each perturbation dealt to folds, as many as most perturbations have guides."""
    of_row = pd.DataFrame({"y": y, "guide": guides}).groupby(["y", "guide"]).ngroup().to_numpy()
    first = np.unique(of_row, return_index=True)[1]
    mine_of = pd.Series(y[first]).groupby(y[first]).indices  # of each perturbation its guides
    several = [len(mine) for mine in mine_of.values() if len(mine) > 1]
    n = int(min(n_folds, np.median(several))) if several else 2
    of_guide = np.zeros(len(first), dtype=int)
    for mine in mine_of.values():
        of_guide[rng.permutation(mine)] = rng.permutation(n)[np.arange(len(mine)) % n]
    return [_Fold("guide", f"{i + 1} of {n}", of_guide[of_row] == i) for i in range(n)]


def _shared(folds: list[_Fold], y: np.ndarray, what: str) -> list[_Fold]:
    """Folds that share two labels with all that is not held out."""
    kept = [fold for fold in folds if _is_shared(y, fold.is_held)[1] > 1]
    if not kept:
        msg = f"No fold by {what} shares two perturbations with the others: none can be learned there and tested in it."
        raise ValueError(msg)
    if len(kept) < len(folds):
        n_left_out = len(folds) - len(kept)
        logger.warning(
            "%d of %d folds by %s share no two labels with the others: left out.", n_left_out, len(folds), what
        )
    return kept


def _is_shared(y: np.ndarray, is_held: np.ndarray) -> tuple[np.ndarray, int]:
    """Mask ``(N,)`` of rows whose label is on both sides, and how many such labels there are."""
    labels = np.intersect1d(y[is_held], y[~is_held])
    return np.isin(y, labels), len(labels)


def _read(
    x: np.ndarray, y: np.ndarray, fold: _Fold, classifiers: Sequence[Kind], seed: int
) -> Iterator[dict[str, Any]]:
    kept, n_labels = _is_shared(y, fold.is_held)
    for kind in classifiers:
        probe = label_probe(x[kept], y[kept], kind=kind, train=~fold.is_held[kept], seed=seed)
        for score, chance in (("f1", probe["chance_f1"]), ("auroc", 0.5)):
            yield {
                "metric": f"{fold.held_out}_{kind}_{score}",
                "held_out": fold.held_out,
                "fold": fold.name,
                "value": probe[score],
                "chance": chance,
                "n_labels": n_labels,
            }


class _Novelty(NamedTuple):
    """Masks ``(N,)``."""

    groups: dict[str, np.ndarray]
    is_negative: np.ndarray
    is_trained: np.ndarray

    def of(self, rows: np.ndarray) -> _Novelty:
        """The same of a subset, in which a perturbation is what it is among all rows."""
        groups = {name: group[rows] for name, group in self.groups.items()}
        if not (groups["unseen"].any() and self.is_negative[rows].any()):
            msg = (
                f"The random subset of {len(rows):,} rows lacks unseen perturbations, or controls to tell them from: "
                "give a larger max_cells."
            )
            raise ValueError(msg)
        return _Novelty(groups, self.is_negative[rows], self.is_trained[rows])


def _novelty(y: np.ndarray, is_trained: np.ndarray, control: Any, y_key: str) -> _Novelty:
    if control is None:
        msg = f"trained_on needs control, the value of {y_key!r} that replicates are told from."
        raise ValueError(msg)
    is_control = np.isin(y, control_names(control, y, y_key))
    is_seen = np.isin(y, np.unique(y[is_trained]))
    is_unseen = ~is_seen & ~is_control
    if not is_unseen.any():
        msg = "Every perturbation has a row in trained_on: none is unseen."
        raise ValueError(msg)
    perturbed = is_seen & ~is_control
    groups = {"trained_on": perturbed & is_trained, "seen": perturbed & ~is_trained, "unseen": is_unseen}
    new = is_control & ~is_trained
    return _Novelty(groups, new if new.any() else is_control, is_trained)


def _retrieved(x: np.ndarray, y: np.ndarray, e: np.ndarray, novelty: _Novelty, seed: int) -> Iterator[dict[str, Any]]:
    """Replicates of each group of rows among themselves and the same controls."""
    from anndata import AnnData

    for name, group in novelty.groups.items():
        if name != "unseen" and not (pd.Series(e[group]).groupby(y[group]).nunique() > 1).any():
            continue
        rows = np.flatnonzero(group | novelty.is_negative)
        table = AnnData(obs=pd.DataFrame({"y": y[rows], "e": e[rows]}, index=rows.astype(str)))
        found = replicate_retrieval(
            table,
            x[rows],
            y_key="y",
            e_key="e",
            control=np.unique(y[novelty.is_negative]).tolist(),
            # of controls only: that some perturbations were trained on is what is compared here
            trained_on=(novelty.is_trained & novelty.is_negative)[rows],
            n_permutations=1,  # of p values, which are not shown
            seed=seed,
        )
        yield {
            "metric": f"replicates_{name}",
            "held_out": "perturbation",
            "fold": name,
            "value": found.mean_average_precision,
            "chance": found.chance,
            "n_labels": len(found.table),
        }
