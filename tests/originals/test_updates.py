"""Whole updates of DomainBed's systems, from one network: with their optimiser, and how far AdamW is from it."""

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
    """Those that predict: encoder and head."""
    return [*found.content.parameters(), *found.head.parameters()]


def cells(known: Known, update: int) -> tuple[Tensor, Tensor, Tensor]:
    return known.tensor("x")[update].flatten(0, 1), known.tensor("y")[update].flatten(), E


def off(known: Known, system: str, found: ClassifierModule, update: int) -> float:
    """How far weights are from the original's after so many updates, where those were kept."""
    expected = known.tensors(f"{system}_after{update}_")
    return apart(parameters(found), expected.values()) if expected else 0.0


class Trained(NamedTuple):
    far: list[float]
    """How far off weights are after each update."""
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
        far.append(off(known, system, found, update + 1))
    return Trained(far, of_updates)


def start(system: str) -> ClassifierModule:
    kind, settings = SYSTEMS[system]
    return module(kind, known_answers("domain_generalization").tensors("net_init_"), **settings)


@pytest.mark.parametrize("system", ["ERM", "CORAL", "IRM", "GroupDRO"])
def test_updates_with_their_optimiser(system):
    found = start(system)
    trained = train(system, torch.optim.Adam(found.parameters(), **HOW), found)
    assert max(trained.far) < TOLERANCE
    logged = known_answers("domain_generalization").tensor(f"{system}_loss_nll_penalty")
    # of CORAL, cross-entropy and the penalty before its weight
    expected = logged[:, 0] + 2 * logged[:, 2] if system == "CORAL" else logged[:, 0]
    torch.testing.assert_close(torch.stack(trained.losses).double(), expected, rtol=0, atol=TOLERANCE)
    if isinstance(found, GroupDROModule):
        known = known_answers("domain_generalization")
        torch.testing.assert_close(found.weights, known.tensor("GroupDRO_q_after4"), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("system", ["ERM", "CORAL", "IRM", "GroupDRO"])
def test_decoupled_weight_decay_is_another_optimiser(system):
    """AdamW, which all models have; coupled decay is divided by the size of gradients."""
    found = start(system)
    assert 0.01 < max(train(system, torch.optim.AdamW(found.parameters(), **HOW), found).far) < 0.1


def test_irm_without_a_fresh_optimiser_goes_elsewhere():
    found = start("IRM")
    far = train("IRM", torch.optim.Adam(found.parameters(), **HOW), found, reset=False).far
    assert max(far[:2]) < TOLERANCE and far[3] == pytest.approx(0.029, abs=5e-4)


def fish(found: ClassifierModule, meta_lr: float, *, coupled: bool) -> FishAdamW:
    optimizer = FishAdamW(found.parameters(), meta_lr=meta_lr, n_environments=3, pretrain_steps=0, **HOW)
    for group in optimizer.param_groups:
        if coupled and "decoupled_weight_decay" not in group:
            pytest.skip("this torch has AdamW with decoupled weight decay alone")
        group["decoupled_weight_decay"] = not coupled
    return optimizer


@pytest.mark.parametrize(("coupled", "least", "most"), [(True, 0.0, TOLERANCE), (False, 5e-4, 0.1)])
def test_rounds_of_fish(coupled, least, most):
    known = known_answers("domain_generalization")
    found = start("Fish")
    optimizer = fish(found, 0.1, coupled=coupled)
    far = []
    for update in range(4):
        x, y, e = cells(known, update)
        for environment in range(3):
            with optimizer.ahead():
                optimizer.zero_grad()
                found(x[e == environment], y[e == environment], e[e == environment]).loss.backward()
                optimizer.step()
        far.append(off(known, "Fish", found, update + 1))
    assert least <= max(far) < most


def test_the_authors_of_fish_divide_the_share_by_the_steps_of_a_round():
    known = known_answers("domain_generalization")
    inner, after, before = (
        known.tensors(name).values() for name in ("fish_original_inner_", "fish_original_meta_after_", "net_init_")
    )
    for share, far in ((0.1 / 3, 0.0), (0.1, 0.021)):
        kept = [torch.lerp(old, new, share) for old, new in zip(before, inner, strict=True)]
        assert apart(kept, after) == pytest.approx(far, abs=5e-4 if far else TOLERANCE)


def test_dann_of_domainbed_takes_turns_and_ours_does_not():
    """Theirs: the discriminator in some steps, encoder and head in others. Ours is that of WILDS: both at once."""
    known = known_answers("domain_generalization")
    found = module(DANNModule, predicting(known, "init"), penalty=1.0)
    assert isinstance(found, DANNModule)
    layers = [nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]
    found.discriminator = nn.Sequential(*layers)
    put(known.tensors("dann_domainbed_init.discriminator.").values(), found.discriminator.parameters())
    optimizer = torch.optim.Adam(found.parameters(), betas=(0.5, 0.9), **HOW)
    for update in range(4):
        optimizer.zero_grad()
        found(*cells(known, update)).loss.backward()
        optimizer.step()
    assert apart(parameters(found), predicting(known, "after4").values()) == pytest.approx(0.027, abs=1e-3)


def predicting(known: Known, when: str) -> dict[str, Tensor]:
    """Encoder and head of DomainBed's DANN."""
    return {
        f"{part} {name}": value
        for part in ("featurizer", "classifier")
        for name, value in known.tensors(f"dann_domainbed_{when}.{part}.").items()
    }
