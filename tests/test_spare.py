"""Memory that was freed goes back to the system."""

import ctypes
import sys

import pytest

from tplab import spare

C = ctypes.CDLL(None) if sys.platform == "linux" else None
pytestmark = pytest.mark.skipif(not hasattr(C, "malloc_trim"), reason="glibc alone has malloc_trim")
BLOCK = 65_536  # small enough to be on the heap, whose free parts glibc keeps


def allocate_and_free(num_bytes: int) -> int:
    """The address of the one block that is kept: above all others, so that the heap cannot shrink at its end."""
    assert C is not None
    C.malloc.restype, C.malloc.argtypes, C.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    blocks = [C.malloc(BLOCK) for _ in range(num_bytes // BLOCK)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[:-1]:
        C.free(block)
    return blocks[-1]


def test_what_is_spare_after_large_work_goes_back():
    spare.give_back()  # what earlier tests have left would be used again
    before = spare.resident_bytes()
    with spare.returned():
        last = allocate_and_free(4 * spare.WORTH_RETURNING)
        assert spare.resident_bytes() - before > 3 * spare.WORTH_RETURNING
    assert spare.resident_bytes() - before < spare.WORTH_RETURNING
    C.free(last)  # type: ignore[union-attr]


def test_small_work_is_not_looked_into(monkeypatch: pytest.MonkeyPatch):
    asked: list[None] = []
    monkeypatch.setattr(spare, "give_back", lambda: asked.append(None))
    with spare.returned():
        pass
    assert asked == []
    monkeypatch.setattr(spare, "resident_bytes", iter([0, spare.WORTH_RETURNING]).__next__)
    with spare.returned():
        pass
    assert asked == [None]
