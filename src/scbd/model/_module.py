"""The network and objective of SCBD: two blocks, three losses (paper, eq. 1). Torch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor, nn

from scbd.nn import Block, Preprocess, invariance_loss, log_normaliser, supervised_contrastive_loss

if TYPE_CHECKING:
    import torch

    from scbd.nn.losses import InvarianceReduction

BlockName = Literal["c", "s"]
Representation = Literal["embedding", "intermediate"]
StyleTarget = Literal["e", "ye"]


class SCBDModule(nn.Module):
    r"""Two encoders that meet only in the objective

    .. math:: L^{sup}_{z_c, y} + L^{sup}_{z_s, e} + \alpha L^{inv}_{z_c, e}.

    Parameters
    ----------
    image_shape
        ``(C, H, W)`` of the images as stored.
    dtype
        Their numpy dtype.
    encoder
        Name or module, see :func:`scbd.nn.build_encoder`; each block has its own.
    n_latent
        Dimension of both embeddings.
    alpha
        Weight of the invariance loss.
    temperature
        Temperature of all three losses.
    style_target
        What z_s is clustered by: the environment ``"e"``, or the pair ``"ye"``.
    include_self
        Self-similarity in the normaliser, see :mod:`scbd.nn.losses`.
    invariance
        Form of the invariance loss, see :func:`scbd.nn.invariance_loss`.
    **preprocess
        See :class:`scbd.nn.Preprocess`.
    """  # noqa: D400

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        dtype: str,
        *,
        encoder: str | nn.Module,
        n_latent: int,
        alpha: float,
        temperature: float,
        style_target: StyleTarget,
        include_self: bool,
        invariance: InvarianceReduction,
        **preprocess: Any,
    ) -> None:
        super().__init__()
        if not alpha >= 0:
            msg = f"alpha weighs the invariance loss and cannot be negative, got {alpha}."
            raise ValueError(msg)
        if style_target not in get_args(StyleTarget):
            msg = f"style_target={style_target!r} is not known: use 'e' (environment) or 'ye' (the pair)."
            raise ValueError(msg)
        self.alpha = alpha
        self.temperature = temperature
        self.style_target = style_target
        self.include_self = include_self
        self.invariance = invariance
        self.preprocess = Preprocess(image_shape, dtype, **preprocess)
        self.content = Block(encoder, self.preprocess.output_shape, n_latent)
        self.style = Block(encoder, self.preprocess.output_shape, n_latent)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.preprocess.mean.device

    def forward(
        self, images: Tensor, y: Tensor, e: Tensor, *, alpha: float | None = None, generator: Any = None
    ) -> dict[str, Tensor]:
        """Losses of a batch: ``loss`` and its three parts; and ``z_c``, detached.

        Parameters
        ----------
        images
            As stored, ``(B, C, H, W)``.
        y, e
            Codes, ``(B,)``.
        alpha
            In place of the module's, while it warms up.
        generator
            Source of the random orientations.
        """
        images = self.preprocess(images, generator)
        z_c, z_s = self.content(images), self.style(images)
        shared: dict[str, Any] = {"temperature": self.temperature, "include_self": self.include_self}
        # both losses on z_c read the same Gram matrix
        normaliser = log_normaliser(z_c, **shared) if self.invariance in ("listing", "formula") else None
        style_labels = e if self.style_target == "e" else y * (e.max() + 1) + e
        parts = {
            "supervised_c": supervised_contrastive_loss(z_c, y, log_normaliser=normaliser, **shared),
            "supervised_s": supervised_contrastive_loss(z_s, style_labels, **shared),
            "invariance_c": invariance_loss(z_c, e, reduction=self.invariance, log_normaliser=normaliser, **shared),
        }
        alpha = self.alpha if alpha is None else alpha
        loss = parts["supervised_c"] + parts["supervised_s"] + alpha * parts["invariance_c"]
        return {"loss": loss, **parts, "z_c": z_c.detach()}

    def compile_blocks(self) -> None:
        """Let :func:`torch.compile` have both blocks, in place: parameters and their names stay."""
        for block in (self.content, self.style):
            block.compile()

    def embed(self, images: Tensor, block: BlockName, representation: Representation) -> Tensor:
        """Embed stored images ``(B, C, H, W)``: ``z`` of shape ``(B, D)``, or ``r`` of shape ``(B, R)``."""
        net = self.content if block == "c" else self.style
        r = net.encoder(self.preprocess(images))
        return r if representation == "intermediate" else net.project(r)

    def on_load(self, model: Any, **kwargs: Any) -> None:
        """Nothing to restore besides the state (part of scvi-tools' loading contract)."""
