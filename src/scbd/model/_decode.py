"""What each block holds, shown as pictures: the additive decoder, trained after the encoders or with them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from scbd._anndata import as_columns, label_text, label_values
from scbd._checks import check_count, check_number, count_or, head
from scbd.model._arguments import explain_arguments, keyword_names
from scbd.model._contract import Losses, Objective
from scbd.model._embed import row_numbers
from scbd.model._minified import blocks_of
from scbd.model._pictures import CELLS, READ, PictureMixin
from scbd.model._train import TRAINER_ARGUMENTS, TrainMixin

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anndata import AnnData
    from torch import Tensor

    from scbd.model._contract import AutoAlpha
    from scbd.model._objective import SCBDModule
    from scbd.nn._decoders import AdditiveDecoder, Likelihood
    from scbd.nn._inputs import EnvironmentScaling

_PREFIX = "decoder_"
# cells of a perturbation, for the mean of its embeddings
_OF_A_MEAN = 1000
# lengths of embeddings that a decoder knows are 1 but for rounding
_OFF_THE_SPHERE = 0.01
# of a run that trains a decoder: its rate, and cells a batch on frozen blocks, which need no partners
_LR, _FROZEN_CELLS = 1e-3, 128
# one cell of a batch in so many has its blocks exchanged: enough to learn from, and little work
_EXCHANGED = 4


class Reconstruction(Objective):
    """The decoder's objective: the likelihood of inputs given the embeddings of a module.

    ``weight`` is that of the reconstruction beside the contrastive losses; `None` leaves the blocks frozen. ``cycle``
    is that of :meth:`cycle_loss`; 0 leaves it out, as a model of a single block must.
    """

    def __init__(
        self, module: SCBDModule, decoder: AdditiveDecoder, weight: float | None, *, cycle: float = 0.0
    ) -> None:
        super().__init__()
        self.module = module
        self.decoder = decoder
        self.weight = weight
        self.cycle = cycle

    @property
    def settings(self) -> dict[str, Any]:
        """Of the decoder, and of the blocks; a resumed run must share them."""
        return self.module.settings | self.own_settings

    @property
    def own_settings(self) -> dict[str, Any]:
        """Of the decoder alone."""
        decoder = {"likelihood": self.decoder.likelihood, "width": self.decoder.width}
        return decoder | {"weight": self.weight, "cycle": self.cycle}

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.module.device

    @property
    def alpha_rule(self) -> AutoAlpha | None:
        """Of the blocks, if they are trained."""
        return None if self.weight is None else self.module.alpha_rule

    def train(self, mode: bool = True) -> Reconstruction:
        """Frozen blocks stay in evaluation mode: BatchNorm's statistics are part of the embedding."""
        super().train(mode)
        if self.weight is None:
            self.module.eval()
        return self

    def forward(
        self,
        inputs: Tensor,
        y: Tensor,
        e: Tensor,
        *,
        numbers: Tensor | None = None,
        ramp: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Losses:
        """Negative log-likelihood, nats a value; when joint beside the losses of the blocks."""
        prepared = self.module.prepare(inputs, e, generator)
        target = prepared.whole
        if self.decoder.likelihood == "bernoulli":
            target = self.module.preprocess.intensities(target)
        with torch.set_grad_enabled(self.weight is not None and torch.is_grad_enabled()):
            blocks = self.module.blocks(prepared)
        nats = self.decoder.negative_log_likelihood(target, *blocks.z)
        loss, parts = nats if self.weight is None else self.weight * nats, {"reconstruction": nats}
        if self.cycle:
            z_c, z_s = blocks.z
            parts["cycle"] = self.cycle_loss(z_c, z_s, e, generator=generator)
            loss = loss + self.cycle * parts["cycle"]
        if self.weight is None:
            return Losses(loss, parts if self.cycle else {})
        losses = self.module.losses(blocks, y, e, numbers, ramp=ramp)
        return losses._replace(loss=losses.loss + loss, parts={**losses.parts, **parts})

    def cycle_loss(
        self, z_c: Tensor, z_s: Tensor, e: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Squared distance between the blocks of a picture and those it was decoded from, if these are of two cells.

        The encoders only look here, as they are: what is learned is to draw, in each part of a picture, what its block
        says, and nothing that the other block says. From 0 to 4, the mean of both blocks ``(B, D)``; of z_c alone if
        z_s is clustered by pairs of y and e. Without a generator, pairs are always the same. A picture is of the
        environment of its z_s, of which ``e (B,)`` are the codes.

        References
        ----------
        Zhu et al. (2017), Unpaired image-to-image translation using cycle-consistent adversarial networks; Jha et al.
        (2018), Disentangling factors of variation with cycle-consistent variational auto-encoders.
        """
        n = len(z_c)
        order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
        some = max(1, n // _EXCHANGED)
        z_c, z_s = z_c[order[:some].to(z_c.device)], z_s[order[-some:].to(z_s.device)]
        pictures = self.decoder.mean(z_c, z_s)
        if self.decoder.likelihood == "bernoulli":
            pictures = self.module.preprocess.scaled(pictures)
        within = pictures
        environments: EnvironmentScaling | None = self.module.preprocess.environments
        if environments is not None and e is not None:
            within = environments(pictures, self.module.columns(e[order[-some:].to(e.device)]))
        looking = [(self.module.content, within, z_c)]
        if self.module.style_target == "e":  # of a pair, no picture with another's content would be
            looking.append((self.module.style, pictures, z_s))
        missed = []
        for block, images, z in looking:
            with _looking(block):
                missed.append((block(images).float() - z.detach().float()).square().sum(1).mean())
        return torch.stack(missed).mean()


@contextmanager
def _looking(block: nn.Module) -> Iterator[None]:
    """A block in evaluation mode, through which gradients pass without teaching it."""
    was = block.training, [parameter.requires_grad for parameter in block.parameters()]
    block.eval().requires_grad_(False)
    try:
        yield
    finally:
        block.train(was[0])
        for parameter, learns in zip(block.parameters(), was[1], strict=True):
            parameter.requires_grad_(learns)


class DecodeMixin(PictureMixin, TrainMixin):
    """Gives an image model a decoder, :meth:`train_decoder`, and pictures: :meth:`reconstruct`, :meth:`traverse`."""

    module: SCBDModule
    decoder_settings_: dict[str, Any]

    @explain_arguments(*keyword_names(TrainMixin.train), *TRAINER_ARGUMENTS)
    def train_decoder(
        self,
        *,
        likelihood: Likelihood | Literal["auto"] = "auto",
        width: int = 64,
        joint: bool = False,
        weight: float = 1.0,
        cycle: float | None = None,
        **training: Any,
    ) -> None:
        """Train a decoder of the embeddings, to see what each block holds.

        Each block adds its own part to the picture (paper, appendix A), so that one can be exchanged:
        :meth:`swap_blocks`. By default the embeddings are frozen, as in the paper, and are the same before and after.

        Parameters
        ----------
        likelihood
            ``"bernoulli"`` for intensities between 0 and 1; ``"gaussian"``, with one learned scale, for any. By
            default Bernoulli for images that ``intensity="scale"`` brings to between 0 and 1; Gaussian otherwise.
        width
            Channels of the decoder's layers. The paper has 256, which is sixteen times the arithmetic.
        joint
            Train encoders and decoder together (which the paper leaves to future work); the encoders go on from where
            they are, or start here.
        weight
            Weight of the reconstruction beside the contrastive losses, when joint: times nats per value (pixel and
            channel). The larger, the more z_c holds of single cells.
        cycle
            Weight of cycle consistency: pictures with z_c of one cell and z_s of another are embedded again, and should
            be where they came from. By default 1 when joint, and 0 on frozen blocks, as in the paper.
        **training
            Arguments of :meth:`train`, such as ``max_steps``, with other defaults: ``lr`` 0.001, and on frozen blocks
            ``batch_size`` 128, shuffled plainly. The split is by default that which the encoders were trained on.

        Raises
        ------
        ValueError
            If the encoders are not trained and ``joint`` is false, or a setting does not fit the data; before any work
            is done.
        scbd.model.TrainingDiverged, KeyboardInterrupt, SystemExit
            As :meth:`train`. The decoder is kept as far as it came; one from before, where the run made no step.

        Notes
        -----
        The loss is in ``history`` under ``decoder_train_loss`` and ``decoder_validation_loss``; jointly, it is
        ``train_reconstruction`` and ``validation_reconstruction`` beside the others. ``cycle``, under the same names,
        is a squared distance from 0 to 4.
        """
        if not joint and not self.is_trained_:
            msg = "The encoders are not trained: call train() first, or train both together with joint=True."
            raise ValueError(msg)
        if not weight > 0:
            msg = f"weight={weight}: the reconstruction needs a positive weight."
            raise ValueError(msg)
        if cycle is None:
            cycle = float(joint and self.module.style is not None)
        check_number("cycle", cycle)
        if cycle and self.module.style is None:
            msg = f"cycle={cycle} needs two blocks, and this {type(self).__name__} has z_c alone: leave it out."
            raise ValueError(msg)
        self._require(None)
        decoder = self.module.make_decoder(self._likelihood(likelihood), width)
        settings = self._train_settings(**{"lr": _LR} | training)
        if not joint:
            n, p = settings.batch_size, training.get("perturbations_per_batch")
            most = max(2, min(_FROZEN_CELLS, self.adata.n_obs // 2))  # of a few wells two batches
            settings = replace(settings, batch_size=most if n is None else n, perturbations_per_batch=p)
        objective = Reconstruction(self.module, decoder, weight if joint else None, cycle=cycle)
        run = self._fit(objective, settings, contrastive=joint)
        try:
            if joint:
                self._finish(run)
        finally:  # however the run ended: as far as it came, like the encoders
            if run.moved:
                self._forget_decoder()
                self.module.decoder = decoder.to(self.module.device).eval()
                self.decoder_settings_ = {"joint": joint, "steps": run.settings["steps"]} | objective.own_settings
        if not joint:
            self.history_ = (self.history_ or {}) | run.history.frames(prefix=_PREFIX)
            if run.error is not None:
                raise run.error

    @explain_arguments()
    def traverse(
        self,
        indices: Sequence[int] | np.ndarray,
        to: str | float,
        adata: AnnData | None = None,
        *,
        n_steps: int = 5,
        batch_size: int | None = None,
    ) -> np.ndarray:
        r"""Decode cells on their way to another perturbation: what it would do to a cell, in the cell's own well.

        At step :math:`t` from 0 to 1, z_c is :math:`z_c + t\,(\mu_{to} - \mu_{own})` brought back to unit length, with
        the mean z_c of the cells of a perturbation (of 1,000 of them, where there are more, always the same random
        ones); z_s stays. What a cell has of its own stays with it.

        Parameters
        ----------
        indices
            Rows of the cells that set out, controls for example.
        to
            Their perturbation in the end, a label of ``y_key``.
        adata
            Cells with their perturbations, which the means are taken of, too; the training data by default.
        n_steps
            Pictures of a cell, the first as it is (its reconstruction), the last with all of the perturbation.
        batch_size
            As for :meth:`reconstruct`.

        Returns
        -------
        float32 ``(len(indices), n_steps, C, H, W)``, or ``(len(indices), n_steps, F)`` of features, in the units of
        :meth:`reconstruct`.

        Raises
        ------
        KeyError
            If no cell has the perturbation.
        ValueError
            If there is no decoder yet, or ``n_steps`` is less than 2.

        See Also
        --------
        scbd.pl.traverse : Draws them.
        """
        self._require_decoder()
        check_count("n_steps", n_steps, least=2)
        batch_size = count_or("batch_size", batch_size, CELLS)
        adata = self._require(adata)
        y_key = self.registry_["setup_args"]["y_key"]
        found = label_values(adata.obs, as_columns(y_key)).cat
        labels, wanted = found.rename_categories(label_text).astype(str).to_numpy(), label_text(to)
        if wanted not in labels:
            msg = f"to={to!r}: no cell has this perturbation. Those of {y_key!r} are {head(np.unique(labels))}."
            raise KeyError(msg)
        rows = row_numbers(indices, adata.n_obs)
        rows = np.arange(adata.n_obs) if rows is None else rows
        blocks = {block: self._embedded(block, adata, rows, batch_size) for block in blocks_of(self.module)}
        names, places = np.unique([wanted, *labels[rows]], return_inverse=True)
        means = np.stack([self._mean_content(adata, labels == name, batch_size) for name in names])
        step = means[places[0]] - means[places[1:]]
        path = blocks["c"][:, None] + np.linspace(0, 1, n_steps, dtype=np.float32)[:, None] * step[:, None]
        path /= np.linalg.norm(path, axis=-1, keepdims=True)
        others = [np.repeat(z, n_steps, axis=0) for block, z in blocks.items() if block != "c"]
        images = self.decode(path.reshape(-1, path.shape[-1]), *others, batch_size=batch_size)
        return images.reshape(len(rows), n_steps, *images.shape[1:])

    def _mean_content(self, adata: AnnData, of_label: np.ndarray, batch_size: int) -> np.ndarray:
        """Mean z_c of cells, ``(D,)``; of many, of a random choice that is always the same."""
        rows = np.random.default_rng(0).permutation(np.flatnonzero(of_label))[:_OF_A_MEAN]
        return self._embedded("c", adata, np.sort(rows), batch_size).mean(0)

    def _likelihood(self, asked: Likelihood | Literal["auto"]) -> Likelihood:
        """What ``"auto"`` stands for, by intensities of some cells, drawn from all."""
        if asked == "gaussian" or (asked == "auto" and self.module.preprocess.intensity != "scale"):
            return "gaussian"
        n = self._source(self._require(None)).shape[0]
        values = self.get_intensities(indices=np.sort(np.random.default_rng(0).permutation(n)[:READ]))
        low, high = float(values.min()), float(values.max())
        within = low >= -1e-4 and high <= 1 + 1e-4
        if asked == "bernoulli" and not within:
            msg = (
                f"likelihood='bernoulli' needs intensities between 0 and 1, these reach from {low:.3g} to {high:.3g}: "
                "use likelihood='gaussian'."
            )
            raise ValueError(msg)
        return ("bernoulli" if within else "gaussian") if asked == "auto" else asked

    def _check_embeddings(self, embeddings: Sequence[Tensor]) -> None:
        lengths = torch.stack([z.norm(dim=1) for z in embeddings])
        off = ~((lengths - 1).abs() <= _OFF_THE_SPHERE)  # NaN, too
        if off.any():
            rows = np.flatnonzero(off.any(0).numpy())
            msg = (
                f"The embeddings to decode have other lengths than 1 in {len(rows)} rows ({head(rows)}): take those of "
                "cells with center=None, and divide points between cells by their length."
            )
            raise ValueError(msg)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """No run trains the decoder that is there, and no checkpoint of one holds it."""
        decoder, settings = self.module.decoder, self.decoder_settings_
        self.module.decoder, self.decoder_settings_ = None, {}
        try:
            yield
        finally:
            self.module.decoder, self.decoder_settings_ = decoder, settings

    def _forget(self) -> None:
        """A decoder of embeddings that are no more shows nothing."""
        super()._forget()
        self._forget_decoder()

    def _forget_decoder(self) -> None:
        self.module.decoder = None
        self.decoder_settings_ = {}
        if self.history_:
            self.history_ = {name: frame for name, frame in self.history_.items() if not name.startswith(_PREFIX)}
