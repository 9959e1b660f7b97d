from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from scbd.metrics import generalization, label_probe, replicate_retrieval, summarise

KEYS: dict[str, Any] = {"y_key": "y", "e_key": "e"}
N_LABELS, N_ENVIRONMENTS = 5, 4


def screen(n: int = 600, seed: int = 0) -> AnnData:
    """Cells of five perturbations, each with three guides, the first being controls, in four environments."""
    rng = np.random.default_rng(seed)
    y, e, guide = (rng.integers(size, size=n) for size in (N_LABELS, N_ENVIRONMENTS, 3))
    noise = 0.1 * rng.normal(size=(n, N_LABELS))
    rotated = np.eye(N_LABELS)[(y + 2 * e) % N_LABELS]  # a label lies elsewhere in each environment
    by_guide = np.eye(N_LABELS)[(y + 2 * guide) % N_LABELS]
    obs = pd.DataFrame({"y": y, "e": e, "guide": guide}).astype(str).set_index(pd.RangeIndex(n).astype(str))
    obsm = {"blind": np.eye(N_LABELS)[y] + noise, "rotated": rotated + noise, "by guide": by_guide + noise}
    return AnnData(obs=obs, obsm=obsm | {"point": np.ones((n, 3))})


def value(frame: pd.DataFrame, key: str, metric: str) -> pd.Series:
    return frame[(frame["key"] == key) & (frame["metric"] == metric)].set_index("fold")["value"]


def test_blind_embeddings_generalise_and_those_that_turn_with_the_environment_do_not():
    adata = screen()
    frame = generalization(adata, {"good": "blind", "bad": ["rotated", "by guide"]}, guide_key="guide", **KEYS)
    assert (value(frame, "blind", "guide_linear_f1") == 1).all()
    for kind in ("linear", "nearest_mean"):
        assert (value(frame, "blind", f"environment_{kind}_f1") == 1).all()
        assert value(frame, "rotated", f"environment_{kind}_f1").mean() < 0.3
        assert (value(frame, "rotated", f"guide_{kind}_f1") > 0.1).all()
        assert (value(frame, "by guide", f"environment_{kind}_auroc") > 0.5).all()
        assert value(frame, "by guide", f"guide_{kind}_f1").mean() < 0.35
    assert value(frame, "blind", "environment_linear_f1").index.to_list() == ["0", "1", "2", "3"]
    assert (frame["n_labels"] == N_LABELS).all() and frame["value"].notna().all()
    chance = frame[frame["metric"].str.endswith("f1")]["chance"]
    assert chance.between(0.05, 0.35).all()
    mean = summarise(frame).set_index(["metric", "representation"])
    assert mean.loc[("environment_linear_f1", "bad"), "n"] == 2 and mean.loc[("guide_linear_f1", "good"), "mean"] == 1


def test_noise_and_a_point_are_at_chance():
    adata = screen(900)
    adata.obsm["noise"] = np.random.default_rng(1).normal(size=(900, 3))
    frame = generalization(adata, ["noise", "point"], **KEYS)
    apart = (frame["value"] - frame["chance"]).groupby([frame["key"], frame["metric"]]).mean()
    assert (apart.abs() < 0.04).all()


def test_a_fold_is_a_probe():
    adata = screen()
    frame = generalization(adata, ["rotated"], classifiers=["linear", "quadratic"], seed=3, **KEYS)
    is_held = (adata.obs["e"] == "2").to_numpy()
    for kind in ("linear", "quadratic"):
        probe = label_probe(adata.obsm["rotated"], adata.obs["y"].to_numpy(), kind=kind, train=~is_held, seed=3)
        row = frame[(frame["fold"] == "2") & (frame["metric"] == f"environment_{kind}_f1")].iloc[0]
        assert (row["value"], row["chance"]) == (probe["f1"], probe["chance_f1"])
        assert value(frame, "rotated", f"environment_{kind}_auroc")["2"] == probe["auroc"]


def test_many_environments_are_held_out_in_sets():
    adata = screen()
    adata.obs["e"] = (np.arange(600) % 30).astype(str)
    frame = generalization(adata, ["blind"], n_folds=3, classifiers=["nearest_mean"], **KEYS)
    assert frame["fold"].unique().tolist() == ["1 of 3", "2 of 3", "3 of 3"] and (frame["value"] == 1).all()
    part = generalization(adata, ["rotated"], n_folds=3, max_cells=200, classifiers=["nearest_mean"], **KEYS)
    again = generalization(adata, ["rotated"], n_folds=3, max_cells=200, classifiers=["nearest_mean"], **KEYS)
    assert part.equals(again)
    whole = generalization(adata, ["rotated"], n_folds=3, classifiers=["nearest_mean"], **KEYS)
    assert not part["value"].equals(whole["value"])


def test_labels_of_one_environment_are_not_asked_for(caplog):
    adata = screen()
    adata.obs.loc[adata.obs["e"] == "0", "y"] = "alone"  # an environment of its own
    adata.obs.loc[adata.obs["e"] == "1", "y"] = adata.obs["y"].where(adata.obs["y"] != "4", "also alone")
    frame = generalization(adata, ["blind"], classifiers=["nearest_mean"], **KEYS)
    assert frame["fold"].unique().tolist() == ["1", "2", "3"]
    assert "1 of 4 folds by environments of 'e' share no two labels with the others: left out" in caplog.text
    assert frame.groupby("fold")["n_labels"].first().to_list() == [4, 5, 5]
    assert (frame["value"] == 1).all()


def test_guides_of_one_name_are_those_of_their_perturbation():
    """A perturbation of few guides is held out in some folds, and one of a single guide in none."""
    adata = screen()
    one_guide = adata.obs["y"] == "1"
    adata.obs.loc[one_guide, "guide"] = "0"
    frame = generalization(adata, ["by guide"], guide_key="guide", classifiers=["nearest_mean"], **KEYS)
    folds = frame[frame["held_out"] == "guide"]
    assert folds["fold"].unique().tolist() == ["1 of 3", "2 of 3", "3 of 3"] and (folds["n_labels"] == 4).all()


def trained(adata: AnnData) -> np.ndarray:
    """Perturbations 1 and 2, mostly, and some controls."""
    return adata.obs["y"].isin(["0", "1", "2"]).to_numpy() & (np.arange(adata.n_obs) % 3 > 0)


def test_replicates_of_perturbations_that_were_not_trained_on():
    adata, is_trained = screen(), trained(screen())
    unseen = adata.obs["y"].isin(["3", "4"]).to_numpy()
    good = adata.obsm["blind"]
    adata.obsm["memory"] = np.where(is_trained[:, None], good, np.random.default_rng(0).normal(size=good.shape))
    adata.obsm["names"] = np.where(unseen[:, None], np.random.default_rng(0).normal(size=good.shape), good)
    how: dict[str, Any] = {"control": "0", "classifiers": ["nearest_mean"]}
    frame = generalization(adata, ["blind", "memory", "names", "point"], trained_on=is_trained, **how, **KEYS)
    found = frame[frame["held_out"] == "perturbation"].set_index(["key", "fold"])
    assert found.loc["blind", "value"].to_list() == pytest.approx([1, 1, 1])
    above = (found["value"] - found["chance"]).unstack()
    assert above.loc["memory", "trained_on"] > 0.2 > 0.1 > above.loc["memory", ["seen", "unseen"]].max()
    assert above.loc["names", ["trained_on", "seen"]].min() > 0.2 > 0.1 > above.loc["names", "unseen"]
    assert above.loc["point"].abs().max() < 1e-9
    assert found.loc["blind", "n_labels"].to_dict() == {"trained_on": 2, "seen": 2, "unseen": 2}
    # the same negatives for all: controls that were not trained on
    kept = unseen | ((adata.obs["y"] == "0").to_numpy() & ~is_trained)
    alone = replicate_retrieval(adata[kept].copy(), "names", control="0", n_permutations=1, **KEYS)
    assert found.loc[("names", "unseen"), "value"] == alone.mean_average_precision
    for column in (is_trained, np.where(is_trained, "train", "test")):
        adata.obs["split"] = column
        assert generalization(adata, ["blind", "memory", "names", "point"], trained_on="split", **how, **KEYS).equals(
            frame
        )


def test_what_is_unseen_does_not_depend_on_the_subset():
    """Of each of forty perturbations one row in twenty was trained on: a subset holds such rows of few of them."""
    label, row = np.divmod(np.arange(1000), 20)
    obs = pd.DataFrame({"y": label, "e": np.arange(1000) % N_ENVIRONMENTS}, index=np.arange(1000).astype(str))
    adata = AnnData(obs=obs, obsm={"z": np.random.default_rng(0).normal(size=(1000, 2))})
    how: dict[str, Any] = {"trained_on": (row == 0) & (label < 40), "control": 49, "classifiers": ["nearest_mean"]}
    for max_cells in (None, 300):
        frame = generalization(adata, ["z"], max_cells=max_cells, **how, **KEYS).set_index("metric")
        assert frame.loc["replicates_unseen", "n_labels"] == 9
    with pytest.raises(ValueError, match="The random subset of 20 rows lacks unseen perturbations, or controls"):
        generalization(adata, ["z"], max_cells=20, **how, **KEYS)


def test_an_embedding_that_was_trained_on_all_controls():
    adata = screen()
    is_trained = adata.obs["y"].isin(["0", "1"]).to_numpy()
    how: dict[str, Any] = {"control": ["0"], "classifiers": ["nearest_mean"], "trained_on": is_trained}
    with pytest.warns(UserWarning, match="Negatives were used in the fit"):
        frame = generalization(adata, ["blind"], **how, **KEYS)
    assert frame.loc[frame["held_out"] == "perturbation", "fold"].to_list() == ["trained_on", "unseen"]


def test_bad_input_gets_a_sentence():
    adata = screen(100)
    for key, message in {
        "one": "Every row is in the one environment '0'",
        "y": "No fold by environments of 'y' shares two",
    }.items():
        adata.obs["one"] = "0"
        with pytest.raises(ValueError, match=message):
            generalization(adata, ["blind"], y_key="y", e_key=key)
    with pytest.raises(ValueError, match="No fold by guides of 'one' shares two"):
        generalization(adata, ["blind"], guide_key="one", **KEYS)
    with pytest.raises(ValueError, match="trained_on needs control, the value of 'y'"):
        generalization(adata, ["blind"], trained_on=[1], **KEYS)
    with pytest.raises(ValueError, match="Every perturbation has a row in trained_on"):
        generalization(adata, ["blind"], trained_on=np.ones(100, dtype=bool), control="0", **KEYS)
    with pytest.raises(ValueError, match=r"No row of obs\['one'\] says True or 'train'"):
        generalization(adata, ["blind"], trained_on="one", control="0", **KEYS)
    with pytest.raises(ValueError, match="n_folds=1: give"):
        generalization(adata, ["blind"], n_folds=1, **KEYS)
    with pytest.raises(ValueError, match="kind='cubic' is not known"):
        generalization(adata, ["blind"], classifiers=["cubic"], **KEYS)  # type: ignore[list-item]
    with pytest.raises(KeyError, match="obs has no 'z'"):
        generalization(adata, ["blind"], y_key="z", e_key="e")
    adata.obs.loc["3", "y"] = np.nan
    with pytest.raises(ValueError, match=r"obs\['y'\] has no value for 1 of 100 cells"):
        generalization(adata, ["blind"], **KEYS)
    adata.obs.loc["3", "y"] = "1"
    adata.obsm["blind"][7] = np.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        generalization(adata, ["blind"], **KEYS)
