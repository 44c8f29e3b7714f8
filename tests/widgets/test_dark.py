"""Still pictures for dark paper: the same pixels, other colours, letters that can be read."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from labs.source import build
from tplab.schedules import one_f_one_b
from tplab.widgets import gantt
from tplab.widgets.paper import palette
from tplab.widgets.paper.apng import darkened, turned

ROOT = Path(__file__).parents[2]


def contrast(one: str, other: str) -> float:
    """Of two colours on dark paper, as WCAG counts it: 1 to 21."""
    srgb = turned(np.array([palette.rgb(one), palette.rgb(other)])) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    darker, lighter = sorted(linear @ [0.2126, 0.7152, 0.0722])
    return (lighter + 0.05) / (darker + 0.05)


def test_what_is_written_can_be_read():
    letters = [palette.INK, palette.DIM, palette.ACCENT, *palette.HUES, palette.KINDS["F"], palette.GRADIENT]
    assert {colour for colour in letters if contrast(colour, palette.PAPER) < 4.5} == set()
    assert contrast(palette.INK, palette.KINDS["I"]) >= 3.9 and contrast(palette.INK, palette.KINDS["W"]) >= 4.5
    assert contrast(palette.KINDS["I"], palette.PAPER) >= 3


def test_a_moving_picture_keeps_its_frames_and_its_size():
    png = (ROOT / "docs" / "ring.png").read_bytes()
    light, dark = Image.open(BytesIO(png)), Image.open(BytesIO(darkened(png)))
    num_frames = [getattr(one, "n_frames") for one in (light, dark)]  # noqa: B009  only moving pictures have it
    assert num_frames == [num_frames[0]] * 2 and light.info["loop"] == dark.info["loop"]
    assert len(darkened(png)) == len(png)
    for frame in (0, num_frames[0] - 1):
        light.seek(frame)
        dark.seek(frame)
        before, after = (np.asarray(one.convert("RGB")).reshape(-1, 3) for one in (light, dark))
        assert np.array_equal(turned(before), after)  # each pixel by itself
    assert after.mean() < 70 < 200 < before.mean()


def test_colours_keep_their_hue_and_their_order_is_turned_round():
    assert turned(np.array([[255, 255, 255]])).max() < 32 and turned(np.array([palette.rgb(palette.INK)])).min() > 220
    greys = turned(np.repeat(np.arange(256)[:, None], 3, 1))
    assert bool((np.diff(greys.mean(1)) <= 0).all()) and np.ptp(greys, axis=1).max() <= 1
    red, green, blue = turned(np.array([[208, 52, 44], [15, 125, 92], [47, 107, 216]])).argmax(1)
    assert (red, green, blue) == (0, 1, 2)


def test_every_picture_of_the_readme_has_its_dark_version_beside_it():
    readme = (ROOT / "README.md").read_text(encoding="utf8")
    pairs = re.findall(r'dark\)" srcset="([^"]+)">\n<img alt="[^"]+" src="([^"]+)">', readme)
    assert len(pairs) == readme.count("<img") == 2
    # Their addresses are whole, since the README is shown elsewhere too.
    at = build.repository().replace("https://github.com", "https://raw.githubusercontent.com") + "/main/"
    for dark, light in ((dark.removeprefix(at), light.removeprefix(at)) for dark, light in pairs):
        assert (ROOT / dark).read_bytes() == darkened((ROOT / light).read_bytes()), f"{dark} is not of {light}"


def test_a_picture_without_a_palette_is_refused():
    plain = BytesIO()
    Image.new("RGB", (2, 2)).save(plain, "png")
    with pytest.raises(ValueError, match="no palette"):
        darkened(plain.getvalue())
    assert darkened(gantt(one_f_one_b(2, 2)).picture()).startswith(b"\x89PNG")
