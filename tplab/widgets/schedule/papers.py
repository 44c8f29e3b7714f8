"""The names that papers give to the schedules."""

from __future__ import annotations

PAPERS = {
    "naive": "naive", "gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved_1f1b": "interleaved 1F1B",
    "looped_bfs": "looped BFS", "zb_h1": "ZB-H1", "zb_h2": "ZB-H2", "interleaved_zb": "interleaved zero bubble",
    "zb_v": "ZB-V", "v_half": "V-Half", "v_min": "V-Min", "dualpipe": "DualPipe", "dualpipe_v": "DualPipeV",
    "auto": "automatic", "edited": "edited",
}  # fmt: skip


def paper_name(name: str, otherwise: str = "schedule") -> str:
    """ "1F1B" for one_f_one_b; a name of your own is unchanged; `otherwise` if there is no name."""
    return PAPERS.get(name, name) or otherwise
