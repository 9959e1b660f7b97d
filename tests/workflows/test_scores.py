from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd.metrics import label_probe
from scbd.workflows import generalization_scores
from scbd.workflows._authors_probe import unstandardised_f1
from scbd.workflows._scores import correction_scores


class Model:
    """Its representation tells y; and e, with the environments of no part far away."""

    can_predict = True

    def __init__(self, adata: AnnData) -> None:
        codes = adata.obs[["y", "e"]].astype(int).to_numpy(np.float32)
        self.train_indices = np.flatnonzero(adata.obs["split"].isin(["train", "training"]))
        self.r = codes + np.random.default_rng(0).normal(0, 0.05, codes.shape).astype(np.float32)

    def get_latent_representation(self, representation: str) -> np.ndarray:
        return self.r

    def predict(self) -> np.ndarray:
        """The head that learned with the encoder, which sees less."""
        return np.where(self.r[:, 1] < 2.5, self.r[:, 0].round().astype(int), 0).astype(str)


@pytest.mark.parametrize("part", ["ood_validation", "nowhere"])
def test_cells_of_another_part_are_neither_in_nor_out(part):
    rng = np.random.default_rng(1)
    split = np.repeat(["train", "validation", "test", part], [200, 100, 100, 400])
    e = np.select([split == "test", split == part], [2, 3], rng.integers(2, size=800))
    obs = pd.DataFrame({"y": rng.integers(2, size=800).astype(str), "e": e.astype(str), "split": split})
    adata = AnnData(obs=obs.set_index(obs.index.astype(str)))
    scores = generalization_scores(adata, Model(adata), y_key="y", e_key="e")  # type: ignore[arg-type]
    assert scores["r_c in"] == scores["r_c out"] == 1 and scores["e from r_c"] == 1
    assert scores["own in"] == scores["own out"] == 1
    # of the two environments that were trained on; the other part would be the largest by far
    seen = obs.loc[obs["split"].isin(["train", "validation"]), "e"]
    assert scores["e chance"] == pytest.approx(seen.value_counts(normalize=True).max())


def parts_of(names: list[str], n: int = 300) -> AnnData:
    rng = np.random.default_rng(0)
    obs = pd.DataFrame({"y": rng.integers(2, size=n), "e": rng.integers(2, size=n)}).astype(str)
    obs["split"] = np.resize(np.array(names, dtype=object), n)
    return AnnData(obs=obs.set_index(obs.index.astype(str)))


@pytest.mark.parametrize(
    "names", [["training", "val", "test"], ["Train", "valid", "TEST"], ["train", "validation", None]]
)
def test_parts_have_the_names_that_training_takes(names):
    """In distribution was NaN without a word, or scoring failed after training."""
    adata = parts_of(names)
    scores = generalization_scores(adata, Model(adata), y_key="y", e_key="e")  # type: ignore[arg-type]
    assert scores["r_c in"] == scores["own in"] == scores["e from r_c, new"] == 1
    assert np.isnan(scores["r_c out"]) == (names[2] is None)


def test_environments_are_also_read_from_cells_that_were_not_learned_from():
    adata = parts_of(["train", "validation", "test"])
    model = Model(adata)
    known = adata.obs["split"].eq("train").to_numpy()
    model.r[known] = model.r[known] * [1, 0]  # of its own cells it hides the environment
    scores = generalization_scores(adata, model, y_key="y", e_key="e")  # type: ignore[arg-type]
    assert scores["e from r_c, new"] == 1 and scores["e from r_c"] < 0.9
    e = adata.obs["e"][adata.obs["split"] == "validation"]
    assert scores["e chance, new"] == pytest.approx(e.value_counts(normalize=True).max())


def test_one_environment_among_new_cells_is_not_read():
    adata = parts_of(["train", "validation", "test"])
    adata.obs.loc[adata.obs["split"] == "validation", "e"] = "0"
    scores = generalization_scores(adata, Model(adata), y_key="y", e_key="e")  # type: ignore[arg-type]
    assert np.isnan(scores["e from r_c, new"]) and scores["e chance, new"] == 1 and scores["e from r_c"] > 0.9


def test_a_model_that_knows_the_test_cells_is_not_scored():
    adata = parts_of(["train", "validation", "test"])
    model = Model(adata)
    model.train_indices = np.arange(adata.n_obs)
    with pytest.raises(ValueError, match=r"trained on 100 of 100 test cells: train\(split='split'\) first"):
        generalization_scores(adata, model, y_key="y", e_key="e")  # type: ignore[arg-type]


def test_rows_of_batch_correction_split_cells_one_by_one():
    """As all rows did that are published: guides would be held out by default."""
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


def test_genes_are_averaged_guide_by_guide_where_guides_are_known():
    """A guide with most of the cells has no more say than another."""
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
