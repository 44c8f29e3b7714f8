"""Animated PNG. After the first frame, only the pixels that change are stored; the others are transparent.

Pillow also writes animated PNGs, but stores everything inside each frame's bounding box. That is five to ten times
larger for pictures like these, in which small things move far from each other. W3C, PNG specification, third edition.

The pictures have a palette, and their pixels are indices into it. So a version for dark paper has other colours but the
same pixels and frames. It can be made from any picture, even one in a notebook, instantly and without drawing.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from tplab.widgets.paper.palette import shades

_SOURCE, _OVER = 0, 1  # how a frame is combined with the one before
_COLOURS = 128
_CLEAR = 255  # the palette's index for "unchanged"


def encode(frames: Sequence[Image.Image], milliseconds: Sequence[int], plays: int = 1) -> bytes:
    """RGB images of one size as one PNG, animated if there are several; `plays` = 0 repeats it forever."""
    palette = _palette(frames)
    nearest = _Nearest(palette)
    flat = [nearest(image) for image in frames]
    height, width = flat[0].shape
    out = [b"\x89PNG\r\n\x1a\n", _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))]
    out.append(_chunk(b"PLTE", palette.astype(np.uint8).tobytes().ljust(3 * 256, b"\0")))
    out.append(_chunk(b"tRNS", b"\xff" * _CLEAR + b"\0"))
    changes = _changes(flat, milliseconds)
    if len(changes) > 1:
        out.append(_chunk(b"acTL", struct.pack(">II", len(changes), plays)))
    number = 0
    for index, (pixels, x, y, time) in enumerate(changes):
        data = zlib.compress(np.pad(pixels, ((0, 0), (1, 0))).tobytes(), 7)  # each line begins with its filter: none
        if len(changes) > 1:
            rows, columns = pixels.shape
            blend = _OVER if index else _SOURCE
            control = struct.pack(">IIIIIHHBB", number, columns, rows, x, y, time, 1000, 0, blend)
            out.append(_chunk(b"fcTL", control))
            number += 1
        if index == 0:
            out.append(_chunk(b"IDAT", data))
        else:
            out.append(_chunk(b"fdAT", struct.pack(">I", number) + data))
            number += 1
    out.append(_chunk(b"IEND", b""))
    return b"".join(out)


def _palette(frames: Sequence[Image.Image]) -> np.ndarray:
    """Our own colours, even if they cover few pixels, then those that cover most of a few sample frames."""
    few = [frames[index * (len(frames) - 1) // 2].reduce(2) for index in range(3)]
    sheet = Image.new("RGB", (few[0].width, few[0].height * len(few)))
    for index, image in enumerate(few):
        sheet.paste(image, (0, index * image.height))
    own = shades()
    common = sheet.quantize(_COLOURS - len(own), method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    others = np.array(common.getpalette() or [], int).reshape(-1, 3)
    return np.concatenate([np.array(own, int), others])[:_COLOURS]


class _Nearest:
    """Pixels -> indices of the nearest colours of a palette. Pillow's own search rounds, and turns white grey."""

    def __init__(self, palette: np.ndarray):
        self._palette = palette
        self._place = np.full(1 << 24, _CLEAR, np.uint8)  # by colour; filled in when a colour first appears

    def __call__(self, image: Image.Image) -> np.ndarray:
        pixels = np.asarray(image).astype(np.uint32)
        code = pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2]
        new = np.unique(code[self._place[code] == _CLEAR]).astype(int)
        colours = np.stack([new >> 16, new >> 8 & 255, new & 255], 1)
        for part in np.array_split(np.arange(len(new)), len(new) // 4096 + 1):
            distance = ((colours[part, None] - self._palette) ** 2).sum(2)
            self._place[new[part]] = distance.argmin(1)
        return self._place[code]


def _changes(flat: Sequence[np.ndarray], milliseconds: Sequence[int]) -> list[tuple[np.ndarray, int, int, int]]:
    """For each frame: (pixels, x, y, how long it is shown). If nothing changes, the previous frame stays longer."""
    changes = [(flat[0], 0, 0, milliseconds[0])]
    for before, now, time in zip(flat, flat[1:], milliseconds[1:], strict=False):
        changed = before != now
        if not changed.any():
            pixels, x, y, so_far = changes[-1]
            changes[-1] = (pixels, x, y, so_far + time)
            continue
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        part = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        pixels = np.where(changed[part], now[part], _CLEAR).astype(np.uint8)
        changes.append((pixels, int(columns[0]), int(rows[0]), time))
    return changes


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


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
