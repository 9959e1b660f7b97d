from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scvi
import torch
from conftest import make_cells
from torch.nn import functional as F

from scbd.baselines import CORALModel, DANNModel, ERMModel, FishModel, GroupDROModel, IRMModel
from scbd.baselines._batches import SingleEnvironmentSampler
from scbd.baselines._classifiers import ClassifierOutputs, FishAdamW, GradientReversal
from scbd.model import Losses
from scbd.model._callbacks import BestWeights

QUICK: dict[str, Any] = {"batch_size": 24, "enable_progress_bar": False, "accelerator": "cpu", "lr": 3e-3}
QUICK |= {"precision": "32-true"}
# runs of any length have the same rates
SAME_LR: dict[str, Any] = {"plan_kwargs": {"lr_decay": False}}
MODELS = [CORALModel, DANNModel, FishModel, GroupDROModel, IRMModel]


def make(model_class, cells=None, **kwargs):
    cells = make_cells() if cells is None else cells
    scvi.settings.seed = 0
    model_class.setup_anndata(cells, y_key="gene", e_key="well")
    return model_class(cells, encoder="small", **kwargs)


def outputs(n: int = 30, n_environments: int = 3, seed: int = 0) -> ClassifierOutputs:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    logits = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return ClassifierOutputs(features, logits, torch.arange(n) % 4, torch.arange(n) % n_environments)


def environments_of_batches(model) -> list[torch.Tensor]:
    """Filled as the model trains, a batch after the other."""
    seen: list[torch.Tensor] = []
    objective = model.module.objective

    def watched(batch: ClassifierOutputs, ramp: float) -> dict[str, torch.Tensor]:
        seen.append(batch.e)
        return objective(batch, ramp)

    model.module.objective = watched
    return seen


@pytest.mark.parametrize("model_class", MODELS)
def test_classifiers_learn_save_and_load(model_class, tmp_path):
    model = make(model_class, **({"penalty": 0.01} if model_class is DANNModel else {}))
    model.train(max_steps=60, **QUICK)
    genes = model.adata.obs["gene"].to_numpy()
    assert np.mean(model.predict(indices=model.train_indices) == genes[model.train_indices]) > 0.8
    assert np.isfinite(model.history["train_loss"].to_numpy(dtype=float)).all()
    model.save(str(tmp_path / "model"))
    loaded = model_class.load(str(tmp_path / "model"), adata=model.adata)
    np.testing.assert_array_equal(loaded.predict(), model.predict())
    assert loaded.get_latent_representation().shape == (96, 256)
    for part in ("96 cells, 4 perturbations (gene)", "small, ", "60 steps of 24 cells", "next      predict()"):
        assert part in repr(loaded)
    if model_class is DANNModel:
        assert "settings  penalty=0.01" in repr(loaded)


@pytest.mark.parametrize("model_class", MODELS)
def test_classifiers_resumed_run_equals_uninterrupted(model_class, tmp_path):
    settings: dict[str, Any] = {"pretrain_steps": 2} if model_class is FishModel else {}
    half, resumed, whole = (make(model_class, **settings) for _ in range(3))
    how: dict[str, Any] = QUICK | SAME_LR
    half.train(max_steps=4, checkpoint_dir=tmp_path, **how)
    resumed.train(max_steps=7, checkpoint_dir=tmp_path, resume=True, **how)
    whole.train(max_steps=7, **how)
    for name, value in whole.module.state_dict().items():
        torch.testing.assert_close(resumed.module.state_dict()[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("model_class", "before", "after"),
    [
        (CORALModel, {"penalty": 1.0}, {"penalty": 2.0}),
        (IRMModel, {"anneal_steps": 1}, {"anneal_steps": 2}),
        (GroupDROModel, {"step_size": 0.1}, {"step_size": 0.2}),
        (FishModel, {"meta_lr": 0.1}, {"meta_lr": 0.2}),
    ],
)
def test_classifiers_resume_with_other_objective_raises(model_class, before, after, tmp_path):
    make(model_class, **before).train(max_steps=1, checkpoint_dir=tmp_path, **QUICK)
    ((name, value),) = after.items()
    with pytest.raises(ValueError, match=f"other settings .*{name}: {before[name]} → {value}"):
        make(model_class, **after).train(max_steps=2, checkpoint_dir=tmp_path, resume=True, **QUICK)


def test_coral_small_environment_is_trained_on():
    cells = make_cells()
    cells.obs["well"] = np.where(np.arange(96) < 90, "large", "small")
    make(CORALModel, cells).train(max_steps=1, **QUICK | {"batch_size": 48})


def test_classifiers_validation_loss_is_cross_entropy():
    images, e = torch.randint(0, 256, (8, 2, 16, 16), dtype=torch.uint8), torch.arange(8) % 3
    for model_class in MODELS:
        model = make(model_class)
        model.module.eval()
        with torch.no_grad():
            found = model.module(images, e, e)
            logits = model.module.head(model.module.embed(images, "c", "embedding", e))
        torch.testing.assert_close(found.loss, F.cross_entropy(logits, e))


def test_coral_penalty_compares_moments_of_all_pairs():
    batch = outputs()
    parts = [batch.features[batch.e == e].numpy() for e in range(3)]
    expected = np.mean(
        [
            np.mean((a.mean(0) - b.mean(0)) ** 2) + np.mean((np.cov(a.T) - np.cov(b.T)) ** 2)
            for a, b in ((parts[0], parts[1]), (parts[0], parts[2]), (parts[1], parts[2]))
        ]
    )
    module = make(CORALModel, penalty=3.0).module
    assert float(module.penalise(batch)) == pytest.approx(expected)
    losses = module.objective(batch, 0.5)
    assert float(losses.loss) == pytest.approx(float(F.cross_entropy(batch.logits, batch.y)) + 1.5 * expected)
    # nothing to compare with one environment, or with single cells
    for e in (torch.zeros(30).long(), torch.cat([torch.zeros(29).long(), torch.ones(1).long()])):
        assert float(module.penalise(batch._replace(e=e))) == 0


def test_irm_penalty_is_product_of_two_slopes():
    batch = outputs()
    module = make(IRMModel, penalty=50.0).module
    expected = []
    for e in range(3):
        rows = torch.nonzero(batch.e == e)[:, 0]
        slopes = []
        for half in (rows[::2], rows[1::2]):
            scale = torch.ones((), dtype=torch.float64, requires_grad=True)
            error = F.cross_entropy(scale * batch.logits[half], batch.y[half])
            slopes.append(float(torch.autograd.grad(error, scale)[0]))
        expected.append(math.prod(slopes))
    assert float(module.penalise(batch)) == pytest.approx(np.mean(expected))
    assert float(module.penalise(batch._replace(e=torch.arange(30)))) == 0


def test_irm_plan_first_steps_have_weight_1():
    """The plan knows the step; a second forward pass of a batch, or a second run, changes nothing of the schedule."""
    model = make(IRMModel, penalty=50.0, anneal_steps=3)
    factors: list[float] = []
    objective = type(model.module).objective

    class Noted(type(model.module)):  # type: ignore[misc]
        def objective(self, batch, ramp):
            factors.append(ramp)
            objective(self, batch, ramp)
            return objective(self, batch, ramp)

    model.module.__class__ = Noted
    model.train(max_steps=2, **QUICK)
    model.train(max_steps=2, **QUICK)
    assert factors == [1 / 50, 1 / 50, 1 / 50, 1.0]


@pytest.mark.parametrize(("reset", "steps"), [(True, 2), (False, 5)])
def test_irm_plan_reset_optimizer_clears_state_once(reset, steps, tmp_path):
    def ages(model) -> set[int]:
        return {int(state["step"]) for state in model.trainer.optimizers[0].state.values()}

    one, other = (make(IRMModel, anneal_steps=3, reset_optimizer=reset) for _ in range(2))
    one.train(max_steps=5, **QUICK)
    assert ages(one) == {steps}
    how: dict[str, Any] = QUICK | SAME_LR | {"checkpoint_dir": tmp_path}
    other.train(max_steps=3, **how)
    other.train(max_steps=5, resume=True, **how)
    assert ages(other) == {steps}


def test_group_dro_moves_weights_to_worst_environment():
    batch = outputs()
    module = make(GroupDROModel, step_size=0.5).module
    errors = torch.stack([F.cross_entropy(part.logits, part.y) for part in batch.by_environment()]).numpy()
    weights = np.exp(0.5 * errors) / np.exp(0.5 * errors).sum()
    losses = module.objective(batch, 1.0)
    assert float(losses.loss) == pytest.approx((weights * errors).sum(), rel=1e-5)
    assert float(losses.parts["worst"]) == pytest.approx(errors.max())
    np.testing.assert_allclose(module.weights, weights, rtol=1e-5)
    # an environment that is not in a batch keeps its weight beside the others'
    rows = batch.e > 0
    module.objective(ClassifierOutputs(*(part[rows] for part in batch)), 1.0)
    moved = weights * np.exp(0.5 * errors * [0, 1, 1])
    np.testing.assert_allclose(module.weights, moved / moved.sum(), rtol=1e-5)


def test_dann_reverses_gradient_of_discriminator():
    x = torch.randn(4, 3, requires_grad=True)
    (GradientReversal.apply(x, 0.5) * torch.arange(3.0)).sum().backward()
    torch.testing.assert_close(x.grad, -0.5 * torch.arange(3.0).expand(4, 3))
    module = make(DANNModel, penalty=2.0).module
    torch.manual_seed(0)
    features = torch.randn(30, 256, requires_grad=True)
    batch = ClassifierOutputs(features, features[:, :4], torch.arange(30) % 4, torch.arange(30) % 3)
    losses = module.objective(batch, 1.0)
    torch.testing.assert_close(losses.loss, losses.parts["cross_entropy"] + losses.parts["discriminator"])
    (reversed_gradient,) = torch.autograd.grad(losses.parts["discriminator"], features, retain_graph=True)
    module.penalty = -1.0  # its own direction
    (gradient,) = torch.autograd.grad(module.objective(batch, 1.0).parts["discriminator"], features)
    torch.testing.assert_close(reversed_gradient, -2 * gradient)


def test_single_environment_sampler_visits_environments_in_rounds():
    environments = np.repeat([3, 7, 9], [50, 5, 20])
    sampler = SingleEnvironmentSampler(np.arange(75), 10, environments=environments, n_steps=30, seed=1)
    seen = [environments[batch] for batch in sampler]
    assert all(len(set(part)) == 1 and len(part) == 10 for part in seen)
    names = [part[0] for part in seen]
    assert (
        all(set(names[i : i + 3]) == {3, 7, 9} for i in range(0, 30, 3))
        and len(set(map(str, zip(*[iter(names)] * 3, strict=True)))) > 1
    )
    np.testing.assert_array_equal(sampler.batch(4), sampler.batch(4))
    assert len(set(sampler.batch(names.index(3)))) == 10  # none twice where there are enough


def test_coral_batches_have_every_environment():
    model = make(CORALModel)
    seen = environments_of_batches(model)
    model.train(max_steps=5, **QUICK)
    assert all(torch.equal(e.bincount(minlength=3), torch.tensor([8, 8, 8])) for e in seen) and len(seen) == 5


@pytest.mark.parametrize(
    ("model_class", "settings", "message"),
    [
        (CORALModel, {"penalty": -1.0}, "penalty=-1.0: give a number, 0 or larger"),
        (DANNModel, {"penalty": float("inf")}, "penalty=inf: give a number, 0 or larger"),
        (IRMModel, {"anneal_steps": -1}, "anneal_steps=-1: give a whole number, 0 or larger"),
        (GroupDROModel, {"step_size": -1.0}, "step_size=-1.0: give a number, 0 or larger"),
        (GroupDROModel, {"step_size": float("nan")}, "step_size=nan: give a number, 0 or larger"),
    ],
)
def test_classifiers_settings_out_of_range_raise(model_class, settings, message):
    with pytest.raises(ValueError, match=message):
        make(model_class, **settings)


@pytest.mark.parametrize(
    ("model_class", "how", "begins"),
    [(IRMModel, {"anneal_steps": 4, "penalty": 1e3}, 4), (FishModel, {"pretrain_steps": 4}, 4), (CORALModel, {}, 0)],
)
def test_classifiers_load_best_ignores_preliminary_steps(model_class, how, begins, monkeypatch):
    """What was kept as IRM had never met its penalty, which raises the loss."""
    losses = {step: float(step) for step in range(1, 9)}  # lowest at the first validation
    plan = model_class.traits.plan
    of_cells = plan.validation_step

    def rising(self, batch, batch_idx):
        of_cells(self, batch, batch_idx)
        self.log("validation_loss", losses[self.global_step], on_step=False, on_epoch=True)

    monkeypatch.setattr(plan, "_log", lambda *args: None)
    monkeypatch.setattr(plan, "validation_step", rising)
    kept, restore = [], BestWeights.restore

    def watched(self, plan):
        kept.append(float(self.best_model_score))
        restore(self, plan)

    monkeypatch.setattr(BestWeights, "restore", watched)
    make(model_class, **how).train(max_steps=8, load_best=True, validate_every=1, **QUICK)
    assert kept == [begins + 1]


@pytest.mark.parametrize(
    ("model_class", "how"), [(IRMModel, {"anneal_steps": 5, "penalty": 10.0}), (FishModel, {"pretrain_steps": 5})]
)
def test_classifiers_run_within_preliminary_steps_warns(model_class, how, caplog):
    model = make(model_class, **how)
    with caplog.at_level("WARNING", logger="scbd"):
        model.train(max_steps=5, **QUICK)
    name = model_class.__name__.removesuffix("Model")
    assert f"{name} begins after step 5, and training ends at step 5" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", logger="scbd"):
        model.train(max_steps=1, **QUICK)  # the sixth
    assert "begins after" not in caplog.text


@pytest.fixture(scope="module")
def trained() -> ERMModel:
    cells = make_cells()
    scvi.settings.seed = 0
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = ERMModel(cells, encoder="small")
    model.train(max_steps=60, load_best=True, **QUICK)
    return model


def test_erm_learns_perturbation_and_predicts_names(trained):
    predicted = trained.predict(indices=trained.train_indices)
    genes = trained.adata.obs["gene"].to_numpy()
    assert np.mean(predicted == genes[trained.train_indices]) > 0.9
    assert np.mean(trained.predict(indices=trained.validation_indices) == genes[trained.validation_indices]) > 0.6
    proba = trained.predict(return_proba=True)
    assert proba.shape == (96, 4)
    np.testing.assert_allclose(proba.sum(1), 1, rtol=1e-5)
    np.testing.assert_array_equal(
        np.array(["gene_0", "gene_1", "gene_2", "gene_3"])[proba.argmax(1)], trained.predict()
    )


def test_erm_norm_is_passed_to_encoder():
    cells = make_cells()
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    kinds = {type(part).__name__ for part in ERMModel(cells, encoder="small", norm="group").module.modules()}
    assert "GroupNorm" in kinds and "BatchNorm2d" not in kinds
    with pytest.raises(ValueError, match="norm='layer' is not known"):
        ERMModel(cells, encoder="small", norm="layer")


def test_erm_loss_is_cross_entropy_of_linear_head(trained):
    r = torch.from_numpy(trained.get_latent_representation(center=None))
    assert r.shape == (96, 256)
    np.testing.assert_array_equal(r, trained.get_latent_representation(representation="intermediate"))
    y = torch.from_numpy(trained.adata.obs["gene"].cat.codes.to_numpy(np.int64))
    e = torch.from_numpy(trained.adata.obs["well"].cat.codes.to_numpy(np.int64))
    images = torch.from_numpy(trained.adata.obsm["single_cell_images"])
    with torch.no_grad():
        loss = trained.module(images, y, e).loss
        expected = F.cross_entropy(trained.module.head(r), y)
    torch.testing.assert_close(loss, expected)


def test_erm_environments_affect_only_standardisation(trained):
    images, y = torch.randint(0, 256, (8, 2, 16, 16), dtype=torch.uint8), torch.arange(8) % 4
    published = make(ERMModel, standardize_by=None)
    published.train(max_steps=2, **QUICK)
    with torch.no_grad():
        losses = [published.module(images, y, e).loss for e in (torch.zeros(8).long(), torch.arange(8))]
        assert losses[0] == losses[1]
        module, e = trained.module, torch.arange(8) % 3
        within = module.preprocess.environments(module.preprocess(images), e[:, None])
        expected = F.cross_entropy(module.head(module.content(within)), y)
        torch.testing.assert_close(module(images, y, e).loss, expected)
        assert module(images, y, 0 * e).loss != expected


def test_erm_saved_model_is_loaded(trained, tmp_path):
    trained.save(str(tmp_path / "model"))
    loaded = ERMModel.load(str(tmp_path / "model"), adata=trained.adata)
    np.testing.assert_array_equal(loaded.predict(), trained.predict())
    new = make_cells(7, seed=3)
    del new.obs["gene"]
    assert loaded.predict(new).shape == (7,)


def test_erm_has_one_block_and_loss_history(trained):
    assert {"train_loss", "validation_loss"} == set(trained.history)
    with pytest.raises(ValueError, match="has a single block, which carries the perturbation: use block='c'"):
        trained.get_latent_representation(block="s")


ADAMW: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01}
QUICK |= {"precision": "32-true"}
ENVIRONMENTS = 3


def make_fish(**kwargs: Any) -> FishModel:
    cells = make_cells()
    scvi.settings.seed = 0
    FishModel.setup_anndata(cells, y_key="gene", e_key="well")
    return FishModel(cells, encoder="small", **kwargs)


def naive_weights(model: FishModel, twin: FishModel, steps: int, *, pretrain: int, meta_lr: float) -> list[Any]:
    """What the twin of a trained model has after these steps, written out."""
    network, rows = twin.module.train(), model.train_indices
    network.preprocess.load_state_dict(model.module.preprocess.state_dict())
    adata = twin.adata
    codes = {key: torch.tensor(adata.obs[key].cat.codes.to_numpy(), dtype=torch.long) for key in ("gene", "well")}
    sampler = SingleEnvironmentSampler(
        rows, 24, environments=codes["well"].numpy()[rows], pretrain_steps=pretrain, n_steps=steps, seed=0
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.01)
    weights = start = [p.detach().clone() for p in network.parameters()]
    for step in range(steps):
        batch = sampler.batch(step)
        images = torch.from_numpy(adata.obsm["single_cell_images"][batch])
        optimizer.zero_grad()
        network(images, codes["gene"][batch], codes["well"][batch]).loss.backward()
        optimizer.step()
        weights = [p.detach().clone() for p in network.parameters()]
        if step < pretrain:
            start = weights
        elif step % ENVIRONMENTS == ENVIRONMENTS - 1:
            start = [old + meta_lr * (new - old) for old, new in zip(start, weights, strict=True)]
            with torch.no_grad():
                for p, values in zip(network.parameters(), start, strict=True):
                    p.copy_(values)
    return start


@pytest.mark.parametrize("pretrain", [0, 6])
@pytest.mark.parametrize("steps", [9, 10, 11, 12])
def test_fish_weights_equal_naive_loop(pretrain, steps):
    """Of a round that is not finished, nothing."""
    model = make_fish(meta_lr=0.1, pretrain_steps=pretrain, augment=False)
    model.train(max_steps=steps, **QUICK)
    expected = naive_weights(model, make_fish(augment=False), steps, pretrain=pretrain, meta_lr=0.1)
    for ours, naive in zip(model.module.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), naive, rtol=1e-4, atol=1e-5)


def test_fish_validation_and_checkpoints_use_kept_weights(tmp_path, monkeypatch):
    model = make_fish(meta_lr=0.1, pretrain_steps=0)
    validated = []
    forward = model.module.forward

    def watched(*args: Any, **kwargs: Any) -> Losses:
        if not model.module.training:
            validated.append(model.module.head.weight.detach().clone())
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.module, "forward", watched)
    model.train(max_steps=8, validate_every=1, load_best=True, checkpoint_dir=tmp_path, **QUICK)
    changes = [not torch.equal(one, two) for one, two in pairwise(validated)]
    assert changes == [False, True, False, False, True, False, False]  # after the third step, and after the sixth
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]["module.head.weight"]
    assert torch.equal(saved, validated[-1])
    assert any(torch.equal(model.module.head.weight, weights) for weights in validated)


@pytest.mark.parametrize("pretrain", [0, 3])
def test_fish_adamw_keeps_fraction_of_each_round(pretrain):
    def gradients(p, step):
        return (p - torch.tensor([1.0, -1.0, 3.0])[step % 3]) * (1 + step % 2)

    def optimiser() -> FishAdamW:
        return FishAdamW([ours, idle], meta_lr=0.2, n_environments=3, pretrain_steps=pretrain, **ADAMW)

    ours, naive, idle = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    fish, plain = optimiser(), torch.optim.AdamW([naive], **ADAMW)
    kept = torch.zeros(2)
    for step in range(14):
        with fish.ahead():
            torch.testing.assert_close(ours, naive)  # where the round has got to
            ours.grad = gradients(ours.detach(), step)
            if step >= 7:  # what had no gradient before
                idle.grad = torch.ones(2)
            fish.step()
        naive.grad = gradients(naive.detach(), step)
        plain.step()
        if step < pretrain:
            kept = naive.detach().clone()
        elif step % 3 == 2:
            kept = kept + 0.2 * (naive.detach() - kept)
            with torch.no_grad():
                naive.copy_(kept)
        torch.testing.assert_close(ours.detach(), kept)
        if step == 7:  # in the middle of a round
            state = fish.state_dict()
            fish = optimiser()
            fish.load_state_dict(state)
    assert idle.detach().ne(0).all()


def test_fish_adamw_failed_step_restores_weights():
    p = torch.nn.Parameter(torch.zeros(2))
    fish = FishAdamW([p], meta_lr=0.2, n_environments=3, pretrain_steps=0, **ADAMW)
    with fish.ahead():
        p.grad = torch.ones(2)
        fish.step()
    with pytest.raises(KeyboardInterrupt), fish.ahead():
        assert p.detach().ne(0).all()
        raise KeyboardInterrupt
    assert p.detach().eq(0).all()


def test_fish_rounds_follow_shuffled_batches():
    environments = np.repeat([3, 7, 9], [50, 5, 20])
    how: dict[str, Any] = {"environments": environments, "n_steps": 12, "seed": 1}
    for asked, plain in ((0, 0), (3, 3), (4, 6)):  # a round that has begun is not a whole one
        sampler = SingleEnvironmentSampler(np.arange(75), 25, pretrain_steps=asked, **how)
        seen = [environments[batch] for batch in sampler]
        assert [len(set(part)) > 1 for part in seen] == [True] * plain + [False] * (12 - plain)
        rounds = [part[0] for part in seen[plain:]]
        assert all(set(rounds[i : i + 3]) == {3, 7, 9} for i in range(0, len(rounds), 3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"meta_lr": 0.0}, "meta_lr=0.0: a share above 0, at most 1"),
        ({"meta_lr": float("nan")}, "meta_lr=nan: a share above 0, at most 1"),
        ({"pretrain_steps": -1}, "pretrain_steps=-1: give a whole number, 0 or larger"),
        ({"pretrain_steps": 2.5}, "pretrain_steps=2.5: give a whole number, 0 or larger"),
    ],
)
def test_fish_settings_out_of_range_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        make_fish(**settings)
