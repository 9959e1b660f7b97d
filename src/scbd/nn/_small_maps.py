"""Convolutions on maps of a few pixels, computed without the padding: exact, and several times faster on a processor.

At 32 × 32 pixels the last stages of a ResNet work on maps of 2 × 2 and 1 × 1, where most taps of a 3 × 3 kernel touch
nothing but padding. What is left is one dense product for each output pixel.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Module = TypeVar("Module", bound=nn.Module)

# up to here the products are large and few; beyond, the library's convolution is faster
_MOST_OUTPUT_PIXELS = 4


class SmallMapConv2d(nn.Conv2d):
    """A convolution that multiplies no padding where its output has at most four pixels.

    Elsewhere, and on other devices than the processor, it is :class:`torch.nn.Conv2d`.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Convolve ``(B, C, H, W)``."""
        height, width = (self._output_size(images.shape[axis], axis - 2) for axis in (2, 3))
        if images.device.type != "cpu" or not 1 <= height * width <= _MOST_OUTPUT_PIXELS:
            return super().forward(images)
        rows = [self._touching(pixel, images.shape[2], 0) for pixel in range(height)]
        columns = [self._touching(pixel, images.shape[3], 1) for pixel in range(width)]
        pixels_first, kernel = images.permute(0, 2, 3, 1), self.weight.permute(0, 2, 3, 1)
        outputs = [
            F.linear(pixels_first[:, row, column].flatten(1), kernel[:, tap, tap_across].flatten(1), self.bias)
            for row, tap in rows
            for column, tap_across in columns
        ]
        return torch.stack(outputs, 1).unflatten(1, (height, width)).permute(0, 3, 1, 2)

    def _output_size(self, size: int, axis: int) -> int:
        return (size + 2 * int(self.padding[axis]) - self.kernel_size[axis]) // self.stride[axis] + 1

    def _touching(self, pixel: int, size: int, axis: int) -> tuple[slice, slice]:
        """Input pixels under the kernel at an output pixel, and the taps that lie over them."""
        first = pixel * self.stride[axis] - int(self.padding[axis])
        start, stop = max(first, 0), min(first + self.kernel_size[axis], size)
        return slice(start, stop), slice(start - first, stop - first)


def exact_small_maps(network: Module) -> Module:
    """Give every padded convolution of a network the form of :class:`SmallMapConv2d`, in place.

    Parameters, names, hooks and results stay what they are (results up to the rounding of another order of summation).
    Convolutions with groups, dilation, other padding than zeros, and subclasses of ``Conv2d`` are left alone.
    """
    for module in network.modules():
        # the class holds behaviour alone, so that parameters, hooks and names are best left where they are
        if type(module) is nn.Conv2d and _is_plain(module):
            module.__class__ = SmallMapConv2d
    return network


def _is_plain(convolution: nn.Conv2d) -> bool:
    padding = convolution.padding
    return (
        convolution.groups == 1
        and convolution.dilation == (1, 1)
        and convolution.padding_mode == "zeros"
        and not isinstance(padding, str)
        and any(padding)
        # else some outputs would touch nothing
        and all(p < k for p, k in zip(padding, convolution.kernel_size, strict=True))
    )
