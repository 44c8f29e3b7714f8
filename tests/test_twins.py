"""tplab.torch and tplab.jax have the same public names and parameters, but for those in docs/twins.md."""

import inspect
import re
from pathlib import Path

import pytest

import tplab.jax  # before JAX is used
import tplab.torch
from tplab import Mesh, P
from tplab.errors import SpecError

LABS = {"torch": tplab.torch, "jax": tplab.jax}
DOCUMENT = Path(__file__).parents[1] / "docs" / "twins.md"


def rows_under(title: str) -> list[list[str]]:
    """The cells of the table under a title, without its head."""
    section = re.split(r"^## ", DOCUMENT.read_text(encoding="utf8"), flags=re.M)
    (text,) = [part for part in section if part.startswith(title)]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


ONLY = {(name, framework) for name, framework, why in rows_under("Names that only") if why}
EXTRA = {(name, parameter, framework) for name, parameter, framework, why in rows_under("Parameters that only") if why}


def public(framework: str) -> set[str]:
    return set(LABS[framework].__all__)


@pytest.mark.parametrize("framework", LABS)
def test_what_is_public_is_there_and_documented(framework):
    for name in public(framework):
        assert inspect.getdoc(getattr(LABS[framework], name)), name


def test_the_same_names():
    for framework, other in (("torch", "jax"), ("jax", "torch")):
        assert public(framework) - public(other) == {name for name, only in ONLY if only == framework}


FUNCTIONS = sorted(name for name in public("torch") & public("jax") if not inspect.isclass(getattr(tplab.jax, name)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_parameters(name):
    """The same names in the same order, passed in the same way, with the same defaults."""
    parameters = {framework: parameters_of(getattr(lab, name)) for framework, lab in LABS.items()}
    extra = {p for n, p, _ in EXTRA if n == name}
    for framework in LABS:
        assert {p for n, p, only in EXTRA if (n, only) == (name, framework)} <= set(dict(parameters[framework]))
    torch, jax = ([about for about in parameters[framework] if about[0] not in extra] for framework in LABS)
    assert torch == jax


def parameters_of(function) -> list[tuple[str, tuple[object, object]]]:
    return [(p.name, (p.kind, p.default)) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("framework", LABS)
def test_handles_and_results_can_do_the_same(framework):
    lab = LABS[framework]
    assert callable(lab.Handle.wait)
    program = lambda: lab.start(lab.all_reduce, _one(framework), "tp").wait()  # noqa: E731
    result = lab.run(program, Mesh(tp=2), out_specs=P())
    assert isinstance(result, lab.Result)
    assert float(result.value) == 2
    assert [float(x) for x in result.per_rank] == [2, 2]
    assert len(result.trace.select(kind="collective")) == 2
    assert repr(result) == "Result of lambda on Mesh(tp=2): value, per_rank, trace"
    with pytest.raises(SpecError, match="no out_specs"):
        _ = lab.run(program, Mesh(tp=2)).value


def _one(framework):
    import jax.numpy as jnp
    import torch

    return torch.ones(()) if framework == "torch" else jnp.ones(())


def test_every_difference_is_one_of_a_public_name():
    words = {word for row in rows_under("The same name") for word in re.findall(r"`(\w+)", "`" + row[0])}
    assert words - {"arguments"} <= public("torch") & public("jax")
