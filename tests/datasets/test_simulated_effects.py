from __future__ import annotations

import numpy as np
import pytest

from scbd import datasets

_SCREEN = {"n_complexes": 2, "genes_per_complex": 2, "guides_per_gene": 1, "n_wells": 2, "image_size": 24, "seed": 3}


def test_the_effect_is_the_difference_that_many_cells_show():
    screen = datasets.simulated_screen(6000, control_fraction=0.4, effect_size=1.5, well_effect=0.5, **_SCREEN)
    effect = datasets.simulated_effect(screen.uns["truth"], "GENE1", "P1_W2", image_size=24)
    images = screen.obsm["single_cell_images"].astype(np.float64)
    here = (screen.obs["well"] == "P1_W2").to_numpy()
    of_gene, controls = (here & (screen.obs["gene"] == name).to_numpy() for name in ("GENE1", "nontargeting"))
    seen = images[of_gene].mean(0) - images[controls].mean(0)
    assert effect.shape == (4, 24, 24) and effect.dtype == np.float32
    assert np.corrcoef(effect.ravel(), seen.ravel())[0, 1] > 0.95
    assert 0.8 < np.abs(effect).mean() / np.abs(seen).mean() < 1.25


def test_density_and_strength_of_the_well_count():
    setting = _SCREEN | {"n_wells": 12, "plate_wells": 6}
    truth = datasets.simulated_screen(50, interaction=1.0, density_effect=2.0, **setting).uns["truth"]
    strongest, weakest = (truth["strengths"].sum(axis=1).sort_values().index[i] for i in (-1, 0))
    loud, quiet = (
        np.abs(datasets.simulated_effect(truth, "GENE1", well, image_size=24)).mean() for well in (strongest, weakest)
    )
    assert loud > quiet
    alone = truth | {"wells": truth["wells"].assign(density=1.0)}
    one, other = (datasets.simulated_effect(t, "GENE1", strongest, image_size=24) for t in (truth, alone))
    assert not np.allclose(one, other)


def test_controls_do_nothing_and_names_are_known():
    truth = datasets.simulated_screen(50, **_SCREEN).uns["truth"]
    assert not datasets.simulated_effect(truth, "nontargeting", "P1_W1", image_size=24).any()
    with pytest.raises(KeyError, match="There is no gene 'GENE9' in this screen: it has 'GENE1' to 'nontargeting'"):
        datasets.simulated_effect(truth, "GENE9", "P1_W1", image_size=24)
    with pytest.raises(KeyError, match="There is no well 'P9'"):
        datasets.simulated_effect(truth, "GENE1", "P9", image_size=24)
