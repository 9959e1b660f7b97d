from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from scbd.nn._groups import Groups, pair_codes

codes = st.lists(st.integers(-3, 5), min_size=1, max_size=12)


@given(codes)
def test_sums_and_counts_are_those_of_the_label(labels):
    values = torch.arange(2.0 * len(labels)).view(-1, 2)
    groups = Groups(torch.tensor(labels))
    for i, label in enumerate(labels):
        same = [j for j, other in enumerate(labels) if other == label]
        assert groups.n_others[i] == len(same) - 1
        torch.testing.assert_close(groups.sums(values)[i], values[same].sum(0))


@given(codes, st.randoms())
def test_pairs_share_a_code_where_both_are_shared(labels, random):
    environments = [random.randint(-2, 3) for _ in labels]
    pairs = pair_codes(torch.tensor(labels), torch.tensor(environments)).tolist()
    both = list(zip(labels, environments, strict=True))
    for i, one in enumerate(both):
        for j, other in enumerate(both):
            assert (pairs[i] == pairs[j]) == (one == other)


@given(st.data())
def test_labels_of_few_bits_are_crossed_like_wide_ones(data):
    """As the codes of few categories are in pandas: their pairs are more than there are numbers."""
    labels, others = (data.draw(st.lists(st.integers(0, 120), min_size=60, max_size=60)) for _ in range(2))
    dtype = data.draw(st.sampled_from([torch.int8, torch.uint8, torch.int16, torch.int32]))
    wide, narrow = (
        Groups(torch.tensor(labels, dtype=kind)).crossed(Groups(torch.tensor(others, dtype=kind)))
        for kind in (torch.int64, dtype)
    )
    assert torch.equal(narrow.n_others, wide.n_others)
    assert torch.equal(narrow.labels, wide.labels)
