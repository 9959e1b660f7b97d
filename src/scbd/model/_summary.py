"""What a model says of itself when it is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scbd._keys import E_REGISTRY, NUMBER_REGISTRY, Y_REGISTRY
from scbd._messages import head
from scbd.model._environments import covariates
from scbd.nn import Features

if TYPE_CHECKING:
    from torch import nn

    from scbd.model._base import ImageModel


def summary(model: ImageModel) -> str:
    """Data, inputs, what the model is made of, its state and the next step, one line each."""
    lines = [*_inputs(model), *model._parts()]
    # a model that was called trained from outside, as a callback of scvi-tools does, knows no settings
    settings = getattr(model, "training_settings_", {}) if model.is_trained_ else {}
    precision = settings.get("precision", "auto")
    of_images = ", channels last" * (len(model.module.preprocess.output_shape) > 1)
    of_images += ", small maps without their padding (exact)" * any(
        isinstance(m, Features) and of_images for m in model.module.modules()
    )
    lines.append(("compute", f"precision {precision}{of_images}, fused AdamW"))
    if model.is_trained_:
        how = f" for {settings['steps']:,} steps of {settings['batch_size']:,} cells" if settings else ""
        lines += [
            ("state", f"trained{how}"),
            *model._outcome(),
            *_adaptations(model),
            ("next", model._next),
        ]
    else:
        lines += [("state", "not trained"), ("next", "train()")]
    return "\n".join([f"{type(model).__name__}: {_cells(model)}", *(f"  {name:<9} {text}" for name, text in lines)])


def _inputs(model: ImageModel) -> list[tuple[str, str]]:
    preprocess, known = model.module.preprocess, model._registered_inputs
    if "features" in known:
        n = len(known["features"])
        left_out = len(known["columns"]) - n
        says = f"{n:,} of {model._inputs.where}, {known['dtype']}" + f", {left_out:,} constant ones left out" * bool(
            left_out
        )
        content = getattr(model.module, "content", None)
        transform = getattr(content, "transform", None)
        how = f"→ scaled, {transform.kind} → {transform.output_shape[0]}" if transform is not None else "→ scaled"
        return [("features", says), ("", how)]
    shapes = [" × ".join(map(str, shape)) for shape in (known["image_shape"], preprocess.output_shape)]
    return [
        ("images", f"{shapes[0]} {known['dtype']} ({', '.join(known['channels'])})"),
        ("", f"→ {shapes[1]}, intensity {preprocess.intensity}"),
    ]


def _adaptations(model: ImageModel) -> list[tuple[str, str]]:
    known = model.adaptations
    names = [f"{name} of {key}" for key, name in zip(known["key"], known["environment"], strict=True)]
    return [("adapted", head(names))] if names else []


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
        apart = covariates(model.registry_) if key == E_REGISTRY else None
        if apart is not None:
            numbers = zip(label["columns"], apart.max(0) + 1, strict=True)
            cells += f", {name} side by side: " + ", ".join(f"{n:,} of {column}" for column, n in numbers)
        elif label:
            cells += f", {len(label['categories']):,} {name} ({' × '.join(label['columns'])})"
    if numbers := model._registered(NUMBER_REGISTRY):
        cells += f", numbers {', '.join(numbers['columns'])}"
    return cells
