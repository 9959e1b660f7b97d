"""Compare relationships of genes and label probes with the evaluation in Genentech/SCBD."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from helpers.known_answers import Known, known_answers
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score

from scbd.metrics import aggregate, label_probe, predict_labels, relationship_area, relationship_curve


def profiles_and_sets() -> tuple[AnnData, pd.DataFrame]:
    known = known_answers("scbd_data")
    obs = pd.DataFrame({"guide": known["corum_cell_guide"], "gene": known["corum_cell_gene"]}).astype("category")
    obs.index = obs.index.astype(str)
    cells = AnnData(obs=obs, obsm={"z": known["corum_cells"]})
    pairs = [(f"set {i}", gene) for i, genes in enumerate(known["corum_sets"]) for gene in genes.split()]
    sets = pd.DataFrame(pairs, columns=["source", "target"])
    return aggregate(cells, "z", gene_key="gene", guide_key="guide"), sets


def test_aggregate_gene_profiles_are_equal_to_original():
    known = known_answers("scbd_data")
    profiles, _ = profiles_and_sets()
    found = profiles[known["corum_profile_genes"].tolist()].X
    np.testing.assert_allclose(found, known["corum_profiles"], rtol=0, atol=1e-6)


def test_relationship_curve_and_area_are_equal_to_original():
    known = known_answers("scbd_data")
    profiles, sets = profiles_and_sets()
    curve = relationship_curve(profiles, sets, percentiles=known["corum_percentiles"].tolist(), net_kind="sets")
    np.testing.assert_allclose(curve["precision"], known["corum_precision"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(curve["recall"], known["corum_recall"], rtol=0, atol=1e-12)
    assert relationship_area(curve) == pytest.approx(float(known["corum_auprc"]), abs=1e-12)
    # of 24 genes, pairs of a gene with itself are a twelfth of the pairs from which percentiles are taken
    of_pairs = relationship_curve(profiles, sets, diagonal=False, net_kind="sets")
    assert relationship_area(of_pairs) == pytest.approx(0.379, abs=5e-4)


def probe_embedding_and_wells(known: Known) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    labels = 6 * known["probe_plate"] + known["probe_well"]
    test = np.zeros(len(labels), dtype=bool)
    test[known["probe_test_rows"]] = True
    return known["probe_z"], labels, ~test


def original_probe_f1(z: np.ndarray, labels: np.ndarray, train: np.ndarray) -> float:
    """Return the F1 score of the original's probe, with the library that it uses."""
    fitted = LogisticRegression(max_iter=100).fit(z[train], labels[train])
    return float(f1_score(labels[~train], fitted.predict(z[~train]), average="macro"))


def test_label_probe_wells_standardised_differs_from_original_as_known():
    known = known_answers("scbd_data")
    z, labels, train = probe_embedding_and_wells(known)
    assert original_probe_f1(z, labels, train) == pytest.approx(float(known["probe_well_macro_f1"]), abs=1e-6)
    found = label_probe(z, labels, train=train)
    assert found["f1"] == pytest.approx(0.2486, abs=5e-4)
    assert found["auroc"] == pytest.approx(0.7076, abs=5e-4)
    assert found["auroc"] - float(known["probe_well_auroc"]) == pytest.approx(0.004, abs=5e-4)
    named = predict_labels(z[train], labels[train], z[known["probe_test_rows"]])
    assert np.mean(named == known["probe_test_prediction"]) == pytest.approx(0.85, abs=0.005)


def test_label_probe_smaller_scale_is_unchanged_unlike_original():
    z, labels, train = probe_embedding_and_wells(known_answers("scbd_data"))
    on_sphere = z / np.linalg.norm(z, axis=1, keepdims=True)
    large, small = (original_probe_f1(scale * on_sphere, labels, train) for scale in (1, 0.1))
    assert (large, small) == (pytest.approx(0.192, abs=5e-4), pytest.approx(0.096, abs=5e-4))
    ours = [label_probe(scale * on_sphere, labels, train=train)["f1"] for scale in (1, 0.1)]
    assert ours == pytest.approx([0.226, 0.226], abs=5e-4)


def test_label_probe_position_is_equal_to_original():
    known = known_answers("scbd_data")
    z, _, train = probe_embedding_and_wells(known)
    central = np.isin(known["probe_tile"], known["probe_center_tiles"])
    assert (central != np.isin(known["probe_tile"], known["probe_edge_tiles"])).all()
    f1 = f1_score(central[~train], predict_labels(z[train], central[train], z[~train]))
    assert f1 == pytest.approx(float(known["probe_position_f1"]), abs=1e-9)
    auroc = label_probe(z, central, train=train)["auroc"]
    assert auroc == pytest.approx(float(known["probe_position_auroc"]), abs=2e-4)
