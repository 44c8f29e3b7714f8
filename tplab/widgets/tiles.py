"""`tiles(layouts)`: shows which rank computes which scores of attention at which step of a ring, and what it skips."""

from __future__ import annotations

from collections.abc import Sequence

from tplab.mesh import Axis
from tplab.sequence import AttentionMask, TokenLayout
from tplab.trace.trace import Trace
from tplab.widgets.attention import drawing
from tplab.widgets.attention.panels import Panels, mask_text, shown
from tplab.widgets.paper.played import Played
from tplab.widgets.paper.still import still
from tplab.widgets.score import payload
from tplab.widgets.score.score import score

TITLE = "Attention over a ring of ranks"


class Tiles(Played):
    """The card of `tiles`. `step` is the position of the playhead, in steps of the ring: 1.5 is half-way through the
    second. With a trace that has a backward pass, its steps follow those of the forward pass. `scenes` are panels."""

    def __init__(self, of: Panels, step: float = 0):
        self.of, self.sentence = of, of.sentence
        self.scenes = [drawing.draw(panel, of.geometry) for panel in of.panels]
        lanes = b"" if of.trace is None else payload.lanes(score(of.trace))
        says, about = [of.says(step) for step in range(of.num_steps + 1)], mask_text(of.panels[0].mask).rstrip(",")
        fixed = self.scenes, drawing.LEGEND, TITLE, about, says, of.num_ranks
        super().__init__(*fixed, step, drawing.AXES, of.times, lanes)

    @property
    def num_steps(self) -> int:
        return self.of.num_steps

    def picture(self) -> bytes:
        """The picture at `step`. Before the first step, which would be empty, it is that of the last step."""
        _, within = self.of.place(self.step or self.of.num_steps)
        return still(TITLE, self.sentence, self.scenes, within, legend=drawing.LEGEND, note=drawing.AXES)


def tiles(
    layouts: TokenLayout | Sequence[TokenLayout],
    mask: AttentionMask | None = None,
    *,
    trace: Trace | None = None,
    axis: Axis = "cp",
    step: float = 0,
) -> Tiles:
    """Show the S x S scores of attention over a ring: at each step, which rank computes which scores, with which rank's
    keys and values, and what it skips; below, how long each rank computes and idles, if each step lasts as long as its
    slowest rank.

        tiles([TokenLayout(name, 16, 4) for name in ("contiguous", "zigzag", "striped")])

    layouts   one layout, or up to three side by side, of the same tokens and ranks: at most 64 tokens
    mask      which keys a query sees; None: causal
    trace     of a run of `ring_attention` with this one layout and mask, on ranks of `axis`: its timeline is shown
              below, under the same playhead. It may have more tokens than the picture
    step      where the playhead starts: 0 is before the first step, 1 after it
    Raises ShapeError and ValueError if layouts, or the trace, do not fit together.
    """
    return Tiles(shown(layouts, AttentionMask() if mask is None else mask, trace, axis), step)
