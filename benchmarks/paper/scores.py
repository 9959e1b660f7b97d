"""How an embedding does: in and out of distribution, biology and batch, on new environments; how blind, how alive."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from anndata import AnnData
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split
from sklearn.neighbors import NearestNeighbors

from paper.datasets import in_part
from scbd._shared.labels import as_columns, label_values
from scbd._workflows.compare import correction_arguments
from scbd.baselines import MCVAEModel
from scbd.corrections import correct
from scbd.corrections._correct import CORRECTIONS
from scbd.data._splits import split_by_column
from scbd.metrics import (
    Relations,
    aggregate,
    benchmark,
    label_probe,
    predict_labels,
    relationship_curve,
    relationship_recall,
    replicate_retrieval,
    retrieval,
)
from scbd.metrics._relationships import PERCENTILES
from scbd.model import SCBDModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paper.datasets import Dataset
    from scbd.data import Split
    from scbd.metrics._probes import Classifier
    from scbd.model import ImageModel

# of the probes of the environment: enough for the second digit
_PROBE_CELLS = 20_000
# of p values, which no table shows
_PERMUTATIONS = 100
PROBE_KINDS: tuple[Literal["linear", "quadratic", "neighbours"], ...] = ("linear", "quadratic", "neighbours")
# several scores of one run side by side in its row: whose scores have their plain names; before the name of a score, of
# other variants; and what chance gives
AS_IT_IS, SEPARATOR, CHANCE = "as it is", ": ", "chance"
# what is done to z of new environments, by what may be learned from: all see cells of these
_CORRECTED: dict[str, dict[str, Any]] = {
    "standardised on controls": {},
    "standardised": {},
    "Harmony": {"n_components": None},  # columns of z have one unit
}


def generalization_scores(
    adata: AnnData,
    model: ImageModel,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    split_key: str = "split",
) -> dict[str, float]:
    """Accuracy of y in and out of distribution, and how blind and how alive the content block is.

    Parameters
    ----------
    adata
        Cells of all three parts; cells of any other part are left out.
    model
        Trained on the ``train`` cells.
    y_key, e_key
        Columns of the label and of the environment.
    split_key
        Column with ``train``, ``validation`` (in distribution) and ``test`` (out of distribution).

    Returns
    -------
    ``r_c in``, ``r_c out``: a linear head that is fitted afterwards, on the frozen r_c of training cells; ``own in``,
    ``own out``: the linear head that learned with the encoder, if there is one, that of a classifier or that of
    ``train(online_head=True)``, which is what the paper's authors report; ``z_c in``, ``z_c out``: the nearest class
    mean on z_c itself, for contrastive models; ``e from r_c``, ``e from z_c``: accuracy of a linear probe of the
    environment in training and validation cells, and ``e chance``, that of naming the largest; ``e from r_c, new``,
    ``e from z_c, new``, ``e chance, new``: the same in validation cells alone; and what ``model.health`` says.

    Notes
    -----
    Of its training cells an encoder may know the label by heart, and then hardly shows what else it sees in them: the
    environment is harder to read from them than from new cells. Where the two probes differ, believe that of new ones.

    Raises
    ------
    ValueError
        If the model was trained on cells of ``test``.
    """
    scores: dict[str, Any] = {}
    parts = _parts(adata, split_key)
    n_known = np.isin(parts.test, model.train_indices).sum()
    if n_known:
        msg = (
            f"The model was trained on {n_known:,} of {len(parts.test):,} test cells: train(split={split_key!r}) first."
        )
        raise ValueError(msg)
    for name, representation, classifier in representations_of(model):
        embedding = model.get_latent_representation(representation=representation)
        keys: dict[str, Any] = {"y_key": y_key, "e_key": e_key, "split_key": split_key}
        scores |= embedding_scores(adata, embedding, name=name, classifier=classifier, **keys)
    if model.can_predict:
        scores |= _accuracies("own", model.predict(), label_values(adata.obs, y_key).to_numpy(), parts)
    return scores | health_scores(model)


def embedding_scores(
    adata: AnnData,
    embedding: np.ndarray,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    split_key: str = "split",
    name: str = "r_c",
    classifier: Classifier = "linear",
) -> dict[str, float]:
    """Accuracy of y in and out of distribution, and of the environment, read from an embedding of any kind.

    Parameters
    ----------
    adata
        The cells.
    embedding
        ``(N, D)``.
    y_key, e_key, split_key
        See :func:`generalization_scores`.
    name
        Of the embedding, in the names of the scores: those of features that know no label are their r_c.
    classifier
        What reads y from it.

    Returns
    -------
    For the name ``r_c``: ``r_c in`` and ``r_c out``, ``e from r_c`` and ``e chance``, ``e from r_c, new`` and
    ``e chance, new``, as of a model.
    """
    y, e = (label_values(adata.obs, key).to_numpy() for key in (y_key, e_key))
    parts = _parts(adata, split_key)
    predicted = predict_labels(embedding[parts.train], y[parts.train], embedding, classifier=classifier)
    scores = _accuracies(name, predicted, y, parts)
    for suffix, rows in {"": np.union1d(parts.train, parts.validation), ", new": parts.validation}.items():
        scores |= {
            f"e from {name}{suffix}": _readable(embedding[rows], e[rows]),
            f"e chance{suffix}": _largest_share(e[rows]),
        }
    return scores


def health_scores(model: ImageModel | None) -> dict[str, float]:
    """What ``model.health`` says, for a contrastive model; nothing for others, and for features."""
    return dict(model.health) if isinstance(model, SCBDModel) else {}


def representations_of(model: ImageModel) -> list[tuple[str, str, Classifier]]:
    """Name, representation and classifier of what is scored: r_c, and of contrastive models z_c, which differs."""
    blocks: list[tuple[str, str, Classifier]] = [("r_c", "intermediate", "linear")]
    return [*blocks, ("z_c", "embedding", "nearest_mean")] if isinstance(model, SCBDModel) else blocks


def correction_scores(
    adata: AnnData,
    embedding: np.ndarray,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    guide_key: str | None,
    net: pd.DataFrame | None,
) -> dict[str, float]:
    """Biology and batch in an embedding of all cells: the metrics of :func:`scbd.metrics.benchmark`.

    And the F1 of the environment as the paper's authors measure it, ``e_probe_f1_unstandardised``; and of relations
    precision and recall at each percentile, up to 100 as the paper's text has them.

    Parameters
    ----------
    adata
        The cells.
    embedding
        ``(N, D)``.
    y_key, e_key, guide_key
        Columns of gene, well and guide. Where cells have no such column of guides, genes are averaged cell by cell.
    net
        Known relations between genes.
    """
    table = AnnData(obs=adata.obs, obsm={"embedding": embedding})
    guides = guide_key if guide_key in adata.obs else None
    keys: dict[str, Any] = {"y_key": y_key, "e_key": e_key, "guide_key": guides}
    # the paper's protocol, and what all rows mean: cells are split one by one, and environments read by a linear probe
    frame = benchmark(table, ["embedding"], **keys, group_key=None, kinds=["linear"], net=net)
    scores = frame.set_index("metric")
    chance = {f"{probe}_probe_chance_f1": scores.loc[f"{probe}_probe_f1", "chance"] for probe in "ye"}
    theirs = {"e_probe_f1_unstandardised": unstandardised_f1(embedding, label_values(adata.obs, e_key).cat.codes)}
    curve = {} if net is None else _curve(aggregate(table, "embedding", gene_key=str(y_key), guide_key=guides), net)
    # of the embedding of all cells, where the model's own health has that of a batch
    return scores["value"].drop("effective_rank").to_dict() | chance | theirs | curve


def _curve(profiles: AnnData, net: pd.DataFrame) -> dict[str, float]:
    curve = relationship_curve(profiles, net, percentiles=(*PERCENTILES, 100))
    found = curve.set_index(curve["percentile"].astype(int))[["precision", "recall"]]
    return {f"{name} at {place}": value for name in found for place, value in found[name].items()}


def curves_of(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Mean precision and recall over the rows of each name, as :func:`scbd.pl.relationship_curve` takes them."""
    places = [place for place in (*PERCENTILES, 100) if f"recall at {place}" in frame]
    found: dict[str, pd.DataFrame] = {}
    for name, part in frame.groupby("name", sort=False):
        parts = {score: part[[f"{score} at {place}" for place in places]].mean() for score in ("recall", "precision")}
        curve = pd.DataFrame({"percentile": places} | {score: values.to_numpy() for score, values in parts.items()})
        curve = curve.dropna()
        found |= {str(name): curve} if len(curve) else {}
    return found


def _parts(adata: AnnData, split_key: str) -> Split:
    """As ``train(split=…)`` takes them, which has said what it leaves out.

    A further part, such as WILDS' unseen validation environment, is neither in nor out of distribution.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*name no part of a split", UserWarning)
        return split_by_column(adata.obs, split_key)


def _readable(embedding: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy of a linear probe; NaN where there are no two labels to tell apart."""
    if (np.unique(labels.astype(str), return_counts=True)[1] > 1).sum() < 2:
        return float("nan")
    return label_probe(embedding, labels, max_cells=_PROBE_CELLS)["accuracy"]


def _largest_share(labels: np.ndarray) -> float:
    """Accuracy of always naming the most frequent label; NaN without cells."""
    return (
        float(np.unique(labels.astype(str), return_counts=True)[1].max() / len(labels)) if len(labels) else float("nan")
    )


def _accuracies(name: str, predicted: np.ndarray, y: np.ndarray, parts: Split) -> dict[str, float]:
    """NaN of a part without cells."""
    return {
        f"{name} {shown}": float(np.mean(predicted[rows] == y[rows])) if len(rows) else float("nan")
        for shown, rows in {"in": parts.validation, "out": parts.test}.items()
    }


def unstandardised_f1(embedding: np.ndarray, labels: np.ndarray) -> float:
    """Macro F1 of a label by logistic regression on the components *as they are*.

    Its penalty is on raw weights, so that of two embeddings that tell the same, the smaller one seems to tell less:
    :func:`scbd.metrics.label_probe`, whose components are standardised, does not depend on scale.

    Parameters
    ----------
    embedding
        ``(N, D)``.
    labels
        ``(N,)``.

    Returns
    -------
    The score on 40 % of the cells, the same ones in all runs; scikit-learn's defaults, a hundred iterations.

    References
    ----------
    Makino et al. (2025), appendix, batch prediction.
    """
    train, test, known, asked = train_test_split(embedding, labels, train_size=0.6, random_state=0)
    with warnings.catch_warnings():  # a hundred iterations are the protocol, whether they are enough or not
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = LogisticRegression(max_iter=100).fit(train, known)
    return float(f1_score(asked, fitted.predict(test), average="macro"))


def profile_scores(adata: AnnData, embedding: np.ndarray, dataset: Dataset) -> dict[str, float]:
    """Retrieval of replicates, mechanisms and targets, and how far the environment can be read.

    Controls at positions that were learned from are no negatives, be it on new plates, and take no part.

    Parameters
    ----------
    adata
        Wells, with the columns of :func:`cpjump1_fold`.
    embedding
        ``(N, D)``.
    dataset
        Its columns.

    Returns
    -------
    ``replicates seen``, ``unseen`` (perturbations on new plates) and ``unseen, all plates``: mean average precision;
    ``floor`` of the last, and ``floor-corrected``; ``across positions``; ``mechanism``, ``target``: of unseen
    perturbations among all; and probes of the plate in wells that were not learned from, ``e, linear, new`` and so on,
    see :func:`environment_scores`: of its training wells an encoder knows the compound by heart, and hides the plate.
    """
    control, kept = dataset.setup["control"], ~adata.obs["known_position"].to_numpy()
    wells, z = adata[kept], np.asarray(embedding)[kept]
    unseen, new = wells.obs["unseen"].to_numpy(), wells.obs["new_plate"].to_numpy()
    keys: dict[str, Any] = {"y_key": dataset.y_key, "control": control}
    how = keys | {"e_key": dataset.e_key, "n_permutations": _PERMUTATIONS}
    with warnings.catch_warnings():  # one layout: that is what the floor is for
        warnings.filterwarnings("ignore", ".*position", UserWarning)
        everywhere = replicate_retrieval(
            wells, z, queries=unseen, position_key=dataset.setup.get("position_key"), **how
        )
        scores: dict[str, float] = {}
        if wells.obs.loc[new, dataset.e_key].nunique() > 1:  # of a single plate there are no replicates
            for name, queries in {"seen": ~unseen, "unseen": unseen}.items():
                found = replicate_retrieval(wells[new], z[new], queries=queries[new], **how)
                scores[f"replicates {name}"] = found.mean_average_precision
    scores |= {
        "replicates unseen, all plates": everywhere.mean_average_precision,
        "floor": everywhere.floor,
        "floor-corrected": everywhere.floor_corrected,
        "across positions": everywhere.cross_position,
    }
    for name, column in dataset.labels.items():
        among = retrieval(wells, z, label_key=column, queries=unseen, n_permutations=_PERMUTATIONS, **keys)
        scores[name] = among.mean_average_precision
    not_learned = ~in_part(wells, "train")
    plates = label_values(wells.obs, dataset.e_key).astype(str).to_numpy()[not_learned]
    return scores | {f"{name}, new": score for name, score in environment_scores(z[not_learned], plates).items()}


def environment_scores(embedding: np.ndarray, environments: np.ndarray) -> dict[str, float]:
    """Accuracy with which probes of three kinds read the environment."""
    return {f"e, {kind}": label_probe(embedding, environments, kind=kind)["accuracy"] for kind in PROBE_KINDS}


def across_environments(adata: AnnData, embedding: np.ndarray, dataset: Dataset) -> dict[str, float]:
    """How well a label is read in the second environment by what was learned of it in the first, on new cells.

    Parameters
    ----------
    adata
        Cells of two environments, with ``obs["split"]``.
    embedding
        ``(N, D)``.
    dataset
        Its columns.

    Returns
    -------
    ``y across e``: balanced accuracy; ``y chance``; and probes of the environment.
    """
    new = in_part(adata, "test")
    z = np.asarray(embedding)[new]
    y, e = (label_values(adata.obs[new], key).astype(str).to_numpy() for key in (dataset.y_key, dataset.e_key))
    first = e == np.unique(e)[0]
    predicted = predict_labels(z[first], y[first], z[~first], classifier="linear")
    truth = y[~first]
    recalls = [float(np.mean(predicted[truth == label] == label)) for label in np.unique(truth)]
    scores = {"y across e": float(np.mean(recalls)), "y chance": 1 / len(recalls)}
    return scores | environment_scores(z, e)


def new_environment_scores(adata: AnnData, model: ImageModel, dataset: Dataset) -> dict[str, float]:
    """Scores of new environments by each way to embed them, side by side.

    Parameters
    ----------
    adata
        Cells with ``obs["split"]``: those of new environments are ``"test"``, and so may be others.
    model
        Trained on the ``"train"`` cells.
    dataset
        Its columns; environments are told apart by its ``group_key``, or without one by ``e_key``.

    Returns
    -------
    Under the name of each way: :func:`profile_scores` of wells that have mechanisms, else :func:`transfer_scores`.
    ``standardised by its own controls``: with the columns of environments (or cells, where models know environments by
    these), and the same with z not centred; ``as training cells``: without these columns, so that new cells are
    standardised over all training cells; and what corrections make of the latter, ``z …``.
    """
    key = dataset.group_key or dataset.e_key
    environments = label_values(adata.obs, key).astype(str).to_numpy()
    learned = in_part(adata, "train")
    new = ~np.isin(environments, environments[learned])
    scores: dict[str, float] = {}
    for name, z in _embeddings(adata, model, dataset, environments, new):
        found = profile_scores(adata, z, dataset) if dataset.labels else transfer_scores(adata, z, dataset, new)
        scores |= of_variant(name, found)
    return scores


def transfer_scores(adata: AnnData, embedding: np.ndarray, dataset: Dataset, new: np.ndarray) -> dict[str, float]:
    """How well labels of new environments are read by what was learned in the old, and how far the new stand apart.

    Parameters
    ----------
    adata
        Cells with ``obs["split"]``.
    embedding
        ``(N, D)``.
    dataset
        Its columns.
    new
        Which cells are of new environments, boolean ``(N,)``.

    Returns
    -------
    ``y AUROC``, ``y F1``: of a linear probe that learned from training cells, on cells of new environments; ``new or
    old``: balanced accuracy with which a linear probe tells controls (where they are known, else cells) of new
    environments from those of old ones, 0.5 by chance.
    """
    y = label_values(adata.obs, dataset.y_key).astype(str).to_numpy()
    learned = in_part(adata, "train")
    read = label_probe(embedding[learned | new], y[learned | new], train=learned[learned | new])
    compared = correction_arguments(adata, **dataset.label_keys).get("controls", np.ones(len(y), dtype=bool))
    rng = np.random.default_rng(0)
    n = min((compared & new).sum(), (compared & ~new).sum(), _PROBE_CELLS // 2)
    rows = np.concatenate([rng.permutation(np.flatnonzero(compared & part))[:n] for part in (new, ~new)])
    apart = label_probe(embedding[rows], new[rows])
    return {"y AUROC": read["auroc"], "y F1": read["f1"], "new or old": apart["accuracy"]}


def plate_map_scores(adata: AnnData, embedding: np.ndarray, dataset: Dataset) -> dict[str, float]:
    """Genes and guides on plates that were not learned from, as Yao et al. (2024) score them.

    Parameters
    ----------
    adata
        Cells of these plates.
    embedding
        ``(N, D)``.
    dataset
        Its columns.

    Returns
    -------
    ``recall at 5``, ``recall at 10``: of known relations, in the outer 5 or 10 % of either side of all pairs of genes;
    ``guide mAP``, ``gene mAP``: mean average precision with which the profile of a guide (of a gene) in a well finds
    those of the same in other wells, controls among all others; ``well, 20 neighbours``: accuracy of the well of a
    guide's profile, the most frequent one of its 20 nearest others. By cosine; a profile is the mean of its cells.
    """
    keys = (dataset.y_key, str(dataset.guide_key), dataset.e_key)
    y, guide, e = (label_values(adata.obs, key).astype(str) for key in keys)
    cells, scores = pd.DataFrame(embedding), {}
    for name, label in {"guide": guide, "gene": y}.items():
        profiles = cells.groupby([label.to_numpy(), e.to_numpy()]).mean()
        labels, wells = (profiles.index.get_level_values(i).to_numpy() for i in (0, 1))
        of_controls = np.isin(labels, np.unique(label[(y == dataset.control).to_numpy()]))
        names = np.arange(len(labels)).astype(str)
        table, x = AnnData(obs=pd.DataFrame({"label": labels}, index=names)), profiles.to_numpy(np.float32)
        how: dict[str, Any] = {"label_key": "label", "queries": ~of_controls, "n_permutations": _PERMUTATIONS}
        scores[f"{name} mAP"] = retrieval(table, x, **how).mean_average_precision
        if name == "guide":
            scores["well, 20 neighbours"] = _neighbours_accuracy(x, wells)
    if dataset.relations is not None:
        table = AnnData(obs=adata.obs, obsm={"z": embedding})
        columns: dict[str, Any] = {"gene_key": dataset.y_key, "guide_key": dataset.guide_key}
        profiles = aggregate(table, "z", control=dataset.control, standardize=None, **columns)
        relations = Relations(profiles, dataset.relations(adata), universe="profiles")
        scores |= {f"recall at {n}": relationship_recall(relations, tail=n / 100) for n in (5, 10)}
    return scores


def _neighbours_accuracy(profiles: np.ndarray, labels: np.ndarray, n_neighbors: int = 20) -> float:
    found = NearestNeighbors(n_neighbors=min(n_neighbors, len(labels) - 1), metric="cosine").fit(profiles).kneighbors()
    codes, names = pd.factorize(labels)
    votes = np.stack([(codes[found[1]] == code).sum(1) for code in range(len(names))], 1)
    return float((votes.argmax(1) == codes).mean())


def _embeddings(
    adata: AnnData, model: ImageModel, dataset: Dataset, environments: np.ndarray, new: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and ``(N, D)`` of each way to embed all cells."""
    told = without_scored_controls(adata, dataset)
    z = model.get_latent_representation(told)
    if by := " and ".join(dict.fromkeys(model.alignment_.kinds.values())):
        own = f"standardised by its own {by}"
        yield own, z.copy()
        yield f"{own}, z not centred", model.get_latent_representation(told, center=None)
    cells = adata[new].copy()
    cells.obs = cells.obs.drop(columns=list(as_columns(dataset.columns["e_key"])))
    z[new] = model.get_latent_representation(cells)
    yield "as training cells", z
    known = correction_arguments(adata, **dataset.label_keys) | {"environments": environments}
    fit = in_part(adata, "train") | (new & ~_scored_controls(adata, dataset))
    for name, how in _CORRECTED.items():
        if set(CORRECTIONS[name].needs) <= set(known) and (name != "Harmony" or find_spec("harmonypy")):
            yield f"z {name}", correct(z, name, **known, fit=fit, **how)


def without_scored_controls(adata: AnnData, dataset: Dataset) -> AnnData:
    """The same rows, of which controls that are scored have no label: a new plate is not standardised by them.

    Negatives that were learned from would be alike for that alone.
    """
    scored = _scored_controls(adata, dataset)
    if not scored.any():
        return adata
    told = adata.copy()
    for column in as_columns(dataset.y_key):
        told.obs[column] = told.obs[column].mask(scored)
    return told


def _scored_controls(adata: AnnData, dataset: Dataset) -> np.ndarray:
    """Controls that are negatives of a score, boolean ``(N,)``: those at positions that are not learned from."""
    if "known_position" not in adata.obs:
        return np.zeros(adata.n_obs, dtype=bool)
    controls = correction_arguments(adata, **dataset.label_keys)["controls"]
    scored: np.ndarray = controls & ~adata.obs["known_position"].to_numpy()
    return scored


def blocks_of(model: ImageModel, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """What is scored of a model, by name: its content; of the mcVAE, the salient block and both side by side.

    Its authors' code scores both (``contrastive-ops``), their paper the salient one.
    """
    content = model.get_latent_representation(indices=rows)
    if not isinstance(model, MCVAEModel):
        return {AS_IT_IS: content}
    background = model.get_latent_representation(indices=rows, block="s")
    return {"salient block": content, "both blocks": np.hstack([content, background])}


def of_variant(variant: str, scores: Mapping[str, Any]) -> dict[str, Any]:
    """Scores by their names in a row that has those of other variants, too."""
    return dict(scores) if variant == AS_IT_IS else {variant + SEPARATOR + name: scores[name] for name in scores}


def side_by_side(frame: pd.DataFrame) -> dict[str, float]:
    """A frame of :func:`scbd.compare` as scores of one row; chance is that of its representations on average.

    What is not known is left out.
    """
    frame = frame[frame["metric"] != "effective_rank"]  # the model's own health has that of a batch
    scores: dict[str, float] = {}
    for representation, part in frame.groupby("representation", sort=False):
        variant = str(representation).removeprefix(f"{AS_IT_IS}, ")
        scores |= of_variant(variant, part.set_index("metric")["value"].dropna().to_dict())
    return scores | of_variant(CHANCE, frame.groupby("metric", sort=False)["chance"].mean().dropna().to_dict())
