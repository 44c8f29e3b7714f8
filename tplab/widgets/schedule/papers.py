"""Schedules under the names that their papers give them."""

from __future__ import annotations

PAPERS = {
    "naive": "naive", "gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved_1f1b": "interleaved 1F1B",
    "looped_bfs": "looped BFS", "zb_h1": "ZB-H1", "zb_h2": "ZB-H2", "interleaved_zb": "interleaved zero bubble",
    "zb_v": "ZB-V", "v_half": "V-Half", "v_min": "V-Min", "dualpipe": "DualPipe", "dualpipe_v": "DualPipeV",
    "auto": "automatic", "edited": "edited",
}  # fmt: skip


def paper_name(name: str, otherwise: str = "schedule") -> str:
    """ "1F1B" for one_f_one_b; a name of one's own as it is; `otherwise` where there is none."""
    return PAPERS.get(name, name) or otherwise
