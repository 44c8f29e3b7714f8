"""Lab 25: factors of wrong gradients in its reports, and facts about its seven scripts."""

from functools import cache

import tplab.torch as tt
from labs.source import build
from tests.labs.entries import Claim, Quote


def in_all_reduce(nbytes: int, ranks: int) -> float:
    """The bytes that a rank of a ring sends."""
    return 2 * (ranks - 1) / ranks * nbytes


@cache
def norms() -> list[float]:
    """The norm of the gradients in each of the lab's first ten steps."""
    code = [cell.source for cell in build.read_source("25_same_model").cells if cell.cell_type == "code"]
    lab, found = dict[str, object](), list[float]()
    exec("\n".join(code[1:4]).replace("\nout = ", "\n# "), lab)  # its imports, its script, and `train`

    def noted(net):
        norm = lab["norm"](net)  # type: ignore[operator]
        found.append(float(norm))
        return norm

    tt.run(lambda: lab["train"](10, norm=noted, log=str), lab["MESH"], distributed=True)  # type: ignore
    return found[:: len(found) // 10]


CLAIMS = (
    Quote("Gradients are 3 times as large", ("3 (the number of ranks in a group) times the reference's",)),
    Claim("each of these all-reduces sends 32 MiB per rank", lambda: [in_all_reduce(4096 * 4096 * 2, ranks=2) / 2**20]),
    Quote("All gradients are 2 times as large", ("2 (the number of ranks in a group) times the reference's",)),
    Claim(
        "In the first nine steps the norm is above 0.4, and clipping takes any factor out",
        lambda: min(norms()[:9]) > 0.4 > norms()[9],
    ),
)
