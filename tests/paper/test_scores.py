from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from conftest import make_cells
from helpers.dataset_files import breinig2015_table, cpjump1_table
from helpers.known_answers import known_answers
from sklearn.metrics import average_precision_score

from paper.datasets import DATASETS
from paper.protocols import PROTOCOLS
from paper.scores import (
    across_environments,
    blocks_of,
    correction_scores,
    curves_of,
    generalization_scores,
    plate_map_scores,
    profile_scores,
    side_by_side,
    transfer_scores,
    unstandardised_f1,
    without_scored_controls,
)
from paper.systems import TABLES, Table
from paper.trials import Trial
from scbd.baselines import ERMModel, MCVAEModel
from scbd.metrics import label_probe, relationship_area
from scbd.model import SCBDModel


class Model:
    """Model whose representation is the codes of y and e with little noise."""

    can_predict = True

    def __init__(self, adata: AnnData) -> None:
        codes = adata.obs[["y", "e"]].astype(int).to_numpy(np.float32)
        self.train_indices = np.flatnonzero(adata.obs["split"].isin(["train", "training"]))
        self.r = codes + np.random.default_rng(0).normal(0, 0.05, codes.shape).astype(np.float32)

    def get_latent_representation(self, representation: str) -> np.ndarray:
        return self.r

    def predict(self) -> np.ndarray:
        """Return the labels of the jointly trained classifier, which is wrong in the last environment."""
        return np.where(self.r[:, 1] < 2.5, self.r[:, 0].round().astype(int), 0).astype(str)


@pytest.mark.parametrize("part", ["ood_validation", "nowhere"])
def test_generalization_scores_other_parts_are_excluded(part):
    rng = np.random.default_rng(1)
    split = np.repeat(["train", "validation", "test", part], [200, 100, 100, 400])
    e = np.select([split == "test", split == part], [2, 3], rng.integers(2, size=800))
    obs = pd.DataFrame({"y": rng.integers(2, size=800).astype(str), "e": e.astype(str), "split": split})
    adata = AnnData(obs=obs.set_index(obs.index.astype(str)))
    scores = generalization_scores(adata, Model(adata), y_key="y", e_key="e")  # type: ignore[arg-type]
    assert scores["r_c in"] == scores["r_c out"] == 1 and scores["e from r_c"] == 1
    assert scores["own in"] == scores["own out"] == 1
    # chance refers to the two environments seen in training; the other part would be the largest class by far
    seen = obs.loc[obs["split"].isin(["train", "validation"]), "e"]
    assert scores["e chance"] == pytest.approx(seen.value_counts(normalize=True).max())


def make_split_cells(names: list[str], n: int = 300) -> AnnData:
    rng = np.random.default_rng(0)
    obs = pd.DataFrame({"y": rng.integers(2, size=n), "e": rng.integers(2, size=n)}).astype(str)
    obs["split"] = np.resize(np.array(names, dtype=object), n)
    return AnnData(obs=obs.set_index(obs.index.astype(str)))


@pytest.mark.parametrize(
    "names", [["training", "val", "test"], ["Train", "valid", "TEST"], ["train", "validation", None]]
)
def test_generalization_scores_accepts_names_of_parts_of_train(names):
    """Before, accuracy in distribution was NaN without a warning, or scoring failed after training."""
    adata = make_split_cells(names)
    scores = generalization_scores(adata, Model(adata), y_key="y", e_key="e")  # type: ignore[arg-type]
    assert scores["r_c in"] == scores["own in"] == scores["e from r_c, new"] == 1
    assert np.isnan(scores["r_c out"]) == (names[2] is None)


def test_generalization_scores_environment_also_scored_on_new_cells():
    adata = make_split_cells(["train", "validation", "test"])
    model = Model(adata)
    known = adata.obs["split"].eq("train").to_numpy()
    model.r[known] = model.r[known] * [1, 0]  # the environment is hidden in training cells
    scores = generalization_scores(adata, model, y_key="y", e_key="e")  # type: ignore[arg-type]
    assert scores["e from r_c, new"] == 1 and scores["e from r_c"] < 0.9
    e = adata.obs["e"][adata.obs["split"] == "validation"]
    assert scores["e chance, new"] == pytest.approx(e.value_counts(normalize=True).max())


def test_generalization_scores_one_new_environment_returns_nan():
    adata = make_split_cells(["train", "validation", "test"])
    adata.obs.loc[adata.obs["split"] == "validation", "e"] = "0"
    scores = generalization_scores(adata, Model(adata), y_key="y", e_key="e")  # type: ignore[arg-type]
    assert np.isnan(scores["e from r_c, new"]) and scores["e chance, new"] == 1 and scores["e from r_c"] > 0.9


def test_generalization_scores_model_trained_on_test_cells_raises():
    adata = make_split_cells(["train", "validation", "test"])
    model = Model(adata)
    model.train_indices = np.arange(adata.n_obs)
    with pytest.raises(ValueError, match="100 of 100 test cells"):
        generalization_scores(adata, model, y_key="y", e_key="e")  # type: ignore[arg-type]


def test_correction_scores_guide_key_probes_still_split_by_cell():
    """Cells are split individually, as in all published rows, although the probe would hold out guides by default."""
    rng = np.random.default_rng(0)
    gene, well = rng.integers(4, size=600), rng.integers(3, size=600)
    obs = pd.DataFrame({"gene": gene, "well": well, "guide": 5 * gene + rng.integers(5, size=600)}).astype(str)
    z = rng.normal(size=(600, 6)) + 0.5 * np.eye(6)[gene]
    adata = AnnData(obs=obs.set_index(obs.index.astype(str)))
    scores = correction_scores(adata, z, y_key="gene", e_key="well", guide_key="guide", net=None)
    probes = {f"y_probe_{name}": value for name, value in label_probe(z, obs["gene"]).items()}
    probes |= {f"e_probe_{name}": value for name, value in label_probe(z, obs["well"]).items()}
    probes["e_probe_f1_unstandardised"] = unstandardised_f1(z, obs["well"].to_numpy())
    assert {name: value for name, value in scores.items() if "probe" in name} == probes


def test_correction_scores_guide_key_guides_have_equal_weight():
    """Each guide has the same weight, whatever its number of cells."""
    rng = np.random.default_rng(0)
    gene = np.repeat([f"G{i}" for i in range(8)] + ["nontargeting"], 60)
    many = np.tile(np.arange(60) > 5, 9)
    obs = pd.DataFrame({"gene": gene, "well": rng.integers(2, size=540).astype(str)})
    z = rng.normal(size=(540, 4)) + many[:, None] * rng.normal(size=(9, 4)).repeat(60, axis=0) * 3
    net = pd.DataFrame({"source": ["a", "a", "b", "b"], "target": ["G0", "G1", "G2", "G3"]})
    keys: dict[str, Any] = {"y_key": "gene", "e_key": "well", "net": net}
    without = AnnData(obs=obs.set_index(obs.index.astype(str)))
    with_guides = AnnData(obs=without.obs.assign(guide=gene + np.where(many, "/1", "/2")))
    plain = correction_scores(without, z, guide_key=None, **keys)
    assert correction_scores(without, z, guide_key="guide", **keys) == plain
    assert correction_scores(with_guides, z, guide_key="guide", **keys) != plain
    # the row holds all percentiles up to 100, as the paper's text states; the area uses the published ones
    curve = curves_of(pd.DataFrame([plain | {"name": "z"}]))["z"]
    assert len(curve) == 21
    assert relationship_area(curve[:-1]) == pytest.approx(plain["relationship_area"])


def test_unstandardised_f1_equals_original_implementation():
    known = known_answers("scbd_data")
    labels = 6 * known["probe_plate"] + known["probe_well"]
    found = unstandardised_f1(known["probe_z"], labels)
    assert found == pytest.approx(float(known["probe_well_macro_f1"]), abs=1e-6)


def test_unstandardised_f1_smaller_scale_lowers_score():
    rng = np.random.default_rng(0)
    labels = np.arange(600) % 6
    z = rng.normal(size=(600, 6)) + 2 * np.eye(6)[labels]
    large, small = unstandardised_f1(z, labels), unstandardised_f1(0.001 * z, labels)
    assert large > 0.7 and small < large - 0.1


QUICK: dict[str, Any] = {"max_steps": 2, "batch_size": 24, "enable_progress_bar": False, "accelerator": "cpu"}


def test_blocks_of_mcvae_returns_salient_and_both_blocks():
    cells = make_cells()
    MCVAEModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = MCVAEModel(cells, control="gene_2", n_latent=5)
    model.train(**QUICK)
    rows = np.array([3, 1, 40])
    blocks = blocks_of(model, rows)
    salient, background = (model.get_latent_representation(indices=rows, block=block) for block in "cs")
    assert list(blocks) == ["salient block", "both blocks"]
    np.testing.assert_array_equal(blocks["salient block"], salient)
    np.testing.assert_array_equal(blocks["both blocks"], np.hstack([salient, background]))


def test_blocks_of_erm_returns_one_block():
    cells = make_cells()
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = ERMModel(cells, encoder="small")
    model.train(**QUICK)
    ((name, z),) = blocks_of(model).items()
    assert name == "as it is"
    np.testing.assert_array_equal(z, model.get_latent_representation())


def test_side_by_side_prefixes_variants_and_averages_chance():
    rows = [
        ("as it is", "e_probe_f1", 0.5, 0.1),
        ("as it is", "effective_rank", 3.0, np.nan),
        ("as it is, standardised", "e_probe_f1", 0.2, 0.3),
        ("as it is, standardised", "silhouette", np.nan, np.nan),
        ("both blocks, standardised", "e_probe_f1", 0.4, 0.2),
    ]
    frame = pd.DataFrame(rows, columns=["representation", "metric", "value", "chance"])
    scores = side_by_side(frame)
    assert scores.pop("chance: e_probe_f1") == pytest.approx(0.2)
    assert scores == {
        "e_probe_f1": 0.5,
        "standardised: e_probe_f1": 0.2,
        "both blocks, standardised: e_probe_f1": 0.4,
    }


SCREEN = {"n_cells": 1200, "n_wells": 18, "plate_wells": 6, "image_size": 16, "n_complexes": 2, "guides_per_gene": 2}


def score_new_plate(tmp_path, fold: int = 1, **model: Any) -> dict[str, Any]:
    training, how = {"max_steps": 3, "batch_size": 64}, {"standardize_by": "auto", "encoder": "small"} | model
    trial = Trial("new environments", "simulated_screen_plates", "ERM", 0, {}, how, training)
    dataset = DATASETS[trial.dataset]
    adata = dataset.load(None, 0, fold=fold, **SCREEN)
    assert set(adata.obs.loc[adata.obs["split"] == "test", "plate"]) == {f"P{fold + 1}"}
    scores, trained = PROTOCOLS[trial.protocol](trial, adata, dataset, tmp_path)
    assert trained is not None
    assert not np.isin(trained.train_indices, np.flatnonzero(adata.obs["split"] == "test")).any()
    return scores


@pytest.mark.filterwarnings("ignore:.*did not converge", "ignore:.*not converged")
def test_new_environments_standardising_model_scores_each_way_to_embed(tmp_path):
    scores = score_new_plate(tmp_path)
    own = ["standardised by its own cells", "standardised by its own cells, z not centred"]
    corrected = ["z standardised on controls", "z standardised"] + ["z Harmony"] * bool(find_spec("harmonypy"))
    ways = [*own, "as training cells", *corrected]
    assert list(scores) == [f"{way}: {score}" for way in ways for score in ("y AUROC", "y F1", "new or old")]
    assert len({scores[f"{way}: y AUROC"] for way in ways}) == len(ways)  # all ways differ


@pytest.mark.filterwarnings("ignore:.*did not converge", "ignore:.*not converged")
def test_new_environments_unstandardised_model_has_one_way_to_embed(tmp_path):
    ways = {name.split(": ")[0] for name in score_new_plate(tmp_path, standardize_by=None)}
    assert {way for way in ways if not way.startswith("z ")} == {"as training cells"}


def test_load_simulated_screen_plates_missing_fold_raises():
    with pytest.raises(ValueError, match="fold=3"):
        DATASETS["simulated_screen_plates"].load(None, 0, fold=3, **SCREEN)


def test_transfer_scores_shifted_plate_or_exchanged_labels_are_detected():
    """Labels are known directions; the new plate is shifted, or its labels are exchanged."""
    dataset = DATASETS["simulated_screen_plates"]
    adata = dataset.load(None, 0, fold=0, **SCREEN)
    rng = np.random.default_rng(0)
    genes = adata.obs["gene"].astype(str).to_numpy()
    new = (adata.obs["split"] == "test").to_numpy()
    truth = np.eye(len(np.unique(genes)))[np.unique(genes, return_inverse=True)[1]]
    z = 5 * truth + rng.normal(size=truth.shape)
    right = transfer_scores(adata, z, dataset, new)
    assert right["y AUROC"] > 0.95 and 0.3 < right["new or old"] < 0.7
    shifted = z + 20.0 * new[:, None] * rng.normal(size=z.shape[1])
    assert transfer_scores(adata, shifted, dataset, new)["new or old"] == 1
    exchanged = np.where(new[:, None], np.roll(z, 1, axis=1), z)
    assert transfer_scores(adata, exchanged, dataset, new)["y AUROC"] < 0.6


def test_plate_map_scores_is_equal_to_naive():
    rng, dataset = np.random.default_rng(0), DATASETS["simulated_screen_plates"]
    gene = np.repeat([*[f"G{i}" for i in range(8)], "nontargeting"], 120)
    guide, well = gene + "/" + rng.integers(2, size=1080).astype(str), rng.integers(6, size=1080).astype(str)
    obs = pd.DataFrame({"gene": gene, "sgRNA": guide, "well": well}, index=np.arange(1080).astype(str))
    net = pd.DataFrame({"source": ["a", "a", "b", "b"], "target": ["G0", "G1", "G2", "G3"]})
    cells = AnnData(obs=obs, uns={"truth": {"network": net}})
    z = rng.normal(size=(1080, 4)) + 0.6 * np.eye(9)[np.unique(gene, return_inverse=True)[1]] @ rng.normal(size=(9, 4))
    scores = plate_map_scores(cells, z, dataset)
    for name, label in {"guide": guide, "gene": gene}.items():
        profiles = pd.DataFrame(z).groupby([label, well]).mean()
        unit = profiles.to_numpy() / np.linalg.norm(profiles, axis=1, keepdims=True)
        labels, wells = (np.asarray(profiles.index.get_level_values(i)) for i in (0, 1))
        others, found, right = ~np.eye(len(unit), dtype=bool), [], []
        for row, cosines in enumerate(unit @ unit.T):
            same = (labels == labels[row])[others[row]]
            if not labels[row].startswith("nontargeting"):
                found.append(average_precision_score(same, cosines[others[row]]))
            near = wells[others[row]][np.argsort(-cosines[others[row]])[:20]]
            counts = [(near == one).sum() for one in pd.unique(wells)]
            right.append(pd.unique(wells)[np.argmax(counts)] == wells[row])
        assert scores[f"{name} mAP"] == pytest.approx(np.mean(found), abs=1e-6)
        if name == "guide":
            assert scores["well, 20 neighbours"] == pytest.approx(np.mean(right))
    of_guides = pd.DataFrame(z).groupby(guide).mean()
    of_genes = of_guides.groupby(of_guides.index.str.split("/").str[0]).mean()
    of_genes = (of_genes - of_genes.loc["nontargeting"]).drop(index="nontargeting")
    unit = of_genes.to_numpy() / np.linalg.norm(of_genes, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(8, 1)]
    ranks = {pair: (cosines < (unit @ unit.T)[pair]).sum() for pair in ((0, 1), (2, 3))}
    for n in (5, 10):
        tail = n / 100 * len(cosines)
        in_tails = [rank + 1 <= tail or rank + 1 > len(cosines) - tail for rank in ranks.values()]
        assert scores[f"recall at {n}"] == pytest.approx(np.mean(in_tails))


@pytest.fixture
def wells(tmp_path):
    cpjump1_table(n_compounds=130).to_parquet(tmp_path / "wells.parquet")
    return DATASETS["cpjump1"].load(tmp_path / "wells.parquet", 0, fold=0)


def test_profile_scores_perfect_embedding_is_one_noise_is_low(wells):
    dataset, rng = DATASETS["cpjump1"], np.random.default_rng(0)
    codes = wells.obs["Metadata_broad_sample"].cat.codes.to_numpy()
    perfect = rng.normal(size=(codes.max() + 1, 40))[codes]
    perfect[wells.obs["Metadata_broad_sample"] == "DMSO"] = rng.normal(
        size=((wells.obs["Metadata_broad_sample"] == "DMSO").sum(), 40)
    )
    scores = profile_scores(wells, perfect, dataset)
    assert scores["replicates unseen"] == scores["replicates seen"] == scores["across positions"] == 1
    assert scores["floor"] < 0.5 and scores["floor-corrected"] == 1
    noise = profile_scores(wells, rng.normal(size=(len(codes), 40)), dataset)
    assert noise["across positions"] < 0.1 and noise["mechanism"] < 0.4 and noise["e, linear, new"] < 0.4


def test_profile_scores_controls_at_training_positions_are_excluded(wells):
    dataset, rng = DATASETS["cpjump1"], np.random.default_rng(0)
    z = rng.normal(size=(wells.n_obs, 20))
    before = profile_scores(wells, z, dataset)
    control, learned = wells.obs["Metadata_broad_sample"] == "DMSO", wells.obs["split"] == "train"
    fitted = (control & wells.obs["Metadata_Well"].isin(wells.obs.loc[control & learned, "Metadata_Well"])).to_numpy()
    assert (fitted & ~learned).any()  # on new plates
    z[fitted] = 100 * rng.normal(size=(fitted.sum(), 20))
    assert profile_scores(wells, z, dataset) == before


def test_profile_scores_plate_is_predicted_from_new_wells_only(wells):
    """In training wells, an embedding that has memorised the compounds hides the plate."""
    dataset, rng = DATASETS["cpjump1"], np.random.default_rng(0)
    codes = wells.obs[dataset.e_key].cat.codes.to_numpy()
    z = np.eye(codes.max() + 1)[codes] + rng.normal(0, 0.01, (wells.n_obs, codes.max() + 1))
    learned = (wells.obs["split"] == "train").to_numpy()
    assert 0.2 < learned.mean() < 0.8
    z[learned] = rng.normal(size=z[learned].shape)
    scores = profile_scores(wells, z, dataset)
    assert scores["e, linear, new"] > 0.99 and scores["e, neighbours, new"] > 0.99


@pytest.mark.parametrize("name", TABLES)
def test_tables_each_correction_is_fitted_on_given_rows_only(wells, name):
    if name == "Harmony":
        pytest.importorskip("harmonypy", reason="harmonypy (extra benchmark) is not installed")
    dataset, fit = DATASETS["cpjump1"], (wells.obs["split"] == "train").to_numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        z = TABLES[name](Table(wells, dataset, fit))
        assert len(z) == wells.n_obs and np.isfinite(z).all()
        if name in ("scaled", "sphering", "WCCN", "LDA", "PLDA"):
            wells.X[~fit] += np.random.default_rng(0).normal(size=wells.X[~fit].shape).astype(np.float32)
            other = TABLES[name](Table(wells, dataset, fit))
            np.testing.assert_allclose(other[fit], z[fit], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings"), [("sphering", {}), ("TVN", {}), ("WCCN", {}), ("standardised", {"on_controls": True})]
)
def test_tables_controls_used_as_negatives_do_not_affect_fit(wells, name, settings):
    """This also holds on new plates: negatives used in the fit would be distinguishable."""
    dataset, fit = DATASETS["cpjump1"], (wells.obs["split"] == "train").to_numpy()
    scored = ((wells.obs["Metadata_broad_sample"] == "DMSO") & ~wells.obs["known_position"]).to_numpy()
    z = TABLES[name](Table(wells, dataset, fit), **settings)
    wells.X[scored] += np.random.default_rng(0).normal(size=wells.X[scored].shape).astype(np.float32)
    np.testing.assert_allclose(TABLES[name](Table(wells, dataset, fit), **settings)[~scored], z[~scored], atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*of the variance of the features")
def test_without_scored_controls_negatives_do_not_standardise_new_plate(wells):
    """Controls that are not used as negatives do standardise new plates."""
    dataset, rng = DATASETS["cpjump1"], np.random.default_rng(0)
    SCBDModel.setup_anndata(wells, **dataset.columns)
    model = SCBDModel(wells)
    model.train(split="split", **QUICK)
    control = (wells.obs["Metadata_broad_sample"] == "DMSO").to_numpy()
    new, known = (wells.obs[name].to_numpy() for name in ("new_plate", "known_position"))

    def embedded() -> np.ndarray:
        told = without_scored_controls(wells, dataset)
        return model.get_latent_representation(told, center=None)[new & ~control]

    before = embedded()
    for chosen, matter in ((new & control & ~known, False), (new & known, True)):
        wells.X[chosen] += rng.normal(2, 1, size=wells.X[chosen].shape).astype(np.float32)
        assert (embedded() != before).any() == matter
    assert wells.obs["Metadata_broad_sample"].notna().all()


def test_across_environments_label_embedding_returns_one(tmp_path):
    breinig2015_table(n=1200).to_parquet(tmp_path / "cells.parquet")
    dataset = DATASETS["breinig2015"]
    cells = dataset.load(tmp_path / "cells.parquet", 0, fold=0)
    codes = cells.obs["target"].cat.codes.to_numpy()
    told = across_environments(
        cells, np.eye(5)[codes] + 0.01 * np.random.default_rng(0).normal(size=(1200, 5)), dataset
    )
    assert told["y across e"] == 1 and told["y chance"] == 0.2 and told["e, linear"] < 0.6
