"""The network and objective of SCBD: two blocks, three losses (paper, eq. 1). Torch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from scbd._checks import check_count, check_weight
from scbd.model._alpha import Alpha, AutoAlpha
from scbd.nn import (
    AdditiveDecoder,
    Block,
    InvarianceReduction,
    Preprocess,
    check_smoothing,
    check_temperature,
    gather,
    invariance_loss,
    invariance_statistic,
    log_normaliser,
    pair_codes,
    share_learned,
    supervised_contrastive_loss,
)

if TYPE_CHECKING:
    from scbd.nn import Likelihood

BlockName = Literal["c", "s"]
Representation = Literal["embedding", "intermediate"]
StyleTarget = Literal["e", "ye"]
Invariance = Literal["variance", InvarianceReduction]


class Embedded(NamedTuple):
    """A batch in both blocks."""

    z: tuple[Tensor, ...]
    """z_c and, unless it is left out, z_s, each ``(B, D)``."""
    passed: list[Tensor]
    """What the images were on the way to z_c, if the form of invariance looks there: a vector a stage, and r_c."""

    def gathered(self) -> Embedded:
        """The joint batch of all processes."""
        return Embedded(tuple(map(gather, self.z)), list(map(gather, self.passed)))


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
        Weight of the invariance loss, or ``"auto"``, see :class:`scbd.model.AutoAlpha`.
    temperature
        Temperature of all three losses.
    smoothing
        Of the labels of z_c, see :func:`scbd.nn.supervised_contrastive_loss`.
    style_target
        What z_s is clustered by: the environment ``"e"``, or the pair ``"ye"``; `None` leaves z_s out.
    include_self
        Self-similarity in the normaliser, see :mod:`scbd.nn.losses`.
    invariance
        Form of the invariance loss: ``"variance"``, at every stage on the way to z_c and there, see
        :func:`scbd.nn.invariance_statistic`; or one of the contrastive forms, on z_c, see
        :func:`scbd.nn.invariance_loss`.
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
        alpha: Alpha,
        temperature: float,
        smoothing: float,
        style_target: StyleTarget | None,
        include_self: bool,
        invariance: Invariance,
        **preprocess: Any,
    ) -> None:
        super().__init__()
        if invariance not in get_args(Invariance):
            msg = f"invariance={invariance!r} is not known: use one of {', '.join(get_args(Invariance))}."
            raise ValueError(msg)
        if isinstance(alpha, str) and alpha != "auto":
            msg = f"alpha={alpha!r} is not known: give a number, or 'auto'."
            raise ValueError(msg)
        if alpha == "auto" and invariance != "variance":
            msg = (
                f"alpha='auto' knows the scale of invariance='variance', not of {invariance!r}: give a number, or "
                "choose one by a sweep (scbd.select_alpha)."
            )
            raise ValueError(msg)
        if alpha != "auto":
            check_weight("alpha", alpha, "weighs the invariance loss")
        check_count("n_latent", n_latent)
        check_temperature(temperature)
        check_smoothing(smoothing)
        if style_target not in (None, *get_args(StyleTarget)):
            msg = (
                f"style_target={style_target!r} is not known: use 'e' (environment), 'ye' (the pair) or None (no z_s)."
            )
            raise ValueError(msg)
        self.alpha = alpha
        self.auto_alpha = AutoAlpha() if alpha == "auto" else None
        self.temperature = temperature
        self.smoothing = smoothing
        self.style_target = style_target
        self.include_self = include_self
        self.invariance = invariance
        self.preprocess = Preprocess(image_shape, dtype, **preprocess)
        self.content = Block(encoder, self.preprocess.output_shape, n_latent)
        self.style = Block(encoder, self.preprocess.output_shape, n_latent) if style_target else None
        self.decoder: AdditiveDecoder | None = None  # comes with train_decoder

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.preprocess.mean.device

    @property
    def settings(self) -> dict[str, Any]:
        """Of the objective; a resumed run must share them."""
        return {name: getattr(self, name) for name in ("alpha", "smoothing", "invariance")}

    @property
    def current_alpha(self) -> float | Tensor:
        """Alpha as of now: the number given, or what ``"auto"`` has found so far, a scalar."""
        return float(self.alpha) if self.auto_alpha is None else self.auto_alpha.alpha

    def forward(
        self, images: Tensor, y: Tensor, e: Tensor, *, ramp: float = 1.0, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Losses of a batch: ``loss`` and its parts, that of z_c without smoothing, and ``z_c``, without gradient.

        Parameters
        ----------
        images
            As stored, ``(B, C, H, W)``.
        y, e
            Codes, ``(B,)``.
        ramp
            Factor of alpha, below 1 while it warms up.
        generator
            Source of the random orientations.
        """
        return self.losses(self.blocks(self.preprocess(images, generator)), y, e, ramp=ramp)

    def blocks(self, images: Tensor) -> Embedded:
        """Embed preprocessed images ``(B, C, H, W)``."""
        if self.invariance == "variance":
            z_c, passed = self.content.watched(images)
        else:
            z_c, passed = self.content(images), []
        return Embedded((z_c,) if self.style is None else (z_c, self.style(images)), passed)

    def losses(self, embedded: Embedded, y: Tensor, e: Tensor, *, ramp: float = 1.0) -> dict[str, Tensor]:
        """Objective of embedded cells, those of all processes together, see :meth:`forward`."""
        embedded, y, e = embedded.gathered(), gather(y), gather(e)
        z_c, *z_s = embedded.z
        shared: dict[str, Any] = {"temperature": self.temperature, "include_self": self.include_self}
        # all losses on z_c read the same Gram matrix
        normaliser = log_normaliser(z_c, **shared)
        loss = supervised_contrastive_loss(z_c, y, smoothing=self.smoothing, log_normaliser=normaliser, **shared)
        parts = {"supervised_c": loss}
        parts["learned_c"] = share_learned(loss.detach(), y, smoothing=self.smoothing, include_self=self.include_self)
        if self.smoothing:
            # shown as it would be without: beside the ceiling, a smoothed loss looks dead
            with torch.no_grad():
                parts["supervised_c"] = supervised_contrastive_loss(z_c, y, log_normaliser=normaliser, **shared)
        for z in z_s:
            labels = e if self.style_target == "e" else pair_codes(y, e)
            parts["supervised_s"] = supervised_contrastive_loss(z, labels, **shared)
            loss = loss + parts["supervised_s"]
        if self.invariance == "variance":
            parts["invariance_c"] = invariance_statistic((*embedded.passed, z_c), e, y)
        else:
            kind = self.invariance
            parts["invariance_c"] = invariance_loss(z_c, e, reduction=kind, log_normaliser=normaliser, **shared)
        return {"loss": loss + ramp * self.current_alpha * parts["invariance_c"], **parts, "z_c": z_c.detach()}

    def compile_blocks(self) -> None:
        """Let :func:`torch.compile` have both blocks, in place: parameters and their names stay."""
        for block in (self.content, self.style):
            if block is not None:
                block.compile()

    def width(self, block: BlockName, representation: Representation) -> int:
        """Dimension of what :meth:`embed` returns."""
        net = self.content if block == "c" else self.style
        assert net is not None
        return net.n_latent if representation == "embedding" else net.n_features

    def embed(self, images: Tensor, block: BlockName, representation: Representation) -> Tensor:
        """Embed stored images ``(B, C, H, W)``: ``z`` of shape ``(B, D)``, or ``r`` of shape ``(B, R)``."""
        net = self.content if block == "c" else self.style
        assert net is not None
        r = net.encoder(self.preprocess(images))
        return r if representation == "intermediate" else net.project(r)

    def make_decoder(self, likelihood: Likelihood, width: int) -> AdditiveDecoder:
        """An untrained decoder of both blocks to images as the encoders see them."""
        n_latents = tuple(block.n_latent for block in (self.content, self.style) if block is not None)
        return AdditiveDecoder(n_latents, self.preprocess.output_shape, width=width, likelihood=likelihood)

    def on_load(self, model: Any, **kwargs: Any) -> None:
        """Make room for the decoder that was saved with the model (part of scvi-tools' loading contract)."""
        if model.decoder_settings_:
            self.decoder = self.make_decoder(model.decoder_settings_["likelihood"], model.decoder_settings_["width"])
