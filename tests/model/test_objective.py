from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small_models import QUICK, make_model
from torch._subclasses.fake_tensor import FakeTensorMode

import scbd
from scbd import SCBDModel
from scbd.model._interfaces import PreparedInputs, ReferenceBatches
from scbd.nn import supervised_contrastive_loss
from scbd.nn._contrastive import normalised_supervised_information
from scbd.nn._encoders import on_sphere
from scbd.nn._log_sum_exp import log_sum_exp

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")

supervised = partial(supervised_contrastive_loss, include_self=False)


def dimmed(model: SCBDModel, images: torch.Tensor, e: torch.Tensor) -> PreparedInputs:
    """Make the images of an environment dim, and what a model that was told is to make of all."""
    images[e == 1] //= 4
    codes = e[:, None].numpy()
    model.module.estimate_environment_statistics(
        ReferenceBatches(lambda: [images], codes, np.ones_like(codes, dtype=bool))
    )
    whole = model.module.preprocess(images)
    assert model.module.preprocess.environments is not None
    within = model.module.preprocess.environments(whole, e[:, None])
    assert (within[e == 1] - whole[e == 1]).abs().mean() > 0.1
    return PreparedInputs(whole, within)


def test_style_target_ye_clusters_z_s_by_pairs(cells):
    model = make_model(cells, style_target="ye", n_latent=8, augment=False)
    images, y, e = (torch.randint(0, 255, (12, 2, 16, 16)).byte(), torch.arange(12) % 4, torch.arange(12) % 3)
    prepared = dimmed(model, images, e)
    losses = model.module(images, y, e)
    z_s = model.module.style(prepared.whole)
    expected = supervised(z_s, 3 * y + e)
    assert len((3 * y + e).unique()) == 12
    torch.testing.assert_close(losses.parts["supervised_s"], expected)


def test_smoothing_applies_to_loss_of_z_c_only(cells):
    model = make_model(cells, alpha=0, smoothing=0.5, augment=False)
    images, y, e = (torch.randint(0, 255, (12, 2, 16, 16)).byte(), torch.arange(12) % 4, torch.arange(12) % 3)
    prepared = dimmed(model, images, e)
    losses = model.module(images, y, e)
    z_c, z_s = model.module.content(prepared.within), model.module.style(prepared.whole)
    style, smoothed = (
        supervised(z_s, e),
        supervised(z_c, y, smoothing=0.5),
    )
    torch.testing.assert_close(losses.loss, smoothed + style)
    # what is logged can be read beside the ceiling
    torch.testing.assert_close(losses.parts["supervised_c"], supervised(z_c, y))
    torch.testing.assert_close(losses.parts["supervised_s"], style)
    torch.testing.assert_close(
        losses.parts["learned_s"], normalised_supervised_information(style, e, include_self=False)
    )


def test_invariance_variance_uses_every_stage_of_encoder(cells):
    model = make_model(cells, alpha=0.5, smoothing=0, augment=False)
    images, y, e = (torch.randint(0, 255, (40, 2, 16, 16)).byte(), torch.arange(40) % 4, torch.arange(40) % 3)
    prepared = dimmed(model, images, e)
    losses = model.module(images, y, e)
    h, passed = model.module.content.forward_with_intermediates(prepared.within)
    assert [p.shape[1] for p in passed] == [32, 64, 128, 256]
    expected = scbd.nn.invariance_statistic([*passed, on_sphere(h)], e, y)
    torch.testing.assert_close(losses.parts["invariance_c"], expected)
    supervised = losses.parts["supervised_c"] + losses.parts["supervised_s"]
    torch.testing.assert_close(losses.loss, supervised + 0.5 * expected)
    model.train(**QUICK)
    assert np.isfinite(model.history["train_invariance_c"].to_numpy(dtype=float)).all()


def test_set_size_averages_projections_before_scaling(cells):
    """The supervised loss matches means of projections, with cells beside them; the statistic looks at cells."""
    model = make_model(cells, alpha=0.5, smoothing=0.1, set_size=3, style_target=None, augment=False)
    images, y, e = (torch.randint(0, 255, (36, 2, 16, 16)).byte(), torch.arange(36) % 4, torch.arange(36) % 3)
    prepared = dimmed(model, images, e)
    losses = model.module(images, y, e)
    h, passed = model.module.content.forward_with_intermediates(prepared.within)
    means = torch.stack([h[y == label][first : first + 3].mean(0) for label in range(4) for first in (0, 3, 6)])
    z = torch.nn.functional.normalize(means, dim=1)
    of_sets = supervised(z, torch.arange(4).repeat_interleave(3)) + 0.5 * supervised(on_sphere(h), y, smoothing=0.1)
    statistic = scbd.nn.invariance_statistic([*passed, on_sphere(h)], e, y)
    torch.testing.assert_close(losses.loss, of_sets + 0.5 * statistic)
    assert losses.z_c.shape == (36, 6)
    plain = supervised(z, torch.arange(4).repeat_interleave(3))
    torch.testing.assert_close(losses.parts["supervised_c"], plain)
    model.train(**QUICK)
    # as many sets as are left of a batch
    assert 0 < model.health["ceiling"] < np.log(QUICK["batch_size"])


def test_set_size_contrastive_invariance_uses_single_cells(cells):
    how: dict[str, Any] = {"alpha": 0.5, "smoothing": 0, "style_target": None, "augment": False}
    model = make_model(cells, invariance="listing", set_size=3, **how)
    images, y, e = (torch.randint(0, 255, (36, 2, 16, 16)).byte(), torch.arange(36) % 4, torch.arange(36) % 3)
    prepared = dimmed(model, images, e)
    z_c = model.module.content(prepared.within)
    expected = scbd.nn.invariance_loss(z_c, e, include_self=False)
    torch.testing.assert_close(model.module(images, y, e).parts["invariance_c"], expected)


def test_losses_of_z_c_share_softmax_denominators(monkeypatch):
    calls = []

    def counted(*args):
        calls.append(args)
        return log_sum_exp(*args)

    monkeypatch.setattr("scbd.model._objective.log_sum_exp", counted)
    make_model().train(**QUICK | {"max_steps": 1}, train_size=1.0)
    # z_c, z_s, and z_c once more for its health after training
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("how", "n"),
    [({}, 3), ({"style_target": "ye"}, 3), ({"invariance": "listing", "alpha": 1.0, "style_target": None}, 2)],
)
def test_losses_count_labels_once_per_step(cells, monkeypatch, how, n):
    """Of y, of e and of their pair: a GPU has to finish all it was given before it counts."""
    module = make_model(cells, **how).module
    images, y, e = (torch.randint(0, 255, (12, 2, 16, 16)).byte(), torch.arange(12) % 4, torch.arange(12) % 3)
    counted, unique = [], np.unique

    def noted(labels, **given):
        counted.append(labels)
        return unique(labels, **given)

    monkeypatch.setattr("scbd.nn._groups.np.unique", noted)
    module(images, y, e)
    assert len(counted) == n


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"alpha": -1}, "alpha=-1: give a number, 0 or larger"),
        ({"alpha": float("nan")}, "alpha=nan: give a number, 0 or larger"),
        ({"set_size": 0}, "set_size=0"),
        ({"n_latent": 0}, "n_latent=0: give a whole number, 1 or larger"),
        ({"n_latent": "64"}, "n_latent='64': give a whole number, 1 or larger"),
        ({"temperature": 0}, "temperature must be a number above 0.0029"),
        ({"temperature": float("inf")}, "temperature must be a number above .* got inf"),
        ({"alpha": "much"}, "alpha='much' is not known: give a number, or 'auto'"),
        ({"alpha": "auto", "invariance": "listing"}, "alpha='auto' knows the scale of invariance='variance'"),
        ({"smoothing": 1}, "smoothing is a probability below 1, at which labels say nothing; got 1"),
        ({"style_target": "y"}, "style_target='y' is not known"),
        ({"invariance": "mean", "alpha": 1}, "invariance='mean' is not known: use 'variance', 'listing', 'formula'"),
        ({"encoder": "vgg"}, "There is no encoder 'vgg'"),
    ],
)
def test_module_invalid_settings_raise(kwargs, said):
    with pytest.raises(ValueError, match=said):
        make_model(**kwargs)


def test_style_target_none_has_no_z_s_and_half_the_parameters(cells):
    single, double = make_model(cells, style_target=None), make_model(cells)
    n_single, n_double = (sum(p.numel() for p in m.module.parameters()) for m in (single, double))
    assert 2 * n_single == n_double
    single.train(**QUICK)
    assert not any("supervised_s" in name for name in single.history)
    assert "z_c alone" in repr(single) and "z_s" not in repr(single)
    with pytest.raises(ValueError, match="has a single block, which carries the perturbation: use block='c'"):
        single.get_latent_representation(block="s")


def test_label_codes_are_used_on_device_of_labels(cells):
    """The health of a model on a GPU is measured on labels that never left the processor."""
    module = make_model(cells).module
    with FakeTensorMode():
        module.covariates = torch.zeros(3, 2, dtype=torch.int64, device="cuda")
        labels = torch.zeros(4, dtype=torch.int64)
        assert module.columns(labels).device.type == "cpu"
