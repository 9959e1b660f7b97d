from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import make_cells
from small_models import QUICK, make_model

from scbd import SCBDModel

pytestmark = pytest.mark.filterwarnings("ignore:z_c has collapsed")


@pytest.fixture(scope="module")
def decoded() -> SCBDModel:
    model = make_model()
    model.train(**QUICK | {"max_steps": 60, "lr": 1e-3})
    model.train_decoder(**QUICK | {"max_steps": 150, "lr": 3e-3}, width=8, likelihood="gaussian")
    return model


def test_a_path_begins_at_the_cell_and_ends_with_the_perturbation(decoded):
    """Perturbations are brightness: from the darkest to the brightest, each step is brighter than the one before."""
    rows = np.flatnonzero(decoded.adata.obs["gene"] == "gene_0")[:6]
    images = decoded.traverse(rows, "gene_3", n_steps=4)
    assert images.shape == (6, 4, 2, 16, 16) and images.dtype == np.float32
    np.testing.assert_allclose(images[:, 0], decoded.reconstruct(indices=rows), atol=1e-5)
    brightness = images[..., 8:].mean((0, 2, 3, 4))
    assert (np.diff(brightness) > 0).all()
    there = decoded.reconstruct(indices=np.flatnonzero(decoded.adata.obs["gene"] == "gene_3"))[..., 8:].mean()
    assert abs(brightness[-1] - there) < 0.25 * (there - brightness[0])


def test_z_c_moves_by_the_difference_of_the_means_and_z_s_stays(decoded):
    adata, row = decoded.adata, int(np.flatnonzero(decoded.adata.obs["gene"] == "gene_1")[0])
    z_c, z_s = (decoded.get_latent_representation(block=block) for block in "cs")
    mean = {name: z_c[(adata.obs["gene"] == name).to_numpy()].mean(0) for name in ("gene_1", "gene_2")}
    end = z_c[row] + mean["gene_2"] - mean["gene_1"]
    expected = decoded.decode((end / np.linalg.norm(end))[None], z_s[[row]])
    np.testing.assert_allclose(decoded.traverse([row], "gene_2", n_steps=2)[:, -1], expected, atol=1e-5)


def test_to_its_own_perturbation_nothing_changes(decoded):
    rows = np.flatnonzero(decoded.adata.obs["gene"] == "gene_2")[:2]
    images = decoded.traverse(rows, "gene_2", n_steps=3)
    np.testing.assert_allclose(images, np.repeat(images[:, :1], 3, axis=1), atol=1e-5)


def test_new_cells_have_means_of_their_own(decoded):
    new = make_cells(24, seed=5)
    assert decoded.traverse([0, -1], "gene_3", new).shape == (2, 5, 2, 16, 16)


def test_a_single_block():
    model = make_model(style_target=None)
    model.train(**QUICK)
    model.train_decoder(**QUICK, width=4)
    assert model.traverse([0], "gene_1").shape == (1, 5, 2, 16, 16)


def test_no_cells_make_no_pictures(decoded):
    none: tuple[Any, ...] = ([], np.zeros(decoded.adata.n_obs, dtype=bool))
    for nobody in none:
        assert decoded.traverse(nobody, "gene_1", n_steps=3).shape == (0, 3, 2, 16, 16)


@pytest.mark.parametrize("stored", [int, float])
def test_labels_that_are_numbers(decoded, stored):
    """A whole number has one name, however it is stored and asked for."""
    expected = decoded.traverse([0, 1], "gene_2", n_steps=2)
    adata = decoded.adata.copy()
    adata.obs["gene"] = adata.obs["gene"].str.removeprefix("gene_").astype(stored)
    for to in (2, 2.0, np.int64(2), "2"):
        np.testing.assert_allclose(decoded.traverse([0, 1], to, adata, n_steps=2), expected, atol=1e-5)
    with pytest.raises(KeyError, match="to=4: no cell has this perturbation. Those of 'gene' are 0, 1, 2, 3"):
        decoded.traverse([0, 1], 4, adata)


def test_bad_input(decoded):
    with pytest.raises(KeyError, match=r"to='gene_9': no cell has this perturbation. Those of 'gene' are gene_0"):
        decoded.traverse([0], "gene_9")
    with pytest.raises(ValueError, match="n_steps=1: give a whole number, 2 or larger"):
        decoded.traverse([0], "gene_1", n_steps=1)
    with pytest.raises(ValueError, match="There is no decoder"):
        make_model().traverse([0], "gene_1")
    new = make_cells(8)
    del new.obs["gene"]
    with pytest.raises(KeyError, match="gene"):
        decoded.traverse([0], "gene_1", new)
