"""Attention over a sequence that ranks share, against one device: o, lse, dq, dk, dv in float64, in both frameworks."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.frameworks import FRAMEWORKS, Framework, in_both
from tests.pairwise import pairs
from tests.sharded import close, double, numbers
from tplab import Mesh, P
from tplab.errors import MeshError, RankError, ShapeError
from tplab.sequence import LAYOUTS, SCHEMES, AttentionMask, LayoutName, Scheme, TokenLayout, attention_bytes

BATCH, SEQUENCE, WIDTH = 2, 48, 4

MASKS = [
    AttentionMask(),
    AttentionMask(causal=False),
    AttentionMask(window=7),
    AttentionMask(documents=(10, 1, 25, 12)),
    AttentionMask(causal=False, window=5, documents=(20, 28)),
    AttentionMask(causal=False, documents=(3, 45)),
    AttentionMask(window=20, documents=(40, 8)),
]
HEADS = {"multi-head": (2, 2), "grouped": (4, 2), "multi-query": (3, 1)}
"""Query heads, and key and value heads, for each rank that exchanges heads."""
MESHES: dict[Scheme, list[dict[str, int]]] = {
    "ring": [{"cp": p} for p in (1, 2, 3, 4, 8)],
    "gather": [{"cp": p} for p in (1, 2, 3, 4, 8)],
    "head": [{"cp": p} for p in (1, 2, 3, 4, 8)],
    "head_ring": [{"ring": r, "heads": u} for r, u in ((1, 1), (2, 1), (1, 3), (2, 2), (4, 2), (2, 4))],
}
"""scheme -> meshes of 1, 2, 3, 4 and 8 ranks."""


class Case(NamedTuple):
    scheme: Scheme
    mesh: tuple[tuple[str, int], ...]
    layout: LayoutName
    heads: str
    mask: AttentionMask

    @property
    def head_ranks(self) -> int:
        sizes = dict(self.mesh)
        return {"head": sizes.get("cp", 1), "head_ring": sizes.get("heads", 1)}.get(self.scheme, 1)

    @property
    def num_heads(self) -> tuple[int, int]:
        heads, kv_heads = HEADS[self.heads]
        return heads * self.head_ranks, kv_heads * self.head_ranks

    @property
    def num_ranks(self) -> int:
        return Mesh(**dict(self.mesh)).size

    @property
    def spec(self) -> P:
        return P(None, None, tuple(dict(self.mesh)))

    @property
    def tokens(self) -> TokenLayout:
        return TokenLayout(self.layout, SEQUENCE, self.num_ranks)

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh)
        return f"{self.scheme}, {mesh}, {self.layout}, {self.heads}, {self.mask}"


def cases(masks: Sequence[AttentionMask]) -> list[Case]:
    """Every two of a scheme on a mesh, a layout, kinds of heads and a mask meet in one of them."""
    whose = [(scheme, tuple(mesh.items())) for scheme, meshes in MESHES.items() for mesh in meshes]
    return [Case(scheme, mesh, *rest) for (scheme, mesh), *rest in pairs(whose, LAYOUTS, HEADS, masks)]


CASES = cases(MASKS)
IN_JAX = CASES[::8]


# -------------------------------------------------------------------------------------------------------- the oracle


def allowed(mask: AttentionMask, size: int) -> np.ndarray:
    """[S, S]: which key each query sees."""
    place = np.arange(size)
    distance, document = place[:, None] - place, np.repeat(range(len(mask.documents or [size])), mask.documents or size)
    seen = document[:, None] == document
    if mask.causal:
        seen &= distance >= 0
    return seen if mask.window is None else seen & (np.abs(distance) < mask.window)


@cache
def tensors(heads: int, kv_heads: int, size: int = SEQUENCE, factor: float = 1) -> tuple[np.ndarray, ...]:
    """q, k, v, and what the output is multiplied with for the loss. `factor` times the queries: from scores that are
    all alike, 0, to a softmax of one key."""
    shapes = [(BATCH, h, size, WIDTH) for h in (heads, kv_heads, kv_heads, heads)]
    q, *others = (numbers(*shape, seed=seed) for seed, shape in enumerate(shapes))
    return q * factor, *others


@cache
def on_one_device(
    heads: int, kv_heads: int, mask: AttentionMask, size: int = SEQUENCE, factor: float = 1
) -> tuple[np.ndarray, ...]:
    """o, lse, dq, dk, dv, with all scores written out."""
    q, k, v = (torch.tensor(x, requires_grad=True) for x in tensors(heads, kv_heads, size, factor)[:3])
    every_k, every_v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = (q @ every_k.mT / WIDTH**0.5).masked_fill(~torch.tensor(allowed(mask, size)), -torch.inf)
    o = scores.softmax(-1) @ every_v
    grads = torch.autograd.grad((o * torch.tensor(tensors(heads, kv_heads, size)[3])).sum(), (q, k, v))
    return tuple(x.detach().numpy() for x in (o, scores.logsumexp(-1), *grads))


# ---------------------------------------------------------------------------------------------------------- the ranks


def attention_of(lab: Any, case: Case, **more: Any) -> Any:
    """(q, k, v) -> (o, lse), as a rank's program calls it."""
    function = getattr(lab, f"{case.scheme}_attention")
    axes = ("heads", "ring") if case.scheme == "head_ring" else ("cp",)
    about: dict[str, Any] = {"layout": case.layout, **vars(case.mask), "return_lse": True, **more}
    return lambda q, k, v: function(q, k, v, *axes, **about)


def program_of(fw: Framework, attention: Any, return_lse: bool) -> Any:
    """(q, k, v, c) -> o, lse, dq, dk, dv of the loss sum(o c); without lse where it is not returned."""

    def in_torch(q: Any, k: Any, v: Any, c: Any) -> Any:
        for x in (q, k, v):
            x.requires_grad_()
        found = attention(q, k, v)
        o, *lse = found if return_lse else (found,)
        return (o.detach(), *lse, *torch.autograd.grad((o * c).sum(), (q, k, v)))

    def in_jax(q: Any, k: Any, v: Any, c: Any) -> Any:
        import jax

        o, gradients, *lse = jax.vjp(attention, q, k, v, has_aux=return_lse)
        return (o, *lse, *gradients(c))

    return in_torch if fw.name == "torch" else in_jax


def run_case(fw: Framework, case: Case, *, return_lse: bool = True, **about: Any) -> Any:
    """The `Result` of o, lse, dq, dk and dv, on the tokens as the layout arranges them."""
    args = [fw.array(case.tokens.arrange(x, 2)) for x in tensors(*case.num_heads)]
    program = program_of(fw, attention_of(fw.lab, case, return_lse=return_lse), return_lse)
    return fw.lab.run(
        program,
        Mesh(**dict(case.mesh)),
        *args,
        in_specs=(case.spec,) * 4,
        out_specs=(case.spec,) * (4 + return_lse),
        **about,
    )


@pytest.fixture(params=FRAMEWORKS)
def fw(request: pytest.FixtureRequest) -> Framework:
    return FRAMEWORKS[request.param]()


@pytest.mark.parametrize("fw, case", in_both([(c,) for c in CASES], [(c,) for c in IN_JAX]), indirect=["fw"], ids=str)
def test_it_is_attention_on_one_device(fw: Framework, case: Case):
    with double(fw):
        got = [case.tokens.restore(fw.numpy(x), 2) for x in run_case(fw, case).value]
    for name, x, want in zip(
        ("o", "lse", "dq", "dk", "dv"), got, on_one_device(*case.num_heads, case.mask), strict=True
    ):
        close(x, want, name)


def test_there_are_enough_cases():
    for place, kinds in ((0, set(MESHES)), (2, set(LAYOUTS)), (3, set(HEADS)), (4, set(MASKS))):
        assert {case[place] for case in CASES} == {case[place] for case in IN_JAX} == kinds
    assert {(case.scheme, case.num_ranks) for case in CASES} == set(product(MESHES, (1, 2, 3, 4, 8)))


# ------------------------------------------------------------------------------------------------------- what is sent

SENT = cases([AttentionMask()])
SENT_IN_JAX = {case.scheme: case for case in SENT if case.num_ranks == 4}.values()


@pytest.mark.parametrize(
    "fw, case", in_both([(c,) for c in SENT], [(c,) for c in SENT_IN_JAX]), indirect=["fw"], ids=str
)
def test_bytes_sent_are_those_of_the_formula(fw: Framework, case: Case):
    with double(fw):
        trace = run_case(fw, case, return_lse=False, keep_values=0).trace
    sizes = SEQUENCE, case.num_ranks, *case.num_heads, WIDTH
    want = attention_bytes(case.scheme, *sizes, head_ranks=case.head_ranks, itemsize=8, batch=BATCH)
    for rank in range(case.num_ranks):
        events = [event for event in trace.select(rank=rank).events if event.kind in ("send", "collective")]
        passes = [sum(event.bytes for event in events if event.phase == phase) for phase in ("forward", "backward")]
        assert passes == list(want)


# -------------------------------------------------------------------------------------- positions, dtypes, refusals


def test_rope_turns_each_token_by_its_own_position(fw: Framework):
    """A score depends on how far apart two tokens are, so positions must follow the layout; in packed documents each
    begins again."""
    q, k = tensors(2, 2)[:2]
    for layout, documents in product(LAYOUTS, [(), (20, 28)]):
        place = AttentionMask(documents=documents).in_document(np.arange(SEQUENCE), SEQUENCE)
        angles = place[:, None] * 10000.0 ** -(np.arange(WIDTH // 2) / (WIDTH // 2))
        turns = np.exp(1j * angles)
        tokens = TokenLayout(layout, SEQUENCE, 4)

        def program(x: Any, layout: Any = layout, documents: Any = documents) -> Any:
            positions = fw.lab.token_positions(SEQUENCE, "cp", layout=layout, documents=documents)
            return fw.lab.rope(x, positions)

        for x in (q, k):
            want = (x[..., : WIDTH // 2] + 1j * x[..., WIDTH // 2 :]) * turns
            with double(fw):
                spec, given = P(None, None, "cp"), fw.array(tokens.arrange(x, 2))
                got = fw.numpy(fw.lab.run(program, Mesh(cp=4), given, in_specs=(spec,), out_specs=spec).value)
            close(tokens.restore(got, 2), np.concatenate([want.real, want.imag], -1))


def failing(fw: Framework, mesh: Mesh, scheme: str, shapes: Any, **about: Any) -> None:
    axes = ("heads", "ring") if scheme == "head_ring" else ("cp",)
    xs = [fw.array(np.zeros(shape, np.float32)) for shape in shapes]
    fw.lab.run(lambda *xs: getattr(fw.lab, f"{scheme}_attention")(*xs, *axes, **about), mesh, *xs)


@pytest.mark.parametrize(
    ("scheme", "heads", "about", "message"),
    [
        ("ring", (4, 3), {}, "ring_attention: q has 4 heads, and k 3, which does not divide them"),
        ("head", (6, 2), {}, r"head_attention: the number of heads is 6, which the 4 ranks of axis 'cp' cannot share"),
        ("head", (8, 2), {}, r"of key and value heads is 2, which the 4 ranks.*\nrepeat each 2 times"),
        ("ring", (4, 2), {"layout": "zigzag"}, "the number of tokens is 20, which 8 pieces"),
        ("gather", (4, 2), {"documents": (3, 16)}, "have 19 tokens, and the sequence has 20"),
        ("gather", (4, 2), {"layout": TokenLayout("striped", 24, 4)}, "24 tokens over 4 ranks, but 4 ranks have 5"),
    ],
)
def test_what_does_not_fit_is_refused(fw: Framework, scheme: str, heads: Any, about: Any, message: str):
    shapes = [(1, h, 5, 2) for h in (heads[0], heads[1], heads[1])]
    with pytest.raises(ShapeError, match=f"(?s){message}"):
        failing(fw, Mesh(cp=4), scheme, shapes, **about)


@pytest.mark.parametrize("axes", [("cp", "cp"), (("dp", "cp"), "cp")])
def test_heads_and_ring_on_one_axis_are_refused(fw: Framework, axes: tuple[Any, Any]):
    mesh = Mesh(dp=2, cp=2)
    xs = [fw.array(np.ones((1, 4, 4, 2), "float32"))] * 3
    with pytest.raises(MeshError, match="each once"):
        fw.lab.run(lambda *xs: fw.lab.head_ring_attention(*xs, *axes), mesh, *xs)


def test_dropout_is_refused(fw: Framework):
    with pytest.raises(
        (NotImplementedError, RankError), match=r"head_ring_attention: dropout is 0.1; dropout of attention weights"
    ):
        failing(fw, Mesh(ring=1, heads=2), "head_ring", [(1, 2, 4, 2)] * 3, dropout=0.1)


@pytest.mark.parametrize("scheme", ["ring", "gather", "head", "head_ring"])
@pytest.mark.parametrize("scale", [0, -0.5, float("nan"), float("inf")])
def test_a_scale_that_is_not_above_0_is_refused(fw: Framework, scheme: str, scale: float):
    """torch's kernel for the CPU gives NaN, or finite numbers that are wrong."""
    mesh = Mesh(ring=1, heads=1) if scheme == "head_ring" else Mesh(cp=1)
    with pytest.raises((ValueError, RankError), match=rf"{scheme}_attention: scale is {scale}, and must be .* above 0"):
        failing(fw, mesh, scheme, [(1, 2, 4, 2)] * 3, scale=scale)


def test_shapes_that_are_no_attention(fw: Framework):
    with pytest.raises(ShapeError, match=r"takes q \[batch, heads, tokens, width\].*\[4, 2\]"):
        failing(fw, Mesh(cp=1), "ring", [(4, 2)] * 3)
    with pytest.raises(ShapeError, match=r"q \[1, 2, 4, 2\] and k \[1, 2, 3, 2\] may differ in the number of heads"):
        failing(fw, Mesh(cp=1), "ring", [(1, 2, 4, 2), (1, 2, 3, 2), (1, 2, 3, 2)])


def test_dtypes_that_differ_and_sizes_that_are_empty(fw: Framework):
    def program(*shapes: tuple[int, ...], dtypes: tuple[str, ...] = ("float32",) * 3) -> None:
        xs = [fw.array(np.ones(shape, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
        fw.lab.run(lambda *xs: fw.lab.ring_attention(*xs, "cp"), Mesh(cp=2), *xs)

    shape = (1, 2, 4, 8)
    with pytest.raises(
        (ValueError, RankError), match="q is float32, k float16 and v float32; give all three one dtype"
    ):
        program(shape, shape, shape, dtypes=("float32", "float16", "float32"))
    with pytest.raises((ValueError, RankError), match="q is int32, k int32 and v int32; give all three one dtype"):
        program(shape, shape, shape, dtypes=("int32",) * 3)
    for empty in ((0, 2, 4, 8), (1, 2, 0, 8), (1, 0, 4, 8), (1, 2, 4, 0)):
        with pytest.raises(ShapeError, match="are empty; each size must be 1 or more"):
            program(empty, empty, empty)


# ------------------------------------------------------------------------------------------------- whatever is drawn


class Drawn(NamedTuple):
    """An attention of any size over any ranks."""

    scheme: Scheme
    mesh: Mesh
    tokens: TokenLayout
    heads: tuple[int, int]
    mask: AttentionMask


@st.composite
def drawn(
    draw: st.DrawFn, ranks: tuple[int, int], tokens: tuple[int, int], schemes: Sequence[Scheme] = SCHEMES
) -> Drawn:
    """Odd sizes, one token per rank, windows longer than the sequence, documents of one token or all on one rank."""
    scheme, num_ranks = draw(st.sampled_from(schemes)), draw(st.integers(*ranks))
    both = draw(st.sampled_from([size for size in range(1, num_ranks + 1) if num_ranks % size == 0]))
    exchanging = {"head": num_ranks, "head_ring": both}.get(scheme, 1)
    layout = draw(st.sampled_from(LAYOUTS))
    size = num_ranks * draw(st.integers(*tokens)) * (2 if layout == "zigzag" else 1)
    kv_heads = draw(st.integers(1, 2)) * exchanging
    ends = [end for end in np.cumsum(draw(st.lists(st.integers(1, 7), max_size=9))).tolist() if end < size]
    lengths = tuple(np.diff([0, *ends, size]).tolist())
    mask = AttentionMask(draw(st.booleans()), draw(st.none() | st.integers(1, 99)), lengths)
    heads = kv_heads * draw(st.integers(1, 3)), kv_heads
    mesh = Mesh(ring=num_ranks // both, heads=both) if scheme == "head_ring" else Mesh(cp=num_ranks)
    return Drawn(scheme, mesh, TokenLayout(layout, size, num_ranks), heads, mask)


def check_drawn(fw: Framework, case: Drawn, factors: Sequence[float]) -> None:
    axes = ("heads", "ring") if case.scheme == "head_ring" else ("cp",)
    attention, about = getattr(fw.lab, f"{case.scheme}_attention"), {"layout": case.tokens.name, **vars(case.mask)}
    program = program_of(fw, lambda q, k, v: attention(q, k, v, *axes, **about, return_lse=True), True)
    spec = P(None, None, case.mesh.axis_names)
    for factor in factors:
        args = [fw.array(case.tokens.arrange(x, 2)) for x in tensors(*case.heads, case.tokens.num_tokens, factor)]
        got = fw.lab.run(program, case.mesh, *args, in_specs=(spec,) * 4, out_specs=(spec,) * 5).value
        want = on_one_device(*case.heads, case.mask, case.tokens.num_tokens, factor)
        for name, x, right in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
            largest = max(np.abs(part).max() for part in want)  # a gradient may be 0: a token that sees itself alone
            close(case.tokens.restore(fw.numpy(x), 2), right, name, cancelled=largest)


@settings(max_examples=60, deadline=None)
@given(case=drawn((1, 8), (1, 5)), factor=st.sampled_from([0, 1, 30]))
def test_any_ranks_layout_and_mask(case: Drawn, factor: float):
    check_drawn(FRAMEWORKS["torch"](), case, [factor])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_ranks_layout_and_mask_in_jax(scheme: Scheme):
    """Three programs of each scheme, since each has to be compiled, on values of many sizes."""
    fw = FRAMEWORKS["jax"]()

    @settings(max_examples=3, deadline=None, phases=[Phase.generate])  # looking for a smaller mistake takes minutes
    @given(case=drawn((2, 4), (3, 6), [scheme]))
    def check(case: Drawn) -> None:
        with double(fw):
            check_drawn(fw, case, [0, 0.1, 1, 5, 30])

    check()


@pytest.mark.parametrize("scheme", ["ring", "gather"])
@pytest.mark.parametrize("sizes", [(1, 2, 3), (2, 2, 1), (1, 3, 2)])
def test_ranks_with_different_numbers_of_tokens_are_refused(scheme: Scheme, sizes: tuple[int, ...]):
    """In torch; in JAX one program has the same shapes on every rank."""
    lab = FRAMEWORKS["torch"]().lab

    def program() -> Any:
        x = torch.randn(1, 2, sizes[lab.axis_index("cp")], 4)
        return getattr(lab, f"{scheme}_attention")(x, x, x, "cp", causal=False)

    with pytest.raises(ShapeError, match=r"over axis 'cp': the keys of \d tokens arrived instead of \d"):
        lab.run(program, Mesh(cp=len(sizes)))
