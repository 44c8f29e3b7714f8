"""docs/choosing.md: its table is what the search finds, on each network, with the class of each interval."""

from tplab.cost.measured import fabrics
from tplab.forecast import Plan, forecast
from tplab.forecast.classes import known
from tplab.forecast.step import OUTSIDE
from website import choosing


def test_the_page_is_what_the_code_writes():
    assert choosing.PAGE.read_text(encoding="utf8") == choosing.page(), "run python -m website.choosing"


def test_every_row_names_its_network_and_the_class_of_its_interval():
    lines = [line for line in choosing.PAGE.read_text(encoding="utf8").splitlines() if line.startswith("| llama")]
    names = {fabrics()[network].name for network in choosing.NETWORKS}
    assert {line.split(" | ")[1] for line in lines} == names | {"one node"}
    classes = [line.split(" | ")[5].partition(": ")[0] for line in lines]
    assert len(lines) == 9 and set(classes) <= {of.name for of in known().values()}


def test_a_plan_without_a_class_says_so():
    plan = Plan(dp=2, tp=16, pp=2, sequence_parallel=True)  # nobody has measured Megatron's tp over nodes
    found = forecast("megatron-175b", plan, choosing.NODES, batch=64, sequence=2048)
    assert choosing._class(found) == found.between == OUTSIDE
