"""Lab 25: factors of wrong gradients, as its reports print them."""

from tests.labs.entries import Claim, Quote


def in_all_reduce(nbytes: int, ranks: int) -> float:
    """What a rank of a ring sends."""
    return 2 * (ranks - 1) / ranks * nbytes


CLAIMS = (
    Quote("Gradients are 3 times as large", ("3 (the number of ranks in a group) times the reference's",)),
    Claim("each of these all-reduces sends 32 MiB per rank", lambda: [in_all_reduce(4096 * 4096 * 2, ranks=2) / 2**20]),
    Quote("All gradients are 2 times as large", ("2 (the number of ranks in a group) times the reference's",)),
)
