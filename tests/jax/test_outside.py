"""What a program reads from outside itself: whatever of it changes, `run` never gives the old program's result."""

import dataclasses
import enum
import functools
import random
import time
import types
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import tplab.jax as lab  # before JAX is used
from tplab import Mesh, P
from tplab.jax import run
from tplab.jax.ranks.outside import Outside
from tplab.schedules import one_f_one_b

ONE = Mesh(tp=1)
VALUES = (2.0, 5.0, None, 0.0, -0.0)

SCALE: Any = None
CONTAINER: dict[str, Any] = {"list": [None]}
MODULE = types.ModuleType("somebodys_settings")
MODULE.inner = types.ModuleType("somebodys_settings.inner")  # type: ignore[attr-defined]


def scaled(x: Any, by: Any) -> Any:
    return x if by is None else x * by


def by_global(x: Any) -> Any:
    return scaled(x, SCALE)


def by_global_in_a_loop(carry: Any, _: Any) -> Any:
    return by_global(carry), None


@jax.custom_vjp
def by_global_with_a_gradient_of_its_own(x: Any) -> Any:
    return scaled(x, SCALE)


by_global_with_a_gradient_of_its_own.defvjp(lambda x: (x, None), lambda _, g: (g,))
JITTED, CHECKPOINTED, MAPPED = jax.jit(by_global), jax.checkpoint(by_global), jax.vmap(by_global)


@dataclasses.dataclass
class Config:
    scale: Any = None

    @property
    def by(self) -> Any:
        return self.scale

    def apply(self, x: Any) -> Any:
        return scaled(x, self.scale)


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Config


class Slots:
    __slots__ = ("__scale",)

    def __init__(self) -> None:
        self.set(None)

    def set(self, value: Any) -> None:
        self.__scale = value

    def __call__(self, x: Any) -> Any:
        return scaled(x, self.__scale)


class Settings:
    scale: Any = None


class Inherits(Settings):
    pass


class Pair(NamedTuple):
    first: Any
    second: Any


class Colour(enum.Enum):
    RED = 1


class Own(dict):
    pass


class Shy:
    @property
    def __dict__(self) -> Any:
        raise RuntimeError("not now")


@jax.tree_util.register_pytree_node_class
class Node:
    """A structure of arrays whose method reads a global."""

    def __init__(self, x: Any):
        self.x = x

    def tree_flatten(self) -> Any:
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> "Node":
        return cls(*children)

    def apply(self) -> Any:
        return scaled(self.x, SCALE)


class Way(NamedTuple):
    """How a program comes by a value: run(program, *args()) is x times what `set` was given last."""

    program: Callable[..., Any]
    set: Callable[[Any], None]
    args: Callable[[], Iterable[Any]] = lambda: (np.float32(3),)


def set_global(value: Any) -> None:
    globals()["SCALE"] = value


def closure() -> Way:
    scale: Any = None

    def put(value: Any) -> None:
        nonlocal scale
        scale = value

    return Way(lambda x: scaled(x, scale), put)


def deep_closure() -> Way:
    inner = closure()
    return Way(functools.partial(lambda f, x: next(g(x) for g in [lambda y: f(y)]), inner.program), inner.set)


def function_that_is_none() -> Way:
    hook: Any = None

    def put(value: Any) -> None:
        nonlocal hook
        hook = None if value is None else lambda x: x * value

    return Way(lambda x: x if hook is None else hook(x), put)


def numpy_array(size: int) -> Way:
    array = np.zeros((size, 2), np.float32)

    def put(value: Any) -> None:
        array[-1, -1] = 1 if value is None else value

    return Way(lambda x: x * array[-1, -1], put)


def shape_of_an_array() -> Way:
    array: Any = None

    def put(value: Any) -> None:
        nonlocal array
        array = None
        array = jnp.zeros(1 if value is None else int(value))

    return Way(lambda x: x * array.shape[0], put)


def default() -> Way:
    def program(x: Any, by: Any = None) -> Any:
        return scaled(x, by)

    return Way(program, lambda value: setattr(program, "__defaults__", (value,)))


def attribute(of: Any, program: Callable[[Any], Any], name: str = "scale") -> Way:
    return Way(program, lambda value: setattr(of, name, value))


def argument(of: Any, program: Callable[..., Any], name: str = "scale") -> Way:
    return Way(program, lambda value: setattr(of, name, value), lambda: (np.float32(3), of))


def item(of: Any, key: Any, program: Callable[[Any], Any]) -> Way:
    return Way(program, lambda value: of.__setitem__(key, value))


def ways() -> dict[str, Way]:
    config, frozen, slots, space = Config(), Frozen(Config()), Slots(), types.SimpleNamespace()
    pair = Pair(1, config)
    row, own, nested = [None], Own(scale=None), {"a": (Config(), [0])}
    reader, cell = Config(), {"by": None}
    other = types.ModuleType("somebodys_other_module")
    exec("scale = None\ndef f(x): return x if scale is None else x * scale", vars(other))
    return {
        "a global": Way(by_global, set_global),
        "a global of a function that is called": Way(lambda x: by_global(x), set_global),
        "a global of a function that is passed": Way(lambda x, f: f(x), set_global, lambda: (np.float32(3), by_global)),
        "a global in a lambda that is passed": Way(
            lambda x, f: f(x), set_global, lambda: (np.float32(3), lambda x: scaled(x, SCALE))
        ),
        "a global in a loop's body": Way(lambda x: lax.scan(by_global_in_a_loop, x, None, 1)[0], set_global),
        "a global in a branch": Way(lambda x: lax.cond(x > 0, by_global, jnp.negative, x), set_global),
        "a global under jit": Way(lambda x: JITTED(x), set_global),
        "a global under checkpoint": Way(lambda x: CHECKPOINTED(x), set_global),
        "a global under vmap": Way(lambda x: MAPPED(x[None])[0], set_global),
        "a global under custom_vjp": Way(lambda x: by_global_with_a_gradient_of_its_own(x), set_global),
        "a global of a method of an argument's class": Way(
            lambda node: node.apply(), set_global, lambda: (Node(np.float32(3)),)
        ),
        "a global of another module": Way(other.f, lambda value: setattr(other, "scale", value)),
        "a module": attribute(MODULE, lambda x: scaled(x, MODULE.scale)),
        "a module's module": attribute(MODULE.inner, lambda x: scaled(x, MODULE.inner.scale)),
        "a module that is handed on": attribute(MODULE, lambda x: scaled(x, vars(MODULE)["scale"])),
        "a module in a list": attribute(MODULE, lambda x, m=[MODULE]: scaled(x, m[0].scale)),
        "a closure": closure(),
        "a closure of a function within": deep_closure(),
        "a function that becomes None": function_that_is_none(),
        "a default": default(),
        "an item": item(CONTAINER["list"], 0, lambda x: scaled(x, CONTAINER["list"][0])),
        "an item of a closure": item(row, -1, lambda x: scaled(x, row[-1])),
        "an item of a dict of one's own": item(own, "scale", lambda x: scaled(x, own["scale"])),
        "a set": Way(lambda x: scaled(x, next(iter(cell.values()))), lambda value: cell.update(by=value)),
        "a NumPy array": numpy_array(1),
        "a large NumPy array": numpy_array(1000),
        "a shape": shape_of_an_array(),
        "a dataclass": attribute(config, lambda x: scaled(x, config.scale)),
        "a property": attribute(reader, lambda x: scaled(x, reader.by)),
        "a method": attribute(config, config.apply),
        "a dataclass in a frozen one": attribute(frozen.inner, lambda x: frozen.inner.apply(x)),
        "a dataclass in containers": attribute(nested["a"][0], lambda x: scaled(x, nested["a"][0].scale)),
        "slots": Way(slots, slots.set),
        "a class": attribute(Settings, lambda x: scaled(x, Settings.scale)),
        "a base class": attribute(Settings, lambda x: scaled(x, Inherits().scale)),
        "a member of an enum": attribute(Colour.RED, lambda x: scaled(x, Colour.RED.scale)),  # type: ignore
        "a function's attribute": attribute(scaled, lambda x: scaled(x, scaled.scale)),  # type: ignore
        "a dataclass as argument": argument(config, lambda x, c: scaled(x, c.scale)),
        "a namespace as argument": argument(space, lambda x, c: scaled(x, c.scale)),
        "a module as argument": argument(MODULE, lambda x, c: scaled(x, c.scale)),
        "a class as argument": argument(Settings, lambda x, c: scaled(x, c.scale)),
        "a named tuple's item": attribute(pair.second, lambda x: scaled(x, pair.second.scale)),
        "getattr": attribute(config, lambda x: scaled(x, getattr(config, "sca" + "le"))),
        "globals()": Way(lambda x: scaled(x, globals()["SCA" + "LE"]), set_global),
        "eval": Way(lambda x: scaled(x, eval("SCALE")), set_global),
        "another function's globals": Way(lambda x: scaled(x, by_global.__globals__["SCALE"]), set_global),
        "an import": attribute(MODULE, lambda x: scaled(x, __import__("sys").modules["somebodys_settings"].scale)),
    }


WAYS = ways()


def check(way: Way, value: Any) -> None:
    way.set(value)
    got = float(run(way.program, ONE, *way.args()).per_rank[0])
    want = float(np.float32(3) if value is None else np.float32(3) * np.float32(value))
    assert (got, np.signbit(got)) == (want, np.signbit(want))


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, MODULE.__name__, MODULE)


@pytest.mark.parametrize("name", [name for name in WAYS if name != "a shape"])
def test_what_changes_is_noticed(name):
    for value in (2.0, 5.0, None, 2.0, 0.0, -0.0):
        check(WAYS[name], value)


def test_a_shape_that_changes_is_noticed():
    for value in (2.0, 5.0, 2.0):
        check(WAYS["a shape"], value)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from([n for n in WAYS if n != "a shape"]), st.sampled_from(VALUES)), max_size=6))
def test_changes_in_any_order_are_noticed(changes):
    for name, value in changes:
        check(WAYS[name], value)


def test_what_became_none_is_noticed():
    """What was compiled does not keep the old function alive."""
    hook: Any = None

    def program(x: Any) -> Any:
        return x if hook is None else hook(x)

    hook = jnp.negative
    assert float(run(program, ONE, 1.0).per_rank[0]) == -1
    hook = lambda x: x * 2  # noqa: E731
    assert float(run(program, ONE, 1.0).per_rank[0]) == 2
    hook = None
    assert float(run(program, ONE, 1.0).per_rank[0]) == 1


@pytest.mark.parametrize(
    "value",
    [
        jnp.tanh,
        jax.nn.relu,
        jax.nn.gelu,
        jnp.add,
        np.tanh,
        np.dot,
        jax.vmap(scaled),
        jax.grad(by_global),
        JITTED,
        Config(),
        Frozen(Config()),
        Slots(),
        Settings,
        Colour.RED,
        Own(a=1),
        Pair(1, [2]),
        P("tp"),
        ONE,
        np.ones(3),
        jnp.ones(3),
        jnp.float32,
        np.float32,
        jax.random.key(0),
        types.SimpleNamespace(a={1: [2]}),
        range(3),
        slice(2),
        {1, 2},
        functools.partial(scaled, by=2),
        one_f_one_b(2, 4),
        lab.GPTConfig(8, 4, 1, 1, 4),
        lab.ParallelMLP(4, 8, "tp"),
    ],
)
def test_what_programs_read_every_day_can_be_compared(value):
    """Only what cannot be is traced at every call."""
    program = lambda: value  # noqa: E731
    assert Outside([program]).is_known
    assert Outside([program]).same_as(Outside([program]))


@pytest.mark.parametrize(
    "value",
    [
        iter([1]),
        np.random.default_rng(0),
        np.random.rand,
        random.random,
        time.time,
        datetime,
        open,
        np,
        Shy(),
    ],
)
def test_what_cannot_be_compared(value):
    assert not Outside([lambda: value]).is_known


# ------------------------------------------------------------------------------------------ arrays written to in place


class Holder:
    def __init__(self, array: Any):
        self.array, self.nested = array, {"list": [(array,)]}

    def times(self, x: Any) -> Any:
        return x * self.array

    __call__ = times


def readers(array: Any) -> dict[str, Callable[[Any], Any]]:
    """Programs that read a whole array in one way each; x times the array is what all of them return."""
    holder, objects = Holder(array), np.empty(1, object)
    objects[0] = array
    backwards = array[::-1]

    def default(x: Any, array: Any = array) -> Any:
        return x * array

    def gradient(x: Any) -> Any:
        return jax.grad(lambda x: jax.checkpoint(lambda x: (x * x * array).sum())(x))(x) / 2

    return {
        "closure": lambda x: x * array,
        "default": default,
        "partial": functools.partial(lambda array, x: x * array, array),
        "method": holder.times,
        "callable object": holder,
        "attribute": lambda x: x * holder.array,
        "containers": lambda x: x * holder.nested["list"][0][0],
        "array of objects": lambda x: x * objects[0],
        "view": lambda x: x * backwards[::-1],
        "jnp.asarray": lambda x: x * jnp.asarray(array),
        "jit": lambda x: jax.jit(lambda x: x * array)(x),
        "scan": lambda x: lax.scan(lambda x, _: (x * array, None), x, None, 1)[0],
        "cond": lambda x: lax.cond(x[0] > 0, lambda x: x * array, lambda x: x, x),
        "gradient": gradient,
    }


def check_written(program: Callable[[Any], Any], array: Any) -> None:
    """Values and traces are those of the moment of the call, whatever is written to the array afterwards."""
    x, mesh = np.array([1, 2], np.float32), Mesh(tp=2)
    sent = lambda x: lab.ring_shift(program(x), "tp").astype(jnp.float32)  # noqa: E731
    outs, wanted = [], []
    for numbers in ([2, 3], [9, 4], [2, 3]):
        array[...] = numbers
        outs.append(run(sent, mesh, x))
        wanted.append(x * numbers)
        np.testing.assert_array_equal(outs[-1].per_rank[0], wanted[-1])
    assert outs[0]._compiled is outs[2]._compiled
    array[...] = 0
    for out, want in zip(outs, wanted, strict=True):
        np.testing.assert_array_equal(out.trace.select(kind="send").events[0].values, want)


@pytest.mark.parametrize("name", readers(np.zeros(2)))
def test_an_array_that_is_written_to_is_read_as_it_is_at_the_call(name):
    array = np.zeros(2, np.float32)
    check_written(readers(array)[name], array)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int8, np.float16, jnp.bfloat16])
def test_an_array_of_any_type_that_is_written_to(dtype):
    array = np.zeros(2, dtype)
    check_written(lambda x: x * array, array)


def test_a_number_and_a_tensor_that_are_written_to():
    number = np.zeros((), np.float32)
    outs = []
    for value in (2, 9, 2):
        number[...] = value
        outs.append(run(lambda x: lab.ring_shift(x * number, "tp"), Mesh(tp=2), np.ones(2, np.float32)))
        assert outs[-1].per_rank[0].tolist() == [value] * 2
    assert [out.trace.select(kind="send").events[0].values[0] for out in outs] == [2, 9, 2]
    tensor = pytest.importorskip("torch").zeros(2)
    check_written(lambda x: x * tensor.numpy(), tensor.numpy())
