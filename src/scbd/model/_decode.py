"""What each block holds, shown as pictures: the additive decoder, trained after the encoders or with them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from scbd._checks import check_weight, count_or
from scbd._messages import head
from scbd.model._embed import row_numbers
from scbd.model._intensities import IntensitiesMixin
from scbd.model._reconstruction import Reconstruction
from scbd.model._settings import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anndata import AnnData

    from scbd.model._module import SCBDModule
    from scbd.nn import Likelihood

_PREFIX = "decoder_"
_CELLS = 256
# lengths of embeddings that a decoder knows are 1 but for rounding
_OFF_THE_SPHERE = 0.01
# of a run that trains a decoder: its rate, and cells a batch on frozen blocks, which need no partners
_LR, _FROZEN_CELLS = 1e-3, 128


class DecodeMixin(IntensitiesMixin):
    """Gives an image model :meth:`train_decoder`, :meth:`reconstruct`, :meth:`swap_blocks` and :meth:`decode`."""

    decoder_settings_: dict[str, Any]

    if TYPE_CHECKING:  # what the model brings
        module: SCBDModule
        is_trained_: bool
        train_indices: np.ndarray
        validation_indices: np.ndarray
        test_indices: np.ndarray
        get_latent_representation: Any

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
            default Bernoulli for images that ``intensity="scale"`` brings to between 0 and 1, as images of uint8 are
            unless another intensity was asked for; Gaussian otherwise.
        width
            Channels of the decoder's layers. The paper has 256, which is sixteen times the arithmetic.
        joint
            Train encoders and decoder together (which the paper leaves to future work); the encoders go on from where
            they are, or start here.
        weight
            Weight of the reconstruction beside the contrastive losses, when joint: times nats per value (pixel and
            channel). The larger, the more z_c holds of single cells: digits in [0, 1] (Bernoulli) bear 30, while on a
            simulated screen (Gaussian) 1 cost a part of what z_c told of genes.
        cycle
            Weight of cycle consistency: pictures with z_c of one cell and z_s of another are embedded again, and should
            be where they came from. Without it, encoders that are trained too may move what a perturbation looks like
            to z_s, and no reconstruction tells. By default 1 when joint, and 0 on frozen blocks, as in the paper.
        **training
            Arguments of :meth:`train`, such as ``max_steps``, with other defaults: ``lr`` 0.001, and on frozen blocks
            ``batch_size`` 128, shuffled plainly. The split is by default that which the encoders were trained on.

        Raises
        ------
        ValueError
            If the encoders are not trained and ``joint`` is false, or a setting does not fit the data; before any work
            is done.
        scbd.model.TrainingDiverged, KeyboardInterrupt
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
        check_weight("cycle", cycle, "weighs pictures with exchanged blocks")
        if cycle and self.module.style is None:
            msg = f"cycle={cycle} needs two blocks, and this {type(self).__name__} has z_c alone: leave it out."
            raise ValueError(msg)
        self._require(None)
        if likelihood == "auto":
            scaled = self.module.preprocess.intensity == "scale"
            likelihood = "bernoulli" if scaled and not self._beyond_unit_interval() else "gaussian"
        elif likelihood == "bernoulli" and (beyond := self._beyond_unit_interval()):
            msg = f"likelihood='bernoulli' needs intensities between 0 and 1, {beyond}: use likelihood='gaussian'."
            raise ValueError(msg)
        decoder = self.module.make_decoder(likelihood, width)
        settings = TrainSettings.of({"lr": _LR} | training)
        if not joint:
            n, p = settings.batch_size, training.get("perturbations_per_batch")
            most = max(2, min(_FROZEN_CELLS, self.adata.n_obs // 2))  # of a few wells two batches
            settings = replace(settings, batch_size=most if n is None else n, perturbations_per_batch=p)
        objective = Reconstruction(self.module, decoder, weight if joint else None, cycle=cycle)
        run = self._train(objective, settings, contrastive=joint)
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

    def reconstruct(
        self,
        adata: AnnData | None = None,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        adapt_key: str | Sequence[str] | None = None,
        batch_size: int | None = None,
    ) -> np.ndarray:
        """Decode cells from their own two embeddings.

        Parameters
        ----------
        adata
            Cells to reconstruct; the training data by default.
        indices
            Rows, in this order; all by default.
        adapt_key
            As for :meth:`get_latent_representation`: cells are embedded by what :meth:`adapt` learned of their own
            environments.
        batch_size
            Cells in a forward pass; 256 by default.

        Returns
        -------
        float32 ``(len(indices), C, H, W)``: expected intensities, as they are before standardisation (between 0 and 1
        for images of uint8; arcsinh of the counts for uint16), at the size the encoders see. Of features
        ``(len(indices), F)``, in their own units.

        Raises
        ------
        KeyError
            If the model was not adapted to any value of ``adapt_key``.
        ValueError
            If there is no decoder yet, or an index is out of range.
        """
        self._require_decoder()
        batch_size = count_or("batch_size", batch_size, _CELLS)
        embeddings = [self._embedded(block, adata, indices, adapt_key, batch_size) for block in self._blocks()]
        return self.decode(*embeddings, batch_size=batch_size)

    def swap_blocks(
        self,
        content: Sequence[int] | np.ndarray,
        style: Sequence[int] | np.ndarray,
        adata: AnnData | None = None,
        *,
        adapt_key: str | Sequence[str] | None = None,
        batch_size: int | None = None,
    ) -> np.ndarray:
        """Decode the content of some cells with the style of others: the perturbation of one in the well of the other.

        Parameters
        ----------
        content, style
            Rows whose z_c and whose z_s to take, equally many.
        adata
            Cells; the training data by default.
        adapt_key
            As for :meth:`get_latent_representation`: cells are embedded by what :meth:`adapt` learned of their own
            environments.
        batch_size
            Cells in a forward pass; 256 by default.

        Returns
        -------
        float32 ``(len(content), C, H, W)``, see :meth:`reconstruct`.

        Raises
        ------
        KeyError
            If the model was not adapted to any value of ``adapt_key``.
        ValueError
            If there is no decoder yet, the model has a single block, or the rows differ in number or are out of range.
        """
        self._require_decoder()
        if self.module.style is None:
            msg = f"This {type(self).__name__} has a single block: there is nothing to swap."
            raise ValueError(msg)
        batch_size = count_or("batch_size", batch_size, _CELLS)
        n = self._source(self._require(adata)).shape[0]
        rows = [row_numbers(indices, n) for indices in (content, style)]
        if rows[0] is None or rows[1] is None or len(rows[0]) != len(rows[1]):
            msg = "Give equally many rows for content and for style: each pair makes one image."
            raise ValueError(msg)
        z_c, z_s = (self._embedded(b, adata, r, adapt_key, batch_size) for b, r in zip("cs", rows, strict=True))
        return self.decode(z_c, z_s, batch_size=batch_size)

    def decode(self, *embeddings: np.ndarray, batch_size: int | None = None) -> np.ndarray:
        """Decode embeddings, for example points between two cells, brought back to unit length.

        Parameters
        ----------
        *embeddings
            z_c and z_s ``(N, D)`` as the losses see them, of length 1 (``get_latent_representation(center=None)``); for
            a model of a single block z_c alone.
        batch_size
            Cells in a forward pass; 256 by default.

        Returns
        -------
        float32 ``(N, C, H, W)``, see :meth:`reconstruct`.

        Raises
        ------
        ValueError
            If there is no decoder yet, or the embeddings are not those of its blocks, not finite, or of lengths that
            are off 1 by more than a hundredth.
        """
        decoder = self._require_decoder()
        batch_size = count_or("batch_size", batch_size, _CELLS)
        tensors = [torch.as_tensor(np.asarray(z), dtype=torch.float32) for z in embeddings]
        wanted = [part[0].in_features for part in decoder.parts]
        if [t.shape[1] if t.ndim == 2 else None for t in tensors] != wanted or len({len(t) for t in tensors}) != 1:
            shapes = " and ".join(str(tuple(t.shape)) for t in tensors) or "none"
            msg = f"The decoder takes {' and '.join(f'(N, {n})' for n in wanted)}, the embeddings are {shapes}."
            raise ValueError(msg)
        finite = torch.stack([t.isfinite().all(1) for t in tensors]).all(0)
        if not finite.all():
            rows = np.flatnonzero(~finite.numpy())
            msg = f"The embeddings to decode are NaN or infinite in {len(rows)} rows ({head(rows)})."
            raise ValueError(msg)
        lengths = torch.stack([t.norm(dim=1) for t in tensors])
        off = (lengths - 1).abs() > _OFF_THE_SPHERE
        if off.any():
            rows = np.flatnonzero(off.any(0).numpy())
            msg = (
                f"The embeddings to decode have other lengths than 1 in {len(rows)} rows ({head(rows)}; from "
                f"{lengths.min():.3g} to {lengths.max():.3g}): take those of cells with center=None, and divide points "
                "between cells by their length."
            )
            raise ValueError(msg)
        images = np.empty((len(tensors[0]), *self.module.preprocess.output_shape), dtype=np.float32)
        with torch.inference_mode():
            for start in range(0, len(images), batch_size):
                part = slice(start, start + batch_size)
                decoded = decoder.mean(*(t[part].to(self.module.device) for t in tensors))
                if decoder.likelihood == "gaussian":
                    decoded = self.module.preprocess.intensities(decoded)
                images[part] = decoded.cpu().numpy()
        return images

    def _blocks(self) -> str:
        return "c" if self.module.style is None else "cs"

    def _embedded(self, block: str, adata: AnnData | None, rows: Any, adapt_key: Any, batch_size: int) -> np.ndarray:
        how = {"block": block, "center": None, "adapt_key": adapt_key, "batch_size": batch_size}
        return self.get_latent_representation(adata, rows, **how)

    def _require_decoder(self) -> Any:
        if self.module.decoder is None:
            msg = "There is no decoder: call train_decoder() first (and again after train(), which moves the blocks)."
            raise ValueError(msg)
        return self.module.decoder

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
