"""Clusters by the columns of a row, or by the flags of a command."""

import pytest

from tplab.cost import NAMED, find
from tplab.errors import ClusterError
from tplab.forecast.clusters import cluster_of


def test_in_a_table_clusters_are_the_measured_ones():
    assert cluster_of({"cluster": "H100"})[1] is find("h100-measured")
    assert cluster_of({"cluster": "b200", "gpus_per_node": "4"})[1].node_size == 4
    assert cluster_of({"cluster": "h200"})[1].chip.memory == 141e9
    assert cluster_of({"cluster": "tpu-v5e"}) == ("", find("tpu_v5e"))


@pytest.mark.parametrize("name", NAMED)
def test_as_a_flag_a_name_is_what_it_is_everywhere(name: str):
    assert cluster_of({"cluster": name}, exactly=True) == ("", find(name))
    assert cluster_of({"cluster": name.upper().replace("-", "_")}, exactly=True) == ("", find(name))


def test_a_cluster_has_the_fabric_the_cards_and_the_nodes_that_are_said():
    cells = {"cluster": "h100", "fabric": "EFA P5", "gpus_per_node": "4", "cards": "2", "oversubscription": "1.5"}
    for exactly in (False, True):
        cluster = cluster_of(cells, exactly)[1]
        expected = find("h100" if exactly else "h100-measured", "efa-p5")
        assert (cluster.fabric, cluster.outer_link) == (expected.fabric, expected.outer_link)
        assert (cluster.node_size, cluster.num_cards, cluster.oversubscription) == (4, 2, 1.5)


def test_a_name_that_is_not_known_is_refused_with_near_ones():
    with pytest.raises(ClusterError, match="no cluster is named 'mars'; there are h100, h200,"):
        cluster_of({"cluster": "mars"}, exactly=True)
    with pytest.raises(ClusterError, match="no cluster is named 'dgx-h100'; did you mean h100"):
        cluster_of({"cluster": "dgx-h100"}, exactly=True)
    with pytest.raises(ClusterError, match=r"mine\.json cannot be read"):
        cluster_of({"cluster": "mine.json"})
