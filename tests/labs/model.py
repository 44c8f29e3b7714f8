"""The H100s of the labs: by the data sheet, and as a forecast with each of two networks."""

from tplab.cost import Cluster, find
from tplab.data.hiding import H100S, Scheme, tokens_to_hide

SHEET, NDR, PLAYBOOK = (find(*on) for on in H100S)


def tokens(scheme: Scheme, ranks: int, *clusters: Cluster) -> list[int]:
    """The tokens per rank that hide the messages on each cluster."""
    return [tokens_to_hide(scheme, cluster, ranks) for cluster in clusters]
