"""A still picture for dark paper: the same PNG with other colours in its palette.

The pictures of `apng` have a palette, and their pixels are indices into it. So a dark version has other colours but the
same pixels and frames. It can be made from any picture, even one in a notebook, instantly and without drawing.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

_INK, _PAPER = 0.95, 0.215  # the new lightness of ink, and of white
_INK_WAS = 0.25
_LIFT = 0.85  # below 1: colours in between move closer to the ink

_TO_CONES = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                      [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
_TO_LAB = np.array([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
                    [0.0259040371, 0.7827717662, -0.8086757660]])  # fmt: skip
"""Linear sRGB -> cones, and their cube roots -> Oklab: lightness, green to red, blue to yellow. Ottosson 2020."""


def darkened(png: bytes) -> bytes:
    """A PNG with a palette, animated or not, for dark paper.

    Every colour keeps its hue, and its lightness is reversed by `turned`. Dark on light becomes light on dark, and
    letters on a coloured box stay as easy to read.
    """
    if b"PLTE" not in png:
        raise ValueError("this PNG has no palette whose colours could change; the pictures of tplab's widgets have one")
    out, at = [png[:8]], 8
    while at < len(png):
        size = struct.unpack(">I", png[at : at + 4])[0]
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        if kind == b"PLTE":
            colours = np.frombuffer(data, np.uint8).reshape(-1, 3)
            data = turned(colours).tobytes()
        out.append(struct.pack(">I", size) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
        at += 12 + size
    return b"".join(out)


def turned(colours: np.ndarray) -> np.ndarray:
    """The colours [n, 3], 0 to 255, for dark paper: in Oklab, L -> paper + (ink - paper) ((1 - L) / (1 - L of ink))^p.

    A colour that a screen cannot show is made paler until it can.
    """
    srgb = colours.astype(float) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    lab = np.cbrt(linear @ _TO_CONES.T) @ _TO_LAB.T
    lab[:, 0] = _PAPER + (_INK - _PAPER) * np.clip((1 - lab[:, 0]) / (1 - _INK_WAS), 0, 1) ** _LIFT
    chroma = np.ones(len(lab))
    for _ in range(40):
        shown = lab * np.stack([np.ones(len(lab)), chroma, chroma], 1)
        linear = (shown @ np.linalg.inv(_TO_LAB).T) ** 3 @ np.linalg.inv(_TO_CONES).T
        outside = (linear < -1e-6).any(1) | (linear > 1 + 1e-6).any(1)
        if not outside.any():
            break
        chroma[outside] *= 0.93
    linear = np.clip(linear, 0, 1)
    srgb = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.round(255 * srgb).astype(np.uint8)
