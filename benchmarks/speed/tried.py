"""What was tried and does not pay, or is left to the user: measured the same way, so that it can be tried again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from _compare import Row, compared, timed
from _scale import Scale
from step import SETTINGS, batch, library_convolutions, take_step
from torch import nn

from scbd.model._objective import SCBDModule
from scbd.nn import Preprocess

SHAPE = (3, 32, 32)


def rounds(one: Callable[[], Any], other: Callable[[], Any], repeats: int) -> Row:
    """The first is what scbd does; a ratio above one says that the other is faster."""
    one(), other()
    seconds = [[timed(one)[0], timed(other)[0]] for _ in range(repeats)]
    return compared(np.array(seconds))


def rows(scale: Scale) -> list[Row]:
    (encoder, size), repeats = scale.of(("resnet18", 2048), ("small", 16)), scale.repeats
    torch.manual_seed(0)
    module = SCBDModule(Preprocess(SHAPE, "uint8"), encoder=encoder, **SETTINGS)
    inputs = batch(size, SHAPE)
    table = []
    for bf16 in (False, True):
        name = "bfloat16" if bf16 else "float32"
        table.append({"claim": f"a thread for each encoder, {name}", **threads(module, inputs, bf16, repeats)})
        table.append({"claim": f"torch.compile, {name}", **compiled(module, inputs, bf16, repeats)})
    table.append({"claim": "AdamW: fused → foreach", **optimizers(module, inputs, repeats)})
    table.append(
        {
            "claim": "small maps: exact → the library's convolution, bfloat16",
            **convolutions(module, inputs, repeats),
        }
    )
    return [row | {"note": "naive: as scbd does it; scbd: the alternative"} for row in table]


def optimizer_of(module: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4, **kwargs)


def threads(module: SCBDModule, inputs: dict[str, torch.Tensor], bf16: bool, repeats: int) -> Row:
    """Forward and backward of both encoders, one after the other with all threads, or side by side with half each."""
    images = module.preprocess(inputs["inputs"])
    half = max(1, torch.get_num_threads() // 2)

    def one(block: nn.Module) -> None:
        block.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            z = block(images)
        z.sum().backward()

    blocks = (module.content, module.style)
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(half,)) as pool:
        return rounds(lambda: [one(block) for block in blocks], lambda: list(pool.map(one, blocks)), repeats)


def compiled(module: SCBDModule, inputs: dict[str, torch.Tensor], bf16: bool, repeats: int) -> Row:
    other = copy.deepcopy(module)
    other.content.compile()
    other.style.compile()
    steps = [(form, optimizer_of(form, fused=True)) for form in (module, other)]
    return rounds(*(lambda step=step: take_step(*step, inputs, bf16) for step in steps), repeats)


def optimizers(module: SCBDModule, inputs: dict[str, torch.Tensor], repeats: int) -> Row:
    """The update alone."""
    other = copy.deepcopy(module)
    steps = [(module, optimizer_of(module, fused=True)), (other, optimizer_of(other, foreach=True))]
    for form, optimizer in steps:
        take_step(form, optimizer, {key: value[:64] for key, value in inputs.items()}, False)
    return rounds(*(optimizer.step for _, optimizer in steps), 4 * repeats)


def convolutions(module: SCBDModule, inputs: dict[str, torch.Tensor], repeats: int) -> Row:
    other = copy.deepcopy(module)
    library_convolutions(other)
    steps = [(form, optimizer_of(form, fused=True)) for form in (module, other)]
    return rounds(*(lambda step=step: take_step(*step, inputs, True) for step in steps), repeats)
