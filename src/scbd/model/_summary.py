"""What a model says of itself when it is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scbd._keys import E_REGISTRY, IMAGE_REGISTRY, Y_REGISTRY

if TYPE_CHECKING:
    from scbd.model._scbd import SCBDModel


def summary(model: SCBDModel) -> str:
    """Data, images, blocks, objective, state and the next step, one line each."""
    module, images = model.module, model._registered(IMAGE_REGISTRY)
    encoder = model.init_params_["non_kwargs"]["encoder"]
    encoder = encoder if isinstance(encoder, str) else type(encoder).__name__
    n_parameters = sum(p.numel() for p in module.parameters())
    shapes = [" × ".join(map(str, shape)) for shape in (images["image_shape"], module.preprocess.output_shape)]
    blocks, style = "z_c alone", ""
    if module.style is not None:
        blocks, style = "z_c, z_s", f", z_s clustered by {' × '.join(module.style_target)}"
    lines = [
        f"{type(model).__name__}: {_cells(model)}",
        f"  images    {shapes[0]} {images['dtype']} ({', '.join(images['channels'])})",
        f"            → {shapes[1]}, intensity {module.preprocess.intensity}",
        f"  blocks    {blocks}: {encoder} → r ({module.content.n_features}) → z ({module.content.n_latent}), "
        f"{n_parameters:,} parameters",
        f"  objective alpha {_alpha(model)} ({module.invariance}), temperature {module.temperature:g}, "
        f"smoothing {module.smoothing:.2g}{style}",
    ]
    precision = model.training_settings_["precision"] if model.is_trained_ else "auto"
    lines.append(
        f"  compute   precision {precision}, channels last, small maps without their padding (exact), fused AdamW"
    )
    if not model.is_trained_:
        return "\n".join([*lines, "  state     not trained", "  next      train()"])
    settings, health = model.training_settings_, model.health
    lines.append(f"  state     trained for {settings['steps']:,} steps of {settings['batch_size']:,} cells")
    if health:
        lines.append(
            f"            z_c {'COLLAPSED' if health['collapsed'] else 'alive'}: supervised loss "
            f"{health['supervised_c']:.2f} (a point: {health['ceiling']:.2f}), spread {health['spread']:.2f}, "
            f"effective rank {health['effective_rank']:.1f}"
        )
    if model.decoder_settings_:
        decoder = model.decoder_settings_
        together = "with the encoders" if decoder["joint"] else "on frozen blocks"
        lines.append(f"  decoder   {decoder['likelihood']}, width {decoder['width']}, trained {together}")
    return "\n".join([*lines, "  next      get_latent_representation(block='c')"])


def _alpha(model: SCBDModel) -> str:
    module = model.module
    if module.auto_alpha is None:
        return f"{module.alpha:g}"
    return f"auto, {float(module.current_alpha):.2g} in the end" if model.is_trained_ else "auto"


def _cells(model: SCBDModel) -> str:
    cells = "no data attached" if model.adata is None else f"{model.adata.n_obs:,} cells"
    for name, key in (("perturbations", Y_REGISTRY), ("environments", E_REGISTRY)):
        label = model._registered(key)
        if label:
            cells += f", {len(label['categories']):,} {name} ({' × '.join(label['columns'])})"
    return cells
