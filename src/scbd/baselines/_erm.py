"""Empirical risk minimisation: a classifier of y that knows nothing of e (Vapnik, 1995)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._keys import IMAGE_REGISTRY, Y_REGISTRY
from scbd.model import ImageModel
from scbd.nn import Features, Preprocess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from scbd.nn.preprocess import Intensity


class ClassifierModule(nn.Module):
    """One encoder and a linear head, trained by cross-entropy.

    Parameters
    ----------
    image_shape
        ``(C, H, W)`` of the images as stored.
    dtype
        Their numpy dtype.
    encoder
        Name or module, see :func:`scbd.nn.build_encoder`.
    n_labels
        Number of different y.
    **preprocess
        See :class:`scbd.nn.Preprocess`.
    """

    style = None  # a single block

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        dtype: str,
        *,
        encoder: str | nn.Module,
        n_labels: int,
        **preprocess: Any,
    ) -> None:
        super().__init__()
        self.preprocess = Preprocess(image_shape, dtype, **preprocess)
        self.content = Features(encoder, self.preprocess.output_shape)
        self.head = nn.Linear(self.content.n_features, n_labels)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.preprocess.mean.device

    def forward(
        self, images: Tensor, y: Tensor, e: Tensor, *, ramp: float = 1.0, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """``loss`` of a batch of stored images ``(B, C, H, W)`` with codes ``(B,)``; e is not looked at."""
        logits = self.head(self.content(self.preprocess(images, generator)))
        return {"loss": F.cross_entropy(logits.float(), y)}

    def compile_blocks(self) -> None:
        """Let :func:`torch.compile` have the encoder, in place."""
        self.content.compile()

    def width(self, block: str, representation: str) -> int:
        """Dimension of what :meth:`embed` returns."""
        return self.content.n_features

    def embed(self, images: Tensor, block: str, representation: str) -> Tensor:
        """Features before the head ``(B, R)``: embedding and intermediate representation are one here."""
        return self.content(self.preprocess(images))

    def on_load(self, model: Any, **kwargs: Any) -> None:
        """Nothing to restore besides the state (part of scvi-tools' loading contract)."""


class ERMModel(ImageModel):
    """A plain classifier of the perturbation, the baseline of domain generalisation.

    Its embedding, ``get_latent_representation()``, is what the encoder gives to the linear head.

    Parameters
    ----------
    adata
        Cells that :meth:`setup_anndata` was called on.
    encoder
        See :class:`scbd.SCBDModel`.
    image_size, intensity, standardize, augment
        Preprocessing, see :class:`scbd.nn.Preprocess`.
    registry
        Used by :meth:`load` for a model without data.
    """

    def __init__(
        self,
        adata: AnnData | None = None,
        encoder: str | nn.Module = "resnet18",
        image_size: int | None = None,
        intensity: Intensity = "auto",
        standardize: bool = True,
        augment: bool = False,
        registry: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        images = self._registered(IMAGE_REGISTRY)
        self.module = ClassifierModule(
            tuple(images["image_shape"]),
            images["dtype"],
            encoder=encoder,
            n_labels=len(self._registered(Y_REGISTRY)["categories"]),
            image_size=image_size,
            intensity=intensity,
            standardize=standardize,
            augment=augment,
        )

    def predict(
        self,
        adata: AnnData | None = None,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        return_proba: bool = False,
        batch_size: int = 512,
    ) -> np.ndarray:
        """Predict the perturbation of cells.

        Parameters
        ----------
        adata
            Cells with images; the training data by default.
        indices
            Rows, in this order; all by default.
        return_proba
            Return probabilities, ``(len(indices), n_labels)``, in the order of the registered categories.
        batch_size
            Cells in a forward pass.

        Returns
        -------
        Labels, ``(len(indices),)``.
        """
        r = torch.from_numpy(self.get_latent_representation(adata, indices, batch_size=batch_size))
        with torch.inference_mode():
            logits = self.module.head(r.to(self.module.device)).cpu()
        if return_proba:
            return logits.softmax(1).numpy()
        return np.asarray(self._registered(Y_REGISTRY)["categories"])[logits.argmax(1).numpy()]
