"""Fits the network between nodes to the table in tplab/cost/measured, and prints its errors.

    python -m benchmarks.fit.fabrics            fit, and print constants and errors
    python -m benchmarks.fit.fabrics --write    and write them to tplab/cost/measured/constants.json

The errors are those on rows that a fit has not seen: all rows of one number of nodes at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.fit.least import print_errors, summary, write
from tplab.cost import H100_MEASURED, Cluster
from tplab.cost.forecast import Error, Fabric
from tplab.cost.measured import CONSTANTS, NETWORK_BYTES, Network, network


def fit_network(rows: Sequence[Network], node: Cluster) -> Fabric:
    """The fabric with the least sum of errors, of all on a grid."""
    grid = [
        Fabric(round(float(reached), 3), round(float(congestion), 2))
        for reached in np.arange(0.5, 1.001, 0.025)
        for congestion in np.arange(0.0, 1.201, 0.02)
    ]
    return min(grid, key=lambda fabric: sum(abs(np.log(1 + off)) for off in network_errors(rows, fabric, node)))


def network_errors(rows: Sequence[Network], fabric: Fabric | None, node: Cluster) -> list[float]:
    assert node.forecast is not None
    on = replace(node, forecast=replace(node.forecast, fabric=fabric))
    return [on.collective_seconds(row.op, NETWORK_BYTES, 8 * row.nodes) / row.seconds - 1 for row in rows]


def hold_out() -> Error:
    """The errors on rows that were left out: those of each number of nodes in turn."""
    off: list[float] = []
    for nodes in sorted({row.nodes for row in network()}):
        fabric = fit_network([row for row in network() if row.nodes != nodes], H100_MEASURED)
        off += network_errors([row for row in network() if row.nodes == nodes], fabric, H100_MEASURED)
    return summary(off)


def main(arguments: Sequence[str]) -> None:
    fabric, error = fit_network(network(), H100_MEASURED), hold_out()
    print(fabric)
    print_errors("network, fitted", {"h100": summary(network_errors(network(), fabric, H100_MEASURED))})
    print_errors("network, numbers of nodes left out", {"h100": error})
    if "--write" in arguments:
        found = {"reached": fabric.reached, "congestion": fabric.congestion}
        write(CONSTANTS, {"fabric": found, "errors": {"network": {"h100": error}}})


if __name__ == "__main__":
    main(sys.argv[1:])
