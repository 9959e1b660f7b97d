from __future__ import annotations

import tracemalloc

import pytest

from scbd.data.sources._packed import Packed


def test_texts_come_back_as_they_were():
    texts = [b"a", b"", b"\x00\xff", b"a longer one"]
    packed = Packed(iter(texts))
    assert len(packed) == 4 and list(packed) == texts and packed[-1] == texts[-1] and packed[1:3] == texts[1:3]
    with pytest.raises(IndexError):
        packed[4]
    assert not len(Packed([]))


def test_they_take_little_more_than_their_letters():
    tracemalloc.start()
    packed = Packed(b"%020d" % number for number in range(20_000))
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(packed) == 20_000 and size < 32 * 20_000 and peak < 64 * 20_000
