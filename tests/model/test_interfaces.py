"""A system of a stranger's, for which the contract is enough; and alpha that follows what is learned."""

from __future__ import annotations

from typing import Any

import anndata
import lightning.pytorch as L
import numpy as np
import pandas as pd
import pytest
import scvi
import torch
from conftest import make_cells
from helpers.small_models import QUICK, PressCtrlC, assert_same, make_model, weights
from scvi.module.base import LossOutput

import scbd
from scbd import SCBDModel
from scbd.model import AutoAlpha, EmbeddingModule, ImageModel, Losses
from scbd.model._interfaces import Objective
from scbd.nn import Encoder, FeatureScaling, Preprocess
from scbd.nn._contrastive import normalised_supervised_information

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


class RidgeModule(EmbeddingModule):
    """Codes of the perturbation as numbers: of no use, and as short as can be."""

    def __init__(self, preprocess: Preprocess | FeatureScaling, encoder: str) -> None:
        super().__init__(preprocess)
        self.content = Encoder(encoder, preprocess.output_shape)
        self.head = torch.nn.Linear(self.content.n_features, 1)

    def forward(
        self,
        inputs: torch.Tensor,
        y: torch.Tensor,
        e: torch.Tensor,
        *,
        ramp: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Losses:
        error = (self.head(self.content(self.preprocess(inputs, generator)))[:, 0] - y).abs()
        return Losses(error.square().mean(), {"error": error.mean()})


class RidgeModel(ImageModel):
    def __init__(self, adata: Any = None, encoder: str = "small", registry: dict[str, Any] | None = None) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        self.module = RidgeModule(self._make_preprocess(), encoder)


def test_new_model_class_trains_saves_and_embeds(tmp_path):
    cells = make_cells()
    RidgeModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = RidgeModel(cells)
    model.train(**QUICK, checkpoint_dir=tmp_path / "run")
    assert {"train_loss", "train_error", "validation_error"} <= set(model.history or {})
    z = model.get_latent_representation()
    assert z.shape == (96, 256) and model.training_settings_["steps"] == QUICK["max_steps"]
    model.save(str(tmp_path / "model"))
    loaded = RidgeModel.load(str(tmp_path / "model"), cells)
    assert_same(weights(loaded), weights(model))
    np.testing.assert_array_equal(loaded.get_latent_representation(), z)
    with pytest.raises(ValueError, match="single block"):
        model.get_latent_representation(block="s")
    assert model.embed_to(tmp_path / "z.zarr").obsm["X_ridge_c"].shape == (96, 256)
    assert "RidgeModel: 96 cells" in repr(model)


def test_module_without_forward_raises_at_creation():
    class Forgotten(EmbeddingModule):
        pass

    with pytest.raises(TypeError, match="forward"):
        Forgotten(Preprocess((2, 16, 16), "uint8"))  # type: ignore[abstract]


class Partial(RidgeModel):
    """Made by somebody who forgot something, see :func:`make_partial`."""

    forward: Any = RidgeModule.forward
    forgets = ""

    def __init__(self, adata: Any = None, encoder: str = "small", registry: dict[str, Any] | None = None) -> None:
        ImageModel.__init__(self, adata, registry)
        if self.forgets != "init_params_":
            self.init_params_ = self._get_init_params(locals())
        if self.forgets != "module":
            module = type("PartialModule", (RidgeModule,), {"forward": type(self).forward})
            self.module = module(self._make_preprocess(), encoder)


def make_partial(**attributes: Any) -> Any:
    cls: Any = type("PartialModel", (Partial,), attributes)
    cells = make_cells()
    cls.setup_anndata(cells, y_key="gene", e_key="well")
    return cls(cells)


def without_ramp(self, inputs, y, e, *, generator=None):
    return RidgeModule.forward(self, inputs, y, e)


def without_default(self, inputs, y, e, ramp, generator):
    return RidgeModule.forward(self, inputs, y, e)


def with_other_names(self, x, y, e, *, ramp=1.0, generator=None):
    return RidgeModule.forward(self, x, y, e)


@pytest.mark.parametrize(
    ("forward", "named"), [(without_ramp, "'ramp'"), (without_default, "'ramp'"), (with_other_names, "'x'")]
)
def test_forward_with_other_arguments_raises_before_training(forward, named):
    model = make_partial(forward=forward)
    with pytest.raises(TypeError, match=rf"PartialModule.forward .*{named}.*ramp=1\.0, generator=None"):
        model.train(**QUICK)
    assert not model.module.preprocess.fitted


@pytest.mark.parametrize(
    "returned",
    [
        lambda losses: LossOutput(losses.loss, n_obs_minibatch=24),
        lambda losses: Losses(losses.loss.repeat(2)),
        lambda losses: Losses(losses.loss.detach()),
        lambda losses: Losses(losses.loss, {"error": 1.0}),  # type: ignore[dict-item]
        lambda losses: Losses(losses.loss, losses.loss),
        lambda losses: Losses(losses.loss, {"loss": losses.loss}),
        lambda losses: losses.loss,
        lambda losses: {"loss": losses.loss},
    ],
    ids=["LossOutput", "two losses", "no gradient", "number", "no names", "part called loss", "Tensor", "dict"],
)
def test_forward_without_losses_raises_with_remedy(returned):
    def forward(self, inputs, y, e, *, ramp=1.0, generator=None):
        return returned(RidgeModule.forward(self, inputs, y, e))

    model = make_partial(forward=forward)
    with pytest.raises(TypeError, match=r"PartialModule.forward returned .*: return scbd.model.Losses\(loss"):
        model.train(**QUICK)
    assert not model.is_trained


def test_module_without_content_raises_before_training():
    model = make_partial()
    del model.module.content
    with pytest.raises(AttributeError, match="PartialModule has no 'content': set it in the constructor"):
        model.train(**QUICK)
    assert not model.module.preprocess.fitted


@pytest.mark.parametrize("forgets", ["init_params_", "module"])
@pytest.mark.parametrize("call", [repr, lambda model: model.train(**QUICK), lambda model: model.save("model")])
def test_constructor_without_required_attribute_raises_with_remedy(forgets, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_partial(forgets=forgets)
    with pytest.raises(AttributeError, match=f"PartialModel has no '{forgets}': set it in the constructor"):
        call(model)
    assert not any(tmp_path.iterdir())


# ---- alpha="auto"


def rule_of(model: SCBDModel) -> AutoAlpha:
    assert model.module.alpha_rule is not None
    return model.module.alpha_rule


def alpha_of(seen: np.ndarray, kept: float) -> float:
    """The formula of the documentation."""
    learned, interaction, environment = seen
    w, shown, full = interaction**4 / (interaction**4 + 0.1**4), max(environment, 0) ** 2, 0.05 * learned * kept
    return w * full + (1 - w) * min(full, 0.005) * shown / (shown + 1)


def test_auto_alpha_increases_with_supervised_information(tmp_path, monkeypatch):
    of_known, validate = [], AutoAlpha.validate

    def watched(self, new, known):
        of_known.append(float(known.mean()))
        validate(self, new, known)

    monkeypatch.setattr(AutoAlpha, "validate", watched)
    model = make_model(alpha="auto", style_target=None, smoothing=0)
    assert "alpha auto" in repr(model)
    model.train(**QUICK | {"max_steps": 50, "lr": 3e-3, "batch_size": 48}, validate_every=1)
    h = {name: frame.iloc[:, 0].astype(float) for name, frame in model.history.items()}
    learned, alpha = h["train_learned_c"].to_numpy(), h["alpha"].to_numpy()
    assert alpha[0] == 0 and len(alpha) == 50
    of_batches = np.stack([learned.clip(min=0), *(h[f"train_{name}_c"] for name in ("interaction", "environment"))], 1)
    new_cells = h["validation_learned_c"].to_numpy()
    expected, mean, seen, kept = [], np.zeros(3), np.zeros(3), 1.0
    for batch, share_of_new, share_of_known in zip(of_batches, new_cells, of_known, strict=True):
        expected.append(alpha_of(seen, kept))
        mean += (batch - mean) / [50, 10, 50]
        seen[:] = mean[0], max(seen[1], mean[1]), mean[2]
        if share_of_known > 0.02:
            kept = min(max(share_of_new / share_of_known, 0), 1)
    expected.append(last := alpha_of(seen, kept))
    np.testing.assert_allclose(alpha, expected[:-1], atol=1e-6)
    assert alpha.max() > 0.002
    # that is what the statistic is weighed by
    np.testing.assert_allclose(h["train_loss"], h["train_supervised_c"] + alpha * h["train_invariance_c"], atol=1e-4)
    assert model.health["final_alpha"] == pytest.approx(last, rel=1e-3)
    assert f"alpha auto, {last:.2g} in the end" in repr(model)
    # it is saved with the weights, and what goes on with those goes on with it
    model.save(str(tmp_path / "model"))
    loaded: Any = SCBDModel.load(str(tmp_path / "model"), adata=model.adata)
    assert float(loaded.module.current_alpha) == pytest.approx(last, rel=1e-3)
    loaded.train(**QUICK | {"max_steps": 1}, validate_every=1)
    assert loaded.history["alpha"].iloc[-1, 0] == pytest.approx(last, rel=1e-3)


def test_auto_alpha_overfitted_model_stays_small():
    """Labels that images do not show: training cells are told apart all the same, new ones are not."""
    noise = make_cells(160)
    noise.obs["gene"] = np.random.default_rng(0).permutation(noise.obs["gene"])
    model = make_model(noise, alpha="auto", smoothing=0, style_target=None, augment=False)
    # half of them: what a handful of validation cells says differs between processors
    training = QUICK | {"max_steps": 300, "lr": 3e-3, "batch_size": 48, "train_size": 0.5, "validation_size": 0.5}
    with pytest.warns(UserWarning, match="overfitted the training cells"):
        model.train(**training, validate_every=100)
    rule = rule_of(model)
    assert float(rule.learned) > 0.1
    rule.most_interaction.fill_(1)  # where all of the dose is due
    assert float(rule.alpha) < 0.2 * 0.05 * float(rule.learned)


@pytest.mark.parametrize(
    "told", [[], [0.0, 0.0]], ids=["no validation batches", "validation batches whose labels say nothing"]
)
def test_auto_alpha_validate_ignores_uninformative_batches(told):
    alpha, some = scbd.model.AutoAlpha(), torch.tensor([0.1, 0.0, 0.1])
    for _ in range(50):
        alpha.observe(torch.tensor(0.5), torch.tensor(0.9), torch.tensor(0.0))
    before = float(alpha.alpha)
    alpha.validate(torch.tensor(told), some)
    alpha.validate(some, torch.tensor(told))
    assert float(alpha.alpha) == before > 0.01
    alpha.validate(some, torch.tensor([0.3, 0.0, 0.5]))
    assert float(alpha.alpha) == pytest.approx(before / 4)


def test_auto_alpha_validate_before_learning_changes_nothing():
    """A ratio of two numbers that are nearly zero says nothing."""
    alpha = scbd.model.AutoAlpha()
    alpha.validate(torch.tensor([0.001]), torch.tensor([0.019]))
    assert float(alpha.kept) == 1
    alpha.validate(torch.tensor([0.002]), torch.tensor([0.04]))
    assert float(alpha.kept) == pytest.approx(0.05)


def alpha_where(cells: np.ndarray, gene: np.ndarray, plate: np.ndarray, **kwargs: Any) -> SCBDModel:
    """Trained on features for a moment."""
    adata = anndata.AnnData(cells.astype("float32"))
    adata.obs["gene"], adata.obs["plate"] = pd.Categorical(gene.astype(str)), pd.Categorical(plate.astype(str))
    SCBDModel.setup_anndata(adata, y_key="gene", e_key="plate", layer="X")
    scvi.settings.seed = 0
    model = SCBDModel(adata, encoder="mlp", whitening=None, smoothing=0, style_target=None, **kwargs)
    model.train(**QUICK | {"max_steps": 60, "lr": 3e-3, "batch_size": 256})
    return model


def test_auto_alpha_equal_shift_of_all_labels_stays_small():
    rng = np.random.default_rng(0)
    gene, plate = rng.integers(8, size=4000), rng.integers(6, size=4000)
    cells = rng.normal(size=(4000, 16)) + 2 * rng.normal(size=(8, 16))[gene] + rng.normal(size=(6, 16))[plate]
    rule = rule_of(alpha_where(cells, gene, plate))
    assert float(rule.learned) > 0.2
    assert 0.0005 < float(rule.alpha) < 0.0055
    # plates that do nothing: next to nothing is paid
    cells = rng.normal(size=(4000, 16)) + 2 * rng.normal(size=(8, 16))[gene]
    assert float(rule_of(alpha_where(cells, gene, plate)).alpha) < 0.0005


def test_auto_alpha_interaction_reaches_full_weight():
    """High is one gene on the first plate, and another on the second; what is the same on both is weak."""
    rng = np.random.default_rng(0)
    gene, plate = rng.integers(8, size=4000), rng.integers(2, size=4000)
    shade = np.where(plate == 0, gene, 7 - gene)[:, None] / 2 + 0.1 * rng.normal(size=(4000, 8))
    cells = np.concatenate([shade, rng.normal(size=(4000, 8)) + 0.3 * rng.normal(size=(8, 8))[gene]], 1)
    model = alpha_where(cells, gene, plate)
    rule = rule_of(model)
    assert float(rule.alpha) > 0.7 * 0.05 * float(rule.learned * rule.kept) > 0.01
    free = alpha_where(cells, gene, plate, alpha=0)
    before, after = (m.history["train_interaction_c"].iloc[-1, 0] for m in (free, model))
    assert after < before / 2 > 0.05
    # also when it is gone
    for _ in range(50):
        rule.observe(rule.learned.clone(), torch.tensor(0.0), torch.tensor(0.0))
    assert float(rule.alpha) > 0.7 * 0.05 * float(rule.learned * rule.kept)


class Oracle(Objective):
    """Its inputs are embeddings of cells, of which it knows no one better than another."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.rule = AutoAlpha()
        self.nothing = torch.nn.Parameter(torch.zeros(()))

    @property
    def alpha_rule(self) -> AutoAlpha:
        return self.rule

    def forward(self, inputs, y, e, *, ramp=1.0, generator=None):
        loss = scbd.nn.supervised_contrastive_loss(inputs[:, :, 0, 0], y, smoothing=2 / 3)
        parts = dict.fromkeys(("interaction_c", "environment_c"), torch.zeros(()))
        parts |= {"learned_c": normalised_supervised_information(loss, y, smoothing=2 / 3)}
        return scbd.model.Losses(loss + 0 * self.nothing, parts)


def alpha_of_oracle(n_genes: int, cells_a_gene: int, of_new: float = 1.0, **kwargs: Any) -> AutoAlpha:
    """As the data module and the plan find it, in 34 wells; new cells show so much of what known ones show."""
    rng = np.random.default_rng(0)
    gene = np.repeat(np.arange(n_genes), cells_a_gene)
    well = rng.integers(34, size=len(gene))
    split = scbd.data.stratified_split([gene, well])
    of_gene, of_cell = rng.normal(size=(n_genes, 32)) / 32**0.5, rng.normal(size=(len(gene), 32)) / 32**0.5
    shown = np.full((len(gene), 1), 0.8)
    shown[split.validation] *= of_new
    z = np.eye(32)[0] + shown * of_gene[gene] + 0.3 * of_cell
    z = (z / np.linalg.norm(z, axis=1, keepdims=True)).astype("float32")[:, :, None, None]
    data = scbd.data.ImageDataModule(scbd.data.ArraySource(z), gene, well, split, max_steps=60, **kwargs)
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(names, False)
    oracle = Oracle()
    trainer = L.Trainer(max_steps=60, val_check_interval=60, accelerator="cpu", **quiet)
    trainer.fit(scbd.model.TrainingPlan(oracle), data)
    return oracle.rule


@pytest.mark.parametrize(
    ("n_genes", "cells_a_gene", "perturbations"),
    [(300, 10, "auto"), (500, 40, "auto"), (500, 40, None), (2000, 10, "auto"), (2000, 10, None)],
)
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*treespec, LeafSpec")
def test_auto_alpha_without_overfitting_keeps_ratio_near_one(n_genes, cells_a_gene, perturbations):
    """However few cells validate: of 300 genes with 10 cells, one or two a gene."""
    rule = alpha_of_oracle(n_genes, cells_a_gene, perturbations_per_batch=perturbations)
    assert float(rule.kept) > 0.98
    # in shuffled batches genes are as rare as they are, of which the same embedding tells less
    assert 0.25 < float(rule.learned) < 0.45
    by_heart = alpha_of_oracle(n_genes, cells_a_gene, of_new=0.7, perturbations_per_batch=perturbations)
    assert float(by_heart.kept) == pytest.approx(0.72, abs=0.08)


@pytest.mark.parametrize("interrupted", [4, 5])
def test_auto_alpha_resumed_run_continues_with_saved_averages(tmp_path, interrupted):
    """Wherever it was interrupted: at a step with a validation, or between."""
    settings: dict[str, Any] = QUICK | {"lr": 1e-2, "checkpoint_dir": tmp_path, "validate_every": 2, "max_steps": 9}
    settings["batch_size"] = 48

    def make():
        return make_model(alpha="auto", smoothing=0, style_target=None)

    half = make()
    with pytest.raises(KeyboardInterrupt):
        half.train(**settings, callbacks=PressCtrlC(interrupted))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4
    resumed, whole = make(), make()
    resumed.train(**settings, resume=True)
    whole.train(**settings | {"checkpoint_dir": None})
    assert_same(weights(resumed), weights(whole))
    assert weights(whole)["auto_alpha.kept"] < 1
    assert resumed.history["validation_loss"].index.tolist() == [2, 4, 6, 8]
    with pytest.raises(ValueError, match="alpha: 'auto' → 0.01"):
        make_model(alpha=0.01).train(**settings | {"resume": True})


def test_auto_alpha_is_adapted_in_joint_decoder_training():
    model = make_model(alpha="auto")
    model.train(**QUICK | {"lr": 3e-3, "max_steps": 15})
    auto = rule_of(model)
    before = float(auto.learned), float(auto.kept)
    model.train_decoder(**QUICK | {"max_steps": 2}, width=8)
    assert (float(auto.learned), float(auto.kept)) == before
    model.train_decoder(**QUICK | {"max_steps": 2}, joint=True, width=8)
    assert float(auto.learned) > before[0] > 0
