"""The base of all widgets in Python: assembling their JavaScript, and the picture that is shown without a kernel.

`Step` is the trait of those with a playhead, and `Played` a card of scenes under one, drawn by static/tiles.js.
"""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Callable, Sequence
from functools import cache, cached_property, wraps
from pathlib import Path
from typing import Any, ClassVar, SupportsFloat, TypeVar, cast

import anywidget
import ipywidgets
import traitlets

from tplab.widgets.paper.legend import Key
from tplab.widgets.paper.scene import Scene, packed
from tplab.widgets.paper.still import below
from tplab.widgets.paper.wire import pack

Method = TypeVar("Method", bound=Callable[..., Any])

_STATIC = Path(__file__).parents[1] / "static"


@cache
def script(*names: str) -> str:
    """The ES modules static/{name}.js, preceded by those that they import, as one module.

    anywidget loads a widget's script from a blob, where relative imports do not work. So we drop the imports between
    these files and the word `export` (all top-level names in the files are different). We also drop comments and
    indentation, because the script is sent with every widget.
    """
    found = dict[str, str]()

    def add(name: str) -> None:
        text = (_STATIC / f"{name}.js").read_text(encoding="utf8")
        for needed in re.findall(r'from "\./(\w+)\.js";', text):
            if needed not in found:
                add(needed)
        found[name] = text

    for name in names:
        add(name)
    lines = re.sub(r"^import .*?;\n", "", "\n".join(found.values()), flags=re.MULTILINE | re.DOTALL)
    lines = re.sub(r"^export (?!default)", "", lines, flags=re.MULTILINE)
    lines = re.sub(r"^\s*//.*\n", "", lines, flags=re.MULTILINE)
    return re.sub(r"^\s+", "", lines, flags=re.MULTILINE)


@cache
def style() -> str:
    """The style sheet of all widgets. Every rule begins with .tplab, so nothing else on the page is affected."""
    return re.sub(r"\n\s*", "\n", (_STATIC / "tplab.css").read_text(encoding="utf8"))


def in_turn(method: Method) -> Method:
    """A method of a card that waits until earlier calls are done.

    JupyterLab sends a widget's first message to the kernel's main thread and the later ones to another thread. An
    answer in the middle of a search would send outdated settings to the browser.
    """

    @wraps(method)
    def waits(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return method(self, *args, **kwargs)

    return cast(Method, waits)


class Card(anywidget.AnyWidget):
    """A widget that also has a picture and a sentence. Its repr is the sentence."""

    _css = style()
    sentence: str
    above = traitlets.Unicode("").tag(sync=True)
    """The text above it; the first line is the heading."""
    kept: ClassVar[tuple[str, ...]] = ()
    """The traits that readers change and that a link to a page preserves, in the order in which they must be set."""

    def __init__(self, **traits: Any):
        self._turn = threading.RLock()
        super().__init__(**traits)

    def picture(self) -> bytes:
        """The widget as a PNG or an animated PNG."""
        raise NotImplementedError

    @cached_property
    def _picture(self) -> str:
        picture = self.picture()
        return base64.b64encode(below(self.above, picture) if self.above else picture).decode()

    def __repr__(self) -> str:
        return self.above or self.sentence

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        pictures = {**data, "text/plain": repr(self), "image/png": self._picture}
        return pictures, {**metadata, "image/png": {"alt": repr(self)}}  # nbconvert writes it into the page

    if hasattr(ipywidgets.DOMWidget, "_ipython_display_"):  # ipywidgets 7, which Colab has, calls only this one

        def _ipython_display_(self, **kwargs: Any) -> None:
            from IPython.display import display

            data, metadata = self._repr_mimebundle_()
            display(data, metadata=metadata, raw=True)
            getattr(self, "_handle_displayed")(**kwargs)  # noqa: B009  only ipywidgets 7 has it


class Step(traitlets.Float):
    """A position in steps, from 0 to the widget's `num_steps`; fractions are within a step."""

    def validate(self, obj: Any, value: Any) -> float:
        last = obj.num_steps
        if not isinstance(value, SupportsFloat) or not 0 <= float(value) <= last:
            raise traitlets.TraitError(f"step is {value!r}, and there are steps 0 to {last}; give one of those")
        return float(value)


class Played(Card):
    """`step` is the position of the playhead. The pictures repeat after `period` steps.

    says    for each step: its name, and what happens
    times   when the steps begin; `lanes` is drawn below the pictures, if there is a run
    """

    _esm = script("tiles")
    kept = ("step",)
    scene = traitlets.Bytes().tag(sync=True)
    score = traitlets.Bytes().tag(sync=True)
    step = Step().tag(sync=True)

    def __init__(
        self, scenes: Sequence[Scene], legend: Sequence[Key], title: str, about: str, says: Sequence[tuple[str, str]],
        period: int, step: float, note: str = "", times: Sequence[float] = (), lanes: bytes = b"",
    ):  # fmt: skip
        header, columns = packed(scenes, legend)
        header |= {"title": title, "about": about, "sentence": self.sentence, "note": note, "says": says}
        super().__init__(scene=pack({**header, "period": period, "times": times}, columns), score=lanes, step=step)
