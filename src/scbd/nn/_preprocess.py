"""From integer images to what an encoder takes, on the device, saved with the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._sizes import resized_to

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from scbd._sizes import ImageSize

Intensity = Literal["auto", "scale", "arcsinh", "none"]

_N_UINT16 = 2**16
# of the size of a channel's values
_ROUNDING = 1e-6


class Preprocess(nn.Module):
    r"""Float, resize, intensity transform, standardise; flips and right-angle rotations while training.

    Parameters
    ----------
    image_shape
        ``(C, H, W)`` of the images as stored.
    dtype
        Name of their numpy dtype, for example ``"uint8"``.
    image_size
        Resize to this many pixels a side (bilinear, antialiased); images that are not square want a pair
        ``(height, width)``, which may stretch them. `None` keeps the size.
    intensity
        ``"scale"`` divides integers by their largest value; ``"arcsinh"`` takes :math:`\operatorname{arcsinh}(x)`,
        which tames the long tail of fluorescence counts (paper, appendix A); ``"none"`` leaves values as they are;
        ``"auto"`` is ``"arcsinh"`` for uint16, ``"scale"`` for uint8 and ``"none"`` for floats.
    standardize
        Subtract each channel's mean and divide by its standard deviation, both learned by :meth:`fit`.
    augment
        While training, put each image into one of its eight orientations (four when it is not square).

    Attributes
    ----------
    mean, sd
        Buffers of shape ``(C, 1, 1)``: 0 and 1 until :meth:`fit`.

    Raises
    ------
    ValueError
        If an argument is not known, or a number of pixels a side would squash images that are not square.

    Examples
    --------
    >>> preprocess = scbd.nn.Preprocess((4, 32, 32), "uint8", image_size=16, standardize=False)
    >>> preprocess(torch.full((2, 4, 32, 32), 255, dtype=torch.uint8)).shape
    torch.Size([2, 4, 16, 16])
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        dtype: str,
        *,
        image_size: ImageSize | None = None,
        intensity: Intensity = "auto",
        standardize: bool = True,
        augment: bool = False,
    ) -> None:
        super().__init__()
        if intensity not in get_args(Intensity):
            msg = f"intensity={intensity!r} is not known: use one of {', '.join(get_args(Intensity))}."
            raise ValueError(msg)
        self.image_size = image_size
        self.intensity = (
            {"uint8": "scale", "uint16": "arcsinh"}.get(dtype, "none") if intensity == "auto" else intensity
        )
        self.scale = {"uint8": 255.0, "uint16": 65535.0}.get(dtype, 1.0)
        self.standardize = standardize
        self.augment = augment
        channels, height, width = image_shape
        self.output_shape = (channels, *resized_to(image_size, height, width))
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("sd", torch.ones(channels, 1, 1))
        self.register_buffer("fitted", torch.tensor(not standardize))
        self._table: tuple[Tensor, Tensor] | None = None  # statistics, and what they make of every value

    mean: Tensor
    sd: Tensor
    fitted: Tensor

    def fit(self, batches: Iterable[Tensor], controls: np.ndarray | None = None) -> None:
        """Learn each channel's mean and standard deviation over all pixels of some batches of stored images.

        Parameters
        ----------
        batches
            Images as stored, ``(B, C, H, W)`` each.
        controls
            Not looked at: a channel has one scale, whatever was done to a cell.

        Raises
        ------
        ValueError
            If there is no image to learn from, or one holds a NaN or an infinity.
        """
        n, total, squares = 0, torch.zeros(()), torch.zeros(())
        for images in batches:
            pixels = self._transform(images.to(self.mean.device)).double()
            n += pixels.shape[0] * pixels.shape[2] * pixels.shape[3]
            total = total.to(pixels) + pixels.sum((0, 2, 3))
            squares = squares.to(pixels) + pixels.square().sum((0, 2, 3))
        if n == 0:
            msg = "Preprocess.fit was given no images."
            raise ValueError(msg)
        if not bool(squares.isfinite().all()):
            msg = (
                "Some cells have NaN or infinite pixels, from which no channel's mean can be learned: drop them, or "
                "repair their images (np.isfinite(images).all(axis=(1, 2, 3)) tells which are fine)."
            )
            raise ValueError(msg)
        mean = total / n
        sd = (squares / n - mean.square()).clamp(min=0).sqrt()
        # a channel of one value, which varies by rounding, stays at zero rather than becoming noise
        sd = torch.where(sd > _ROUNDING * (squares / n).sqrt(), sd, 1.0)
        self.mean.copy_(mean[:, None, None])
        self.sd.copy_(sd[:, None, None])
        self.fitted.fill_(True)

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Prepare stored images ``(B, C, H, W)`` of any dtype; float32, channels last in memory.

        Parameters
        ----------
        images
            As stored.
        generator
            Source of the random orientations (on the CPU).
        """
        images = self._prepared(images)
        if self.augment and self.training:
            images = random_orientation(images, generator)
        return images.contiguous(memory_format=torch.channels_last)

    def measured(self, images: Tensor) -> Tensor:
        """Stored images ``(B, C, H, W)`` in the units of :meth:`intensities`, as they lie; float32."""
        return self.intensities(self._prepared(images))

    def intensities(self, images: Tensor) -> Tensor:
        """What prepared images ``(B, C, H, W)`` were before they were standardised."""
        return images * self.sd + self.mean if self.standardize else images

    def scaled(self, intensities: Tensor) -> Tensor:
        """Intensities ``(B, C, H, W)``, as :meth:`intensities` returns them, standardised again."""
        return self._standardized(intensities.clone())

    def _prepared(self, images: Tensor) -> Tensor:
        return self._looked_up(images) if self._worth_a_table(images) else self._standardized(self._transform(images))

    def _standardized(self, images: Tensor) -> Tensor:
        return images.sub_(self.mean).div_(self.sd) if self.standardize else images

    def _worth_a_table(self, images: Tensor) -> bool:
        """Whether each value of each channel is better computed once: on a processor, arcsinh is slow."""
        resized = images.shape[-2:] != self.output_shape[1:]
        slow = self.intensity == "arcsinh" and images.dtype == torch.uint16 and images.device.type == "cpu"
        return slow and not resized and images.numel() > len(self.mean) * _N_UINT16

    def _looked_up(self, images: Tensor) -> Tensor:
        """The same numbers from a table of all 65,536 values of each channel."""
        statistics = torch.cat([self.mean, self.sd])
        if self._table is None or not torch.equal(self._table[0], statistics):
            values = torch.arange(_N_UINT16, dtype=torch.int32).to(torch.uint16).view(1, 1, 1, -1)
            values = self._standardized(self._transform(values.repeat(1, len(self.mean), 1, 1)))
            self._table = statistics, values.flatten()
        offsets = torch.arange(len(self.mean), dtype=torch.int32) * _N_UINT16
        pixels = images.permute(0, 2, 3, 1).to(torch.int32, memory_format=torch.contiguous_format).add_(offsets)
        return self._table[1].index_select(0, pixels.view(-1)).view(pixels.shape).permute(0, 3, 1, 2)

    def _transform(self, images: Tensor) -> Tensor:
        """A copy in float32, free to be changed in place, and changed in place: these tensors are large."""
        images = images.to(torch.float32, memory_format=torch.channels_last, copy=True)
        if self.image_size is not None and images.shape[-2:] != self.output_shape[1:]:
            images = F.interpolate(images, self.output_shape[1:], mode="bilinear", antialias=True, align_corners=False)
        if self.intensity == "scale":
            return images.div_(self.scale)
        if self.intensity == "arcsinh":
            return images.arcsinh_()
        return images


def random_orientation(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Put each image of a batch ``(B, C, H, W)`` into a random one of its eight (not square: four) orientations."""
    choice = torch.rand(3, len(images), generator=generator).lt(0.5).to(images.device)[:, :, None, None, None]
    images = torch.where(choice[0], images.flip(-1), images)
    images = torch.where(choice[1], images.flip(-2), images)
    if images.shape[-1] == images.shape[-2]:
        images = torch.where(choice[2], images.transpose(-1, -2), images)
    return images
