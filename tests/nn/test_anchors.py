from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from scbd.nn import Groups, share_learned, supervised_contrastive_loss
from scbd.nn._anchors import mean_over, sum_over


@given(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=9))
def test_means_are_those_of_what_is_chosen(cells):
    values, anchors = (torch.tensor(part) for part in zip(*cells, strict=True))
    torch.testing.assert_close(sum_over(values, anchors), values[anchors].sum())
    torch.testing.assert_close(mean_over(values, anchors), values[anchors].mean() if anchors.any() else torch.zeros(()))
    assert torch.equal(mean_over(values, None), values.mean()) and torch.equal(sum_over(values, None), values.sum())


class ChoosesByMask(TorchDispatchMode):
    """Counts where a tensor is asked for the rows of a mask: how many there are, the processor must wait for."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor:
            self.n += any(index is not None and index.dtype == torch.bool for index in args[1])
        self.n += func in (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)
        return func(*args, **kwargs or {})


def test_nothing_waits_for_how_many_anchors_there_are():
    labels, anchors = Groups(torch.arange(12) % 4), torch.arange(12) % 3 > 0
    z = F.normalize(torch.randn(12, 3, generator=torch.manual_seed(0)), dim=1).requires_grad_()
    with ChoosesByMask() as asked:
        z[anchors]
        assert asked.n == 1  # it would be seen
        for reduction in ("mean", "sum"):
            loss = supervised_contrastive_loss(z, labels, smoothing=0.1, anchors=anchors, reduction=reduction)
            loss.backward()
            share_learned(loss.detach(), labels, smoothing=0.1, anchors=anchors)
    assert asked.n == 1
