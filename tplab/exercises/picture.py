"""A picture that is also a sentence."""

from __future__ import annotations

import base64
from typing import Any

from tplab.widgets.matrices import Panel, matrices

__all__ = ["Panel", "Picture", "matrices"]


class Picture:
    """A PNG: in a notebook the picture is shown, elsewhere the sentence."""

    def __init__(self, sentence: str, png: bytes):
        self.sentence, self.png = sentence, png

    def __repr__(self) -> str:
        return self.sentence

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return {"text/plain": self.sentence, "image/png": base64.b64encode(self.png).decode()}
