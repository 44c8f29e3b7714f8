"""Whether two copies of a result are the same, whatever their memory looks like."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tplab.torch.ranks import results

MAKE = {
    "plain": lambda: torch.arange(12.0).view(3, 4),
    "NaN": lambda: torch.full((3, 4), torch.nan),
    "another order in memory": lambda: torch.arange(12.0).view(4, 3).t(),
    "every second element": lambda: torch.arange(24.0).view(3, 8)[:, ::2],
    "conjugated": lambda: torch.arange(12).view(3, 4).to(torch.complex64).mul(1j).conj(),
    "negated": lambda: torch.arange(12).view(3, 4).to(torch.complex64).mul(1j).conj().imag,
    "bfloat16": lambda: torch.arange(12.0).view(3, 4).bfloat16(),
    "booleans": lambda: torch.arange(12).view(3, 4) % 2 == 0,
    "bits": lambda: torch.arange(12, dtype=torch.uint8).view(3, 4).view(torch.bits8),
    "nothing": lambda: torch.empty(3, 0),
    "a number": lambda: torch.tensor(3.0),
}


@pytest.mark.parametrize("with_c", [True, False])
@pytest.mark.parametrize("name", MAKE)
def test_copies_and_what_differs_in_one_element(name: str, with_c: bool, monkeypatch: pytest.MonkeyPatch):
    if not with_c:
        monkeypatch.setattr(results, "_memcmp", None)
    x: Tensor = MAKE[name]()
    assert results._have_same_bits(x, MAKE[name]())
    if name in ("bits", "nothing"):
        return
    contiguous = x.resolve_conj().resolve_neg().contiguous()
    assert results._have_same_bits(x, contiguous) and results._have_same_bits(contiguous, x)
    other = contiguous.clone()
    other.view(-1)[-1] = 1 if other.dtype is not torch.bool else ~other.view(-1)[-1]
    assert not results._have_same_bits(x, other) and not results._have_same_bits(other, x)
