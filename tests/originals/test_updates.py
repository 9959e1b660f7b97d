"""Compare parameter updates with DomainBed, for its optimiser and for AdamW."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from helpers.known_answers import Known, apart, known_answers, put
from torch import Tensor, nn

from scbd.baselines._classifiers import (
    ClassifierModule,
    CORALModule,
    DANNModule,
    FishAdamW,
    GroupDROModule,
    IRMModule,
    IRMPlan,
)
from scbd.nn import FeatureScaling

HOW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.01}
SYSTEMS: dict[str, tuple[type[ClassifierModule], dict[str, float]]] = {
    "ERM": (ClassifierModule, {}),
    "CORAL": (CORALModule, {"penalty": 2.0}),
    "IRM": (IRMModule, {"penalty": 50.0}),
    "GroupDRO": (GroupDROModule, {"step_size": 0.5}),
    "Fish": (ClassifierModule, {}),
}
TOLERANCE = 2e-6
E = torch.arange(3).repeat_interleave(12)


def module(kind: type[ClassifierModule], weights: dict[str, Tensor], **settings: Any) -> ClassifierModule:
    layers = [nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)]
    scaling = FeatureScaling(6, standardize=False, clip=None)
    found = kind(scaling, encoder=nn.Sequential(*layers), n_labels=4, n_environments=3, **settings)
    put(weights.values(), parameters(found))
    return found.train()


def parameters(found: ClassifierModule) -> list[nn.Parameter]:
    """Return the parameters of encoder and head."""
    return [*found.content.parameters(), *found.head.parameters()]


def cells(known: Known, update: int) -> tuple[Tensor, Tensor, Tensor]:
    return known.tensor("x")[update].flatten(0, 1), known.tensor("y")[update].flatten(), E


def distance_to_original(known: Known, system: str, found: ClassifierModule, update: int) -> float:
    """Return the distance to the weights of the original after an update, or 0 where these are not stored."""
    expected = known.tensors(f"{system}_after{update}_")
    return apart(parameters(found), expected.values()) if expected else 0.0


class Trained(NamedTuple):
    far: list[float]
    """Distance to the weights of the original after each update."""
    losses: list[Tensor]


def train(system: str, optimizer: torch.optim.Optimizer, found: ClassifierModule, *, reset: bool = True) -> Trained:
    known = known_answers("domain_generalization")
    plan = IRMPlan(found, anneal_steps=2) if isinstance(found, IRMModule) else None
    far, of_updates = [], []
    for update in range(4):
        if plan is not None and reset and update == 2:
            optimizer.state.clear()
        optimizer.zero_grad()
        losses = found(*cells(known, update), ramp=1.0 if plan is None else plan.ramp(update))
        losses.loss.backward()
        optimizer.step()
        of_updates.append(losses.loss.detach())
        far.append(distance_to_original(known, system, found, update + 1))
    return Trained(far, of_updates)


def make_initial_module(system: str) -> ClassifierModule:
    kind, settings = SYSTEMS[system]
    return module(kind, known_answers("domain_generalization").tensors("net_init_"), **settings)


@pytest.mark.parametrize("system", ["ERM", "CORAL", "IRM", "GroupDRO"])
def test_forward_adam_updates_are_equal_to_domainbed(system):
    found = make_initial_module(system)
    trained = train(system, torch.optim.Adam(found.parameters(), **HOW), found)
    assert max(trained.far) < TOLERANCE
    logged = known_answers("domain_generalization").tensor(f"{system}_loss_nll_penalty")
    # for CORAL, the original logs the cross-entropy and the unweighted penalty
    expected = logged[:, 0] + 2 * logged[:, 2] if system == "CORAL" else logged[:, 0]
    torch.testing.assert_close(torch.stack(trained.losses).double(), expected, rtol=0, atol=TOLERANCE)
    if isinstance(found, GroupDROModule):
        known = known_answers("domain_generalization")
        torch.testing.assert_close(found.weights, known.tensor("GroupDRO_q_after4"), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("system", ["ERM", "CORAL", "IRM", "GroupDRO"])
def test_forward_adamw_updates_differ_from_domainbed(system):
    """All models use AdamW. With Adam, weight decay is coupled: it is divided by the size of gradients."""
    found = make_initial_module(system)
    assert 0.01 < max(train(system, torch.optim.AdamW(found.parameters(), **HOW), found).far) < 0.1


def test_irm_plan_optimizer_not_reset_updates_differ_from_domainbed():
    found = make_initial_module("IRM")
    far = train("IRM", torch.optim.Adam(found.parameters(), **HOW), found, reset=False).far
    assert max(far[:2]) < TOLERANCE and far[3] == pytest.approx(0.029, abs=5e-4)


def make_fish_optimizer(found: ClassifierModule, meta_lr: float, *, coupled: bool) -> FishAdamW:
    optimizer = FishAdamW(found.parameters(), meta_lr=meta_lr, n_environments=3, pretrain_steps=0, **HOW)
    for group in optimizer.param_groups:
        if coupled and "decoupled_weight_decay" not in group:
            pytest.skip("this torch has AdamW with decoupled weight decay alone")
        group["decoupled_weight_decay"] = not coupled
    return optimizer


@pytest.mark.parametrize(("coupled", "least", "most"), [(True, 0.0, TOLERANCE), (False, 5e-4, 0.1)])
def test_fish_adamw_coupled_decay_updates_are_equal_to_domainbed(coupled, least, most):
    known = known_answers("domain_generalization")
    found = make_initial_module("Fish")
    optimizer = make_fish_optimizer(found, 0.1, coupled=coupled)
    far = []
    for update in range(4):
        x, y, e = cells(known, update)
        for environment in range(3):
            with optimizer.ahead():
                optimizer.zero_grad()
                found(x[e == environment], y[e == environment], e[e == environment]).loss.backward()
                optimizer.step()
        far.append(distance_to_original(known, "Fish", found, update + 1))
    assert least <= max(far) < most


def test_fish_original_meta_update_divides_share_by_inner_steps():
    known = known_answers("domain_generalization")
    inner, after, before = (
        known.tensors(name).values() for name in ("fish_original_inner_", "fish_original_meta_after_", "net_init_")
    )
    for share, far in ((0.1 / 3, 0.0), (0.1, 0.021)):
        kept = [torch.lerp(old, new, share) for old, new in zip(before, inner, strict=True)]
        assert apart(kept, after) == pytest.approx(far, abs=5e-4 if far else TOLERANCE)


def test_dann_module_joint_updates_differ_from_domainbed():
    """DomainBed updates the discriminator in some steps, and encoder and head in others.

    scbd updates all in each step, as WILDS does.
    """
    known = known_answers("domain_generalization")
    found = module(DANNModule, dann_weights(known, "init"), penalty=1.0)
    assert isinstance(found, DANNModule)
    layers = [nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]
    found.discriminator = nn.Sequential(*layers)
    put(known.tensors("dann_domainbed_init.discriminator.").values(), found.discriminator.parameters())
    optimizer = torch.optim.Adam(found.parameters(), betas=(0.5, 0.9), **HOW)
    for update in range(4):
        optimizer.zero_grad()
        found(*cells(known, update)).loss.backward()
        optimizer.step()
    assert apart(parameters(found), dann_weights(known, "after4").values()) == pytest.approx(0.027, abs=1e-3)


def dann_weights(known: Known, when: str) -> dict[str, Tensor]:
    """Return the weights of encoder and head of DomainBed's DANN."""
    return {
        f"{part} {name}": value
        for part in ("featurizer", "classifier")
        for name, value in known.tensors(f"dann_domainbed_{when}.{part}.").items()
    }
