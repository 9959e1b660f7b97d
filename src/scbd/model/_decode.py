"""Decoder that maps the embeddings z_c and z_s to pictures, trained after the encoders or jointly with them.

The decoder is additive: z_c and z_s each add a separate contribution to the picture. The file also holds
:meth:`DecodeMixin.traverse`, which decodes pictures while z_c moves from one perturbation to another.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from scbd._shared.checks import check_count, check_number, count_or_default, join_first
from scbd._shared.labels import as_columns, label_text, label_values
from scbd.model._arguments import explain_arguments, keyword_names
from scbd.model._decoding import CELLS_READ_PER_BLOCK, DECODE_BATCH_SIZE, PictureMixin
from scbd.model._embed import row_numbers
from scbd.model._interfaces import Losses, Objective
from scbd.model._minified import block_names
from scbd.model._train import TRAINER_ARGUMENTS, TrainMixin

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anndata import AnnData
    from torch import Tensor

    from scbd.model._auto_alpha import AutoAlpha
    from scbd.model._objective import SCBDModule
    from scbd.nn._decoders import AdditiveDecoder, Likelihood
    from scbd.nn._environment_scaling import EnvironmentScaling

# prefix of the names of the decoder's losses in model.history, for example of decoder_train_loss
_PREFIX = "decoder_"
# maximum number of cells from which traverse computes the mean z_c of a perturbation
_MAX_CELLS_PER_MEAN = 1000
# maximum deviation from unit length of an embedding that is decoded; it allows for rounding errors
_UNIT_LENGTH_TOLERANCE = 0.01
# default learning rate of decoder training, and its default batch size if the encoders are frozen; a batch then need
# not hold several cells of a perturbation
_LR, _FROZEN_BATCH_SIZE = 1e-3, 128
# divisor of the number of cells in a batch: the cycle loss is computed from one quarter of the cells, which is enough
# to learn from, at a low cost
_EXCHANGE_EVERY = 4


class DecoderObjective(Objective):
    """Objective that trains a decoder: the negative log-likelihood of the inputs of cells, given their embeddings.

    Parameters
    ----------
    module
        Module with the encoders whose embeddings are decoded.
    decoder
        Decoder to train.
    weight
        Weight of the negative log-likelihood in joint training, where it is added to the contrastive losses of the
        module. With `None`, the encoders are frozen, and only the decoder is trained.
    cycle
        Weight of :meth:`cycle_loss`. It must be 0 for a model with z_c only.
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
        """Settings of the decoder and of the module, which must be the same when an interrupted run is resumed."""
        return self.module.settings | self.own_settings

    @property
    def own_settings(self) -> dict[str, Any]:
        """Settings of the decoder and its losses, without the settings of the encoders."""
        decoder = {"likelihood": self.decoder.likelihood, "width": self.decoder.width}
        return decoder | {"weight": self.weight, "cycle": self.cycle}

    @property
    def device(self) -> torch.device:
        """Device that holds the parameters, such as a GPU."""
        return self.module.device

    @property
    def alpha_rule(self) -> AutoAlpha | None:
        """Rule that adapts alpha, the weight of the invariance loss, during joint training.

        `None` if the encoders are frozen or alpha is constant.
        """
        return None if self.weight is None else self.module.alpha_rule

    def train(self, mode: bool = True) -> DecoderObjective:
        """Set training or evaluation mode; frozen encoders stay in evaluation mode.

        In training mode, the running statistics of BatchNorm would change, and with them the embeddings of the frozen
        encoders.
        """
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
        ramp: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Losses:
        """Compute the losses of a batch of cells.

        The loss is the negative log-likelihood of the inputs, in nats per value, plus the weighted cycle loss. A value
        is one channel of a pixel, or one feature. In joint training, the negative log-likelihood is weighted, and the
        contrastive losses of the module are added.

        Parameters
        ----------
        inputs, y, e, ramp, generator
            See :meth:`SCBDModule.forward`.
        """
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
        losses = self.module.losses(blocks, y, e, ramp=ramp)
        return losses._replace(loss=losses.loss + loss, parts={**losses.parts, **parts})

    def cycle_loss(
        self, z_c: Tensor, z_s: Tensor, e: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Compute the cycle loss: pictures decoded from z_c and z_s of different cells should have these embeddings.

        Each picture is decoded from z_c of one cell and z_s of another cell, and is then embedded by the encoders. The
        loss is the squared distance between the new embeddings and the embeddings that the picture was decoded from,
        averaged over z_c and z_s. It lies between 0 and 4.

        If z_s is clustered by pairs of perturbation y and environment e, only z_c is compared: such a z_s contains y of
        its own cell, whereas the picture shows y of the cell that z_c was taken from.

        The weights of the encoders are frozen while they embed the pictures. The decoder thereby learns to draw the
        contribution of z_c to a picture from the information in z_c only, and the contribution of z_s from z_s only.

        Parameters
        ----------
        z_c, z_s
            Embeddings of the cells of a batch, ``(B, D)`` each.
        e
            Codes of the environments of the cells, int64 ``(B,)``. Before a picture is embedded, it is standardised in
            the environment of the cell that z_s was taken from.
        generator
            Random number generator that draws the pairs of cells from which pictures are decoded. Without one, the
            pairs are the same in each call.

        Returns
        -------
        A scalar.

        References
        ----------
        Zhu et al. (2017), Unpaired image-to-image translation using cycle-consistent adversarial networks; Jha et al.
        (2018), Disentangling factors of variation with cycle-consistent variational auto-encoders.
        """
        n = len(z_c)
        order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
        some = max(1, n // _EXCHANGE_EVERY)
        z_c, z_s = z_c[order[:some].to(z_c.device)], z_s[order[-some:].to(z_s.device)]
        pictures = self.decoder.mean(z_c, z_s)
        if self.decoder.likelihood == "bernoulli":
            pictures = self.module.preprocess.scaled(pictures)
        within = pictures
        environments: EnvironmentScaling | None = self.module.preprocess.environments
        if environments is not None and e is not None:
            within = environments(pictures, self.module.columns(e[order[-some:].to(e.device)]))
        looking = [(self.module.content, within, z_c)]
        # a z_s that is clustered by pairs of y and e contains y of its own cell, whereas the picture shows y of another
        if self.module.style_target == "e":
            looking.append((self.module.style, pictures, z_s))
        missed = []
        for block, images, z in looking:
            with _frozen_for_context(block):
                missed.append((block(images).float() - z.detach().float()).square().sum(1).mean())
        return torch.stack(missed).mean()


@contextmanager
def _frozen_for_context(block: nn.Module) -> Iterator[None]:
    """Freeze the parameters of an encoder within a ``with`` statement, and put the encoder into evaluation mode.

    Gradients still reach the inputs of the encoder.
    """
    was = block.training, [parameter.requires_grad for parameter in block.parameters()]
    block.eval().requires_grad_(False)
    try:
        yield
    finally:
        block.train(was[0])
        for parameter, learns in zip(block.parameters(), was[1], strict=True):
            parameter.requires_grad_(learns)


class DecodeMixin(PictureMixin, TrainMixin):
    """Mixin that gives a model a decoder, which maps embeddings to pictures.

    It adds :meth:`train_decoder`, :meth:`traverse` and the methods of :class:`PictureMixin`.
    """

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
        """Train a decoder, which shows as pictures the information that the embeddings z_c and z_s contain.

        z_c and z_s each add a separate contribution to the picture (paper, appendix A), so that one of them can be
        exchanged, see :meth:`swap_blocks`. By default the encoders are frozen, as in the paper, and the embeddings do
        not change.

        Parameters
        ----------
        likelihood
            ``"bernoulli"`` for intensities between 0 and 1, or ``"gaussian"``, with one learned scale, for any
            intensities. ``"auto"`` selects ``"bernoulli"`` if the model prepares images with ``intensity="scale"`` and
            their intensities then lie between 0 and 1, and ``"gaussian"`` otherwise.
        width
            Number of channels of the decoder's layers. The paper uses 256, which takes sixteen times as many operations
            as 64.
        joint
            Whether to train encoders and decoder together (which the paper leaves to future work). Training continues
            from the current weights of the encoders, which need not have been trained before.
        weight
            Weight of the reconstruction loss in joint training, where it is added to the contrastive losses. The
            reconstruction loss is in nats per value (pixel and channel). With a larger weight, z_c contains more
            information on individual cells.
        cycle
            Weight of the cycle loss: pictures are decoded from z_c of one cell and z_s of another and embedded again,
            and the new embeddings should equal these z_c and z_s. Default: 1 in joint training of a model with z_c and
            z_s, otherwise 0, as in the paper.
        **training
            Arguments of :meth:`train`, such as ``max_steps``. Some defaults differ: ``lr`` is 0.001. With frozen
            encoders, ``batch_size`` is 128, or half the number of cells if there are fewer than 256, and batches are
            drawn at random, without equal numbers of cells per perturbation. The default split is the one that the
            encoders were trained with.

        Raises
        ------
        ValueError
            If the encoders are not trained and ``joint`` is false, or if a setting does not fit the data. The error is
            raised before training starts.
        scbd.model.TrainingDiverged, KeyboardInterrupt, SystemExit
            If training diverges or is interrupted, see :meth:`train`. The partly trained decoder is kept; if the run
            made no step, an earlier decoder is kept.

        Notes
        -----
        With frozen encoders, ``history`` holds the loss as ``decoder_train_loss`` and ``decoder_validation_loss``. In
        joint training, ``history`` holds the reconstruction loss as ``train_reconstruction`` and
        ``validation_reconstruction``, next to the losses of the encoders. The cycle loss, a squared distance between 0
        and 4, is named ``decoder_train_cycle`` and ``decoder_validation_cycle``, or in joint training ``train_cycle``
        and ``validation_cycle``.
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
        self._adata_or_attached(None)
        decoder = self.module.make_decoder(self._choose_likelihood(likelihood), width)
        settings = self._make_train_settings(**{"lr": _LR} | training)
        if not joint:
            n, p = settings.batch_size, training.get("perturbations_per_batch")
            # at most half of the rows form a batch, so that even a table of a few wells gives two batches
            most = max(2, min(_FROZEN_BATCH_SIZE, self.adata.n_obs // 2))
            settings = replace(settings, batch_size=most if n is None else n, perturbations_per_batch=p)
        objective = DecoderObjective(self.module, decoder, weight if joint else None, cycle=cycle)
        run = self._fit(objective, settings, contrastive=joint)
        try:
            if joint:
                self._store_run(run)
        finally:  # an interrupted run keeps the partly trained decoder, as it keeps the partly trained encoders
            if run.moved:
                self._remove_decoder()
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
        r"""Decode pictures of cells while z_c moves in steps from their own perturbation to another perturbation.

        The pictures predict the effect of the other perturbation on a cell in the cell's own environment. For :math:`t`
        from 0 to 1, z_c is replaced by :math:`z_c + t\,(\mu_{to} - \mu_{own})`, scaled to unit length. Here
        :math:`\mu_{own}` is the mean z_c of all cells with the cell's own perturbation, and :math:`\mu_{to}` is the
        mean z_c of all cells with the other perturbation. Each mean is computed from at most 1,000 cells, a random
        choice that is the same in each call.

        The cell's z_s does not change. The difference between the cell and the mean of its perturbation is kept as
        well: before scaling, the last z_c differs from :math:`\mu_{to}` as the first differs from :math:`\mu_{own}`.

        Parameters
        ----------
        indices
            Row numbers of the cells to start from, for example controls, or a boolean mask.
        to
            Perturbation to move to, a label of ``y_key``.
        adata
            Table that holds the cells of ``indices``, and all cells from which the means are computed, with their
            perturbations. Default: the training data.
        n_steps
            Number of pictures per cell. The first is the reconstruction of the cell, the last is at :math:`t = 1`.
        batch_size
            Number of cells per forward pass. Default: 256.

        Returns
        -------
        Array, float32 ``(len(indices), n_steps, C, H, W)`` of images, or ``(len(indices), n_steps, F)`` of features, in
        the units of :meth:`reconstruct`.

        Raises
        ------
        KeyError
            If no cell has the perturbation ``to``.
        ValueError
            If no decoder has been trained, or ``n_steps`` is less than 2.

        See Also
        --------
        scbd.pl.traverse : Draws these pictures.
        """
        self._require_decoder()
        check_count("n_steps", n_steps, least=2)
        batch_size = count_or_default("batch_size", batch_size, DECODE_BATCH_SIZE)
        adata = self._adata_or_attached(adata)
        y_key = self.registry_["setup_args"]["y_key"]
        found = label_values(adata.obs, as_columns(y_key)).cat
        labels, wanted = found.rename_categories(label_text).astype(str).to_numpy(), label_text(to)
        if wanted not in labels:
            msg = f"to={to!r}: no cell has this perturbation. Those of {y_key!r} are {join_first(np.unique(labels))}."
            raise KeyError(msg)
        rows = row_numbers(indices, adata.n_obs)
        rows = np.arange(adata.n_obs) if rows is None else rows
        blocks = {block: self._embedded(block, adata, rows, batch_size) for block in block_names(self.module)}
        names, places = np.unique([wanted, *labels[rows]], return_inverse=True)
        means = np.stack([self._mean_content(adata, labels == name, batch_size) for name in names])
        step = means[places[0]] - means[places[1:]]
        path = blocks["c"][:, None] + np.linspace(0, 1, n_steps, dtype=np.float32)[:, None] * step[:, None]
        path /= np.linalg.norm(path, axis=-1, keepdims=True)
        others = [np.repeat(z, n_steps, axis=0) for block, z in blocks.items() if block != "c"]
        images = self.decode(path.reshape(-1, path.shape[-1]), *others, batch_size=batch_size)
        return images.reshape(len(rows), n_steps, *images.shape[1:])

    def _mean_content(self, adata: AnnData, of_label: np.ndarray, batch_size: int) -> np.ndarray:
        """Return the mean z_c ``(D,)`` of the cells of a perturbation, which are given by a boolean mask.

        If there are more than 1,000 cells, the mean is computed from 1,000 random cells, the same in each call.
        """
        rows = np.random.default_rng(0).permutation(np.flatnonzero(of_label))[:_MAX_CELLS_PER_MEAN]
        return self._embedded("c", adata, np.sort(rows), batch_size).mean(0)

    def _choose_likelihood(self, asked: Likelihood | Literal["auto"]) -> Likelihood:
        """Return the likelihood of the decoder: the requested one, or for ``"auto"`` one that fits the intensities.

        To decide if a Bernoulli likelihood fits, the intensities of up to 512 random cells are read.

        Raises
        ------
        ValueError
            If the Bernoulli likelihood is requested and the intensities are not between 0 and 1.
        """
        if asked == "gaussian" or (asked == "auto" and self.module.preprocess.intensity != "scale"):
            return "gaussian"
        n = self._source(self._adata_or_attached(None)).shape[0]
        values = self.get_intensities(indices=np.sort(np.random.default_rng(0).permutation(n)[:CELLS_READ_PER_BLOCK]))
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
        # the comparison is negated so that the result is also true for embeddings with NaN
        off = ~((lengths - 1).abs() <= _UNIT_LENGTH_TOLERANCE)
        if off.any():
            rows = np.flatnonzero(off.any(0).numpy())
            msg = (
                f"The embeddings to decode have other lengths than 1 in {len(rows)} rows ({join_first(rows)}): take "
                "those of cells with center=None, and divide points between cells by their length."
            )
            raise ValueError(msg)

    @contextmanager
    def _without_untrained_parts(self) -> Iterator[None]:
        """Detach the decoder from the model during a training run, so that the run neither trains nor saves it."""
        decoder, settings = self.module.decoder, self.decoder_settings_
        self.module.decoder, self.decoder_settings_ = None, {}
        try:
            yield
        finally:
            self.module.decoder, self.decoder_settings_ = decoder, settings

    def _reset_derived_attributes(self) -> None:
        """Reset the attributes computed from the weights of the encoders, and remove the decoder.

        The decoder was trained on embeddings of the earlier weights.
        """
        super()._reset_derived_attributes()
        self._remove_decoder()

    def _remove_decoder(self) -> None:
        self.module.decoder = None
        self.decoder_settings_ = {}
        if self.history_:
            self.history_ = {name: frame for name, frame in self.history_.items() if not name.startswith(_PREFIX)}
