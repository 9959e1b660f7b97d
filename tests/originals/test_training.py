"""Compare training steps with Genentech/SCBD: both blocks, the decoder and the jointly trained classifier."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as L
import pytest
import scvi
import torch
from conftest import make_cells
from helpers.known_answers import Known, apart, known_answers, put
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from scbd._shared.messages import without_messages
from scbd.baselines import ERMModel
from scbd.model import TrainingPlan
from scbd.model._objective import EmbeddedBatch, SCBDModule
from scbd.model._plan import OnlineHead
from scbd.nn import AdditiveDecoder, Encoder, Preprocess
from scbd.nn._encoders import on_sphere

ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.01}
TOLERANCE = 5e-6


class Networks(NamedTuple):
    blocks: SCBDModule
    decoder: AdditiveDecoder
    head: nn.Linear


def make_encoder() -> nn.Module:
    """Return a small encoder in place of a ResNet: means over a 4 x 4 grid, and one layer."""
    return nn.Sequential(
        nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(inplace=False)
    )


def make_networks(known: Known) -> Networks:
    blocks = SCBDModule(
        Preprocess((3, 32, 32), "uint8", standardize=False),
        encoder=make_encoder(),
        n_latent=6,
        alpha=5.0,
        temperature=0.1,
        smoothing=0.0,
        style_target="ye",
        include_self=True,
        invariance="listing",
    )
    for block, name in ((blocks.content, "content"), (blocks.style, "style")):
        put(known.tensors(f"step_init.{name}.").values(), block.state_dict().values())
    decoder = AdditiveDecoder((6, 6), (3, 32, 32), width=8, likelihood="bernoulli")
    for part, name in zip(decoder.parts, ("content", "style"), strict=True):
        put(known.tensors(f"step_init.decoder_{name}.").values(), part.parameters())
    put(known.tensors("step_init.pixel.").values(), decoder.pixels.parameters())
    head = nn.Linear(8, 4)
    put(known.tensors("step_init.head_y.").values(), head.parameters())
    return Networks(blocks, decoder, head)


def batch(known: Known, number: int) -> tuple[Tensor, Tensor, Tensor]:
    pixels = known.tensor("step_x_uint8_4px")[number].repeat_interleave(8, 2).repeat_interleave(8, 3)
    return pixels, known.tensor("step_y")[number], known.tensor("step_e")[number]


class Computed(NamedTuple):
    parts: list[Tensor]
    """Supervised losses of c and s, invariance loss, reconstruction loss."""
    of_blocks: Tensor
    r_c: Tensor

    def all(self) -> Tensor:
        return torch.stack([part.detach() for part in self.parts])


def compute_losses(found: Networks, known: Known, number: int) -> Computed:
    stored, y, e = batch(known, number)
    images = found.blocks.preprocess(stored)
    content = found.blocks.content
    r_c = Encoder.forward(content, images)
    z = on_sphere(content.project(r_c)), found.blocks.style(images)
    of_blocks = found.blocks.losses(EmbeddedBatch(z, []), y, e)
    nats = found.decoder.negative_log_likelihood(images, *(part.detach() for part in z))
    parts = [of_blocks.parts[name] for name in ("supervised_c", "supervised_s", "invariance_c")]
    return Computed([*parts, nats], of_blocks.loss, r_c)


def train_on_batch(found: Networks, known: Known, optimizers: list[torch.optim.Optimizer], number: int) -> Tensor:
    """Train on one batch as the authors do: the blocks, then decoder and head on the outputs before this update."""
    computed = compute_losses(found, known, number)
    _, y, _ = batch(known, number)
    aside = computed.parts[3] + F.cross_entropy(found.head(computed.r_c.detach()), y)
    for optimizer, loss in zip(optimizers, (computed.of_blocks, aside), strict=True):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return computed.all()


def check_weights(found: Networks, known: Known, when: str) -> None:
    ours = {
        "content": list(found.blocks.content.state_dict().values()),
        "style.projection.2": [*found.blocks.style.projection[2].parameters()],
        "head_y": [*found.head.parameters()],
    }
    if when != "final":
        ours["decoder_content.0"] = [*found.decoder.parts[0].parameters()][:2]
        ours["pixel"] = [*found.decoder.pixels.parameters()]
    for name, parameters in ours.items():
        assert apart(parameters, known.tensors(f"step_{when}.{name}.").values()) < TOLERANCE, name


def test_scbd_module_five_steps_are_equal_to_original():
    known = known_answers("scbd_losses")
    found = make_networks(known)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(found.blocks.parameters(), **ADAMW),
        torch.optim.AdamW([*found.decoder.parameters(), *found.head.parameters()], **ADAMW),
    ]
    for number in range(5):
        before = train_on_batch(found, known, optimizers, number)
        if number < 3:
            expected = known.tensor(f"step_losses_before{number + 1}")
            torch.testing.assert_close(before, expected, rtol=0, atol=TOLERANCE)
            check_weights(found, known, f"after{number + 1}")
    check_weights(found, known, "final")
    found.blocks.eval()
    with torch.no_grad():
        last = compute_losses(found, known, 11)
    torch.testing.assert_close(last.all(), known.tensor("step_eval_batch11_losses"), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(last.r_c, known.tensor("step_eval_batch11_rc"), rtol=0, atol=TOLERANCE)
    logits = found.head(last.r_c).detach()
    torch.testing.assert_close(logits, known.tensor("step_eval_batch11_logits_y"), rtol=0, atol=TOLERANCE)


def test_training_plan_with_online_head_ends_with_original_weights():
    """The blocks are trained by `TrainingPlan`, the head by the code of ``train(online_head=True)``."""
    known = known_answers("scbd_losses")
    found = make_networks(known)
    head = OnlineHead(found.blocks.content, 4, **ADAMW, seed=0)
    put(known.tensors("step_init.head_y.").values(), head.linear.parameters())
    plan = TrainingPlan(found.blocks, head=head, lr_decay=False, **ADAMW)
    batches = [dict(zip(("inputs", "y", "e"), batch(known, number), strict=True)) for number in range(5)]
    trainer = L.Trainer(
        max_steps=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    with without_messages("lightning.pytorch", [".*"]):
        trainer.fit(plan, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    check_weights(Networks(found.blocks, found.decoder, head.linear), known, "final")
    found.blocks.eval()
    pixels, _, _ = batch(known, 11)
    with torch.no_grad():
        logits = head.linear(found.blocks.embed(pixels, "c", "intermediate"))
    torch.testing.assert_close(logits, known.tensor("step_eval_batch11_logits_y"), rtol=0, atol=TOLERANCE)


def test_train_max_steps_counts_batches_original_counts_twice():
    known = known_answers("scbd_losses")
    asked = int(known["step_max_steps_given"])
    cells = make_cells()
    scvi.settings.seed = 0
    ERMModel.setup_anndata(cells, y_key="gene", e_key="well")
    model = ERMModel(cells, encoder="small")  # all systems use the same training plan
    batches = 0
    forward = model.module.forward

    def counted(*args, **kwargs):
        nonlocal batches
        batches += model.module.training
        return forward(*args, **kwargs)

    model.module.forward = counted  # type: ignore[method-assign]
    model.train(max_steps=asked, batch_size=24, enable_progress_bar=False, accelerator="cpu")
    assert batches == model.trainer.global_step == asked
    assert int(known["step_batches_trained"]) == pytest.approx(asked / 2)
    assert known["step_global_step_after_each_batch"].tolist() == list(range(2, asked + 1, 2))
