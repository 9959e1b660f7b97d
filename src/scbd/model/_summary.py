"""What a model says of itself when it is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scbd._keys import E_REGISTRY, IMAGE_REGISTRY, Y_REGISTRY
from scbd.nn import Features

if TYPE_CHECKING:
    from torch import nn

    from scbd.model._base import ImageModel


def summary(model: ImageModel) -> str:
    """Data, images, what the model is made of, its state and the next step, one line each."""
    preprocess, images = model.module.preprocess, model._registered(IMAGE_REGISTRY)
    shapes = [" × ".join(map(str, shape)) for shape in (images["image_shape"], preprocess.output_shape)]
    lines = [
        ("images", f"{shapes[0]} {images['dtype']} ({', '.join(images['channels'])})"),
        ("", f"→ {shapes[1]}, intensity {preprocess.intensity}"),
        *model._parts(),
    ]
    # a model that was called trained from outside, as a callback of scvi-tools does, knows no settings
    settings = getattr(model, "training_settings_", {}) if model.is_trained_ else {}
    precision = settings.get("precision", "auto")
    small_maps = ", small maps without their padding (exact)" * any(
        isinstance(m, Features) for m in model.module.modules()
    )
    lines.append(("compute", f"precision {precision}, channels last{small_maps}, fused AdamW"))
    if model.is_trained_:
        how = f" for {settings['steps']:,} steps of {settings['batch_size']:,} cells" if settings else ""
        lines += [
            ("state", f"trained{how}"),
            *model._outcome(),
            ("next", model._next),
        ]
    else:
        lines += [("state", "not trained"), ("next", "train()")]
    return "\n".join([f"{type(model).__name__}: {_cells(model)}", *(f"  {name:<9} {text}" for name, text in lines)])


def parameters(module: nn.Module) -> str:
    """Their number."""
    return f"{sum(p.numel() for p in module.parameters()):,} parameters"


def encoder_name(encoder: str | nn.Module) -> str:
    """As it was asked for, or the class of a module."""
    return encoder if isinstance(encoder, str) else type(encoder).__name__


def _cells(model: ImageModel) -> str:
    cells = "no data attached" if model.adata is None else f"{model.adata.n_obs:,} cells"
    for name, key in (("perturbations", Y_REGISTRY), ("environments", E_REGISTRY)):
        label = model._registered(key)
        if label:
            cells += f", {len(label['categories']):,} {name} ({' × '.join(label['columns'])})"
    return cells
