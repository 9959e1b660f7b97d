"""Fish: rounds against a naive loop, and the weights that are kept of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scvi
import torch
from conftest import make_cells

from scbd.baselines import FishModel
from scbd.baselines._batches import AlternatingSampler
from scbd.baselines._fish import FishAdamW
from scbd.model import Losses

ADAMW: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01}
QUICK: dict[str, Any] = {"batch_size": 24, "enable_progress_bar": False, "accelerator": "cpu", "lr": 3e-3}
QUICK |= {"precision": "32-true"}
ENVIRONMENTS = 3


def make(**kwargs: Any) -> FishModel:
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
    sampler = AlternatingSampler(
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
def test_what_is_left_is_what_a_naive_loop_keeps(pretrain, steps):
    """Of a round that is not finished, nothing."""
    model = make(meta_lr=0.1, pretrain_steps=pretrain)
    model.train(max_steps=steps, **QUICK)
    expected = naive_weights(model, make(), steps, pretrain=pretrain, meta_lr=0.1)
    for ours, naive in zip(model.module.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), naive, rtol=1e-4, atol=1e-5)


def test_validation_and_checkpoints_see_the_weights_that_are_kept(tmp_path, monkeypatch):
    model = make(meta_lr=0.1, pretrain_steps=0)
    validated = []
    forward = model.module.forward

    def watched(*args: Any, **kwargs: Any) -> Losses:
        if not model.module.training:
            validated.append(model.module.head.weight.detach().clone())
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.module, "forward", watched)
    model.train(max_steps=8, validate_every=1, load_best=True, checkpoint_dir=tmp_path, **QUICK)
    changes = [not torch.equal(one, two) for one, two in zip(validated, validated[1:], strict=False)]
    assert changes == [False, True, False, False, True, False, False]  # after the third step, and after the sixth
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]["module.head.weight"]
    assert torch.equal(saved, validated[-1])
    assert any(torch.equal(model.module.head.weight, weights) for weights in validated)


@pytest.mark.parametrize("pretrain", [0, 3])
def test_the_optimiser_keeps_a_share_of_each_round(pretrain):
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


def test_a_step_that_fails_leaves_the_weights_that_are_kept():
    p = torch.nn.Parameter(torch.zeros(2))
    fish = FishAdamW([p], meta_lr=0.2, n_environments=3, pretrain_steps=0, **ADAMW)
    with fish.ahead():
        p.grad = torch.ones(2)
        fish.step()
    with pytest.raises(KeyboardInterrupt), fish.ahead():
        assert p.detach().ne(0).all()
        raise KeyboardInterrupt
    assert p.detach().eq(0).all()


def test_rounds_follow_batches_of_all_environments():
    environments = np.repeat([3, 7, 9], [50, 5, 20])
    how: dict[str, Any] = {"environments": environments, "n_steps": 12, "seed": 1}
    for asked, plain in ((0, 0), (3, 3), (4, 6)):  # a round that has begun is not a whole one
        sampler = AlternatingSampler(np.arange(75), 25, pretrain_steps=asked, **how)
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
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)
