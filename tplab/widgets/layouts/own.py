"""The reader's own model in the controls of `layout_lab`: its sizes as text, "layers=32, hidden=4096, ..."."""

from __future__ import annotations

from typing import Any

from tplab.forecast import Model

SIZES = {
    "layers": ("layers", 1024),
    "hidden": ("hidden", 2**17),
    "heads": ("query heads", 1024),
    "kv_heads": ("key, value heads", 1024),
    "head_dim": ("features per head", 1024),
    "ffn": ("MLP's features", 2**20),
    "vocab": ("vocabulary", 2**21),
    "experts": ("experts, or 0", 4096),
    "experts_per_token": ("of them per token", 256),
}
"""Field of a Model -> the name of its control, and the largest number it accepts."""
NAME = "your model"


def is_own(text: str) -> bool:
    """Whether a setting of the control "model" consists of sizes rather than a name."""
    return "=" in text


def sizes_of(text: str) -> dict[str, int]:
    """The sizes in such a text. Raises ValueError if one is missing, or is not a number that its control accepts."""
    found = {}
    for pair in text.split(","):
        name, _, number = (part.strip() for part in pair.partition("="))
        most = SIZES[name][1] if name in SIZES else 0
        if not most or not number.isdecimal() or int(number) > most:
            about = f"it must be a whole number, {most:,} at most" if most else f"there are {', '.join(SIZES)}"
            raise ValueError(f"{name} is {number!r} in a model of your own; {about}")
        found[name] = int(number)
    missing = [name for name in SIZES if name not in found]
    if missing:
        raise ValueError(f"a model of your own has no {', '.join(missing)}")
    return found


def own_model(text: str) -> Model:
    """A Llama-like model of these sizes, with a gated MLP, rotary positions, no biases and an untied head. Raises
    ShapeError for sizes that do not fit together."""
    given: dict[str, Any] = {**sizes_of(text), "name": NAME}
    return Model(**given)


def sizes(model: Model) -> dict[str, int]:
    """The sizes of any model for the controls."""
    widths = {"kv_heads": model.num_kv_heads, "head_dim": model.head_width, "ffn": model.ffn_width}
    return {name: widths[name] if name in widths else getattr(model, name) for name in SIZES}
