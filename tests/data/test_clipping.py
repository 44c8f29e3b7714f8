"""The global norm and clipping by it, against one device: over dp x tp x pp, copies, ties; both frameworks."""

import copy
import io
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from tests.frameworks import FRAMEWORKS, Framework, in_both
from tests.sharded import double
from tplab import Mesh, P
from tplab.errors import MeshError, RankError, SpecError
from tplab.pipeline import LayerSpec, TiedSpec
from tplab.schedules import chimera, interleaved_1f1b, one_f_one_b, zb_v
from tplab.torch import (
    GPT,
    ColumnParallelLinear,
    GPTConfig,
    ParallelRMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    all_gather,
    average_gradients,
    axis_index,
    clip_gradients,
    gpt_specs,
    gradient_norm,
    run,
    shard_gradients,
    shard_optimizer,
    shard_parameters,
    split_state,
)

SHAPES = {"columns": (4, 6), "rows": (12, 5), "both": (12, 4), "copied": (7,), "one": ()}
SPECS = {"columns": P(None, "tp"), "rows": P(("tp", "cp")), "both": P("tp", "cp"), "copied": P(), "one": P()}
GRADIENTS = {name: np.random.default_rng(3).normal(size=shape) for name, shape in SHAPES.items()}
WHOLE = np.concatenate([g.reshape(-1) for g in GRADIENTS.values()])

# One rounding per number and per sum of 120 of them.
TOLERANCE = 1e-14


@pytest.fixture
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def clipped(fw: Framework, mesh: Mesh, max_norm: float, norm_type: float):
    """Each gradient, put together again, and the norm, which all ranks must agree on; and the trace."""
    given = {name: fw.array(g) for name, g in GRADIENTS.items()}
    specs = {name: P(*(_on(entry, mesh) for entry in spec)) for name, spec in SPECS.items()}

    def of_torch(gradients):
        parameters = {name: nn.Parameter(torch.zeros_like(g)) for name, g in gradients.items()}
        for name, g in gradients.items():
            parameters[name].grad = g.clone()
        norm = fw.lab.gradient_norm(parameters, specs, norm_type=norm_type)
        had = fw.lab.clip_gradients(parameters, max_norm, specs, norm_type=norm_type)
        return {name: p.grad for name, p in parameters.items()}, norm, had

    def of_jax(gradients):
        norm = fw.lab.gradient_norm(gradients, specs, norm_type=norm_type)
        return (*fw.lab.clip_gradients(gradients, max_norm, specs, norm_type=norm_type), norm)

    program = of_torch if fw.name == "torch" else of_jax
    out = fw.lab.run(program, mesh, given, in_specs=(specs,), out_specs=(specs, P(), P()), keep_values=0)
    gradients, norm, had = out.value
    assert float(norm) == float(had)
    return {name: fw.numpy(g) for name, g in gradients.items()}, float(norm), out.trace


def _on(entry, mesh):
    """An entry of a spec, of the axes that the mesh has."""
    names = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(name for name in names if name in mesh.shape)


@pytest.mark.parametrize(
    "fw, mesh, max_norm, norm_type",
    in_both(
        [(mesh, 2.5, 2) for mesh in (Mesh(tp=1), Mesh(tp=2), Mesh(dp=2, tp=2, cp=2), Mesh(cp=2, dp=3), Mesh(dp=4))]
        + [(Mesh(dp=2, tp=2, cp=2), 0.5, p) for p in (1, 3, math.inf)]
        + [(Mesh(dp=2, tp=2), 1e9, 2)],
        [(Mesh(dp=2, tp=2, cp=2), 2.5, 2), (Mesh(tp=2, cp=2), 0.5, math.inf), (Mesh(tp=2), 1e9, 3)],
    ),
    indirect=["fw"],
    ids=str,
)
def test_one_device_would_clip_the_same(fw, mesh, max_norm, norm_type):
    with double(fw):
        got, norm, trace = clipped(fw, mesh, max_norm, norm_type)
    parameter = nn.Parameter(torch.zeros(WHOLE.size, dtype=torch.float64))
    parameter.grad = torch.tensor(WHOLE)
    want = float(nn.utils.clip_grad_norm_([parameter], max_norm, norm_type))
    assert norm == pytest.approx(want, rel=TOLERANCE)
    together = np.concatenate([got[name].reshape(-1) for name in GRADIENTS])
    np.testing.assert_allclose(together, parameter.grad.numpy(), rtol=TOLERANCE)
    if max_norm == 1e9:
        assert np.array_equal(together, WHOLE)
    cut = tuple(name for name in mesh.shape if name != "dp")
    events = trace.select(kind="collective", rank=0).events
    assert {event.axis for event in events} <= {",".join(cut)}
    assert [event.shape for event in events] == ([()] * 2 if cut and mesh.axis_size(cut) > 1 else [])


# --- pipelines --------------------------------------------------------------------------------------------------------

D, WORDS = 6, 10


def layers_of(fw: Framework, axis: str):
    """Words that are tied, and layers of two kinds, cut along `axis` and whole."""
    lab = fw.lab
    if fw.name == "torch":
        head = TiedSpec("words", nn.Linear, D, WORDS, bias=False, forward=lambda layer, x: x)
        words = TiedSpec("words", nn.Linear, D, WORDS, bias=False)
    else:
        words = TiedSpec("words", _Whole)
        head = TiedSpec("words", _Whole, forward=lambda layer, params, x: x)
    middle = [LayerSpec(lab.ParallelMLP, D, 4 * D, axis), LayerSpec(lab.LayerNorm, D)] * 2
    return [words, *middle, head]


class _Whole:
    def init(self, key):
        import jax

        return {"weight": jax.random.normal(key, (WORDS, D))}

    def __call__(self, params, x):
        return x


MLP = {"up.weight": P("tp"), "up.bias": P("tp"), "down.weight": P(None, "tp"), "down.bias": P()}


def stage_specs(schedule, bounds):
    """{stage: {name: P}} of the layers above, as torch calls their parameters."""
    named = [{"weight": P(), "layer.weight": P()}, MLP, {"weight": P(), "bias": P()}]
    each = [named[0], named[1], named[2], named[1], named[2], named[0]]
    return {
        stage: {
            f"{place - bounds[stage]}.{name}": spec
            for place in range(bounds[stage], bounds[stage + 1])
            for name, spec in each[place].items()
        }
        for stage in range(schedule.num_stages)
    }


def norm_in_pipeline(fw: Framework, schedule, mesh: Mesh, norm_type: float) -> float:
    """The norm of the parameters, which are their own gradients here: copies are equal, and tied ones too."""

    def program():
        bounds = np.linspace(0, 6, schedule.num_stages + 1).astype(int).tolist()
        stages = fw.lab.stages_of(layers_of(fw, "tp"), schedule, bounds=bounds)
        if fw.name == "jax":
            return fw.lab.gradient_norm(stages, norm_type=norm_type)
        for parameter in stages.parameters():
            parameter.grad = parameter.detach().clone()
        return fw.lab.gradient_norm(stages, stage_specs(schedule, bounds), norm_type=norm_type)

    return float(fw.lab.run(program, mesh, out_specs=P()).value)


@pytest.mark.parametrize(
    "fw, schedule, mesh, norm_type",
    in_both(
        [
            (one_f_one_b(3, 4), Mesh(pp=3), 2),
            (one_f_one_b(2, 4), Mesh(dp=2, pp=2, tp=2), 2),
            (zb_v(2, 4), Mesh(tp=2, pp=2), 1),
            (chimera(4, 4), Mesh(pp=4), 2),
            (interleaved_1f1b(2, 4, 3), Mesh(pp=2, tp=2), math.inf),
        ],
        [(chimera(2, 2), Mesh(pp=2, tp=2), 2)],
    ),
    indirect=["fw"],
    ids=str,
)
def test_copies_of_stages_and_ties_are_counted_once(fw, schedule, mesh, norm_type):
    with double(fw):
        mesh = mesh if "tp" in mesh.shape else Mesh(**mesh.shape, tp=1)
        got = norm_in_pipeline(fw, schedule, mesh, norm_type)
        want = plain_norm(fw, norm_type)
    # torch's parameters are of float32 here, whose elements are the same; the sums are of float64
    assert got == pytest.approx(want, rel=1e-7 if fw.name == "torch" else TOLERANCE)


def plain_norm(fw: Framework, norm_type: float) -> float:
    """That of one rank's layers, without the second of the tied ones."""

    def program():
        stages = fw.lab.stages_of(layers_of(fw, "tp"), one_f_one_b(1, 1))
        if fw.name == "jax":
            return stages[0][:-1]
        return [list(layer.parameters()) for layer in list(stages[0].children())[:-1]]

    import jax

    held = fw.lab.run(program, Mesh(pp=1, tp=1)).per_rank[0]
    flat = np.concatenate([fw.numpy(x).reshape(-1) for x in jax.tree.leaves(held)])
    return float(np.linalg.norm(flat.astype(np.float64), norm_type))


# --- a whole model, trained -------------------------------------------------------------------------------------------


def test_a_gpt_that_is_clipped_at_each_step_stays_the_unsharded_one():
    config = GPTConfig(vocab_size=11, width=8, num_layers=2, num_heads=2, context=6, deviation=0.3)
    specs, ids = gpt_specs(config), torch.randint(11, (8, 7), generator=torch.Generator().manual_seed(1))

    def program(state, ids):
        model = GPT(config).double()
        model.load_state_dict(state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        norms = []
        for _ in range(4):
            optimizer.zero_grad()
            model.loss(ids[:, :-1], ids[:, 1:]).backward()
            average_gradients(model, "dp", bucket_bytes=1000)
            as_told = gradient_norm(model, specs)
            norms.append(clip_gradients(model, 0.5, error_if_nonfinite=True))  # tplab's layers know how they are cut
            assert norms[-1] == as_told
            optimizer.step()
        return torch.stack(norms), model.state_dict()

    whole = run(lambda: GPT(config).double().state_dict(), Mesh(tp=1), seed=5).per_rank[0]
    (want_norms, want), *_ = run(program, Mesh(dp=1, tp=1), whole, ids).per_rank
    assert want_norms.min() > 0.5  # clipped at every step
    mesh = Mesh(dp=2, tp=2)

    def on_mesh(states, ids):
        from tplab.torch import axis_index

        return program(states[2 * axis_index("dp") + axis_index("tp")], ids)

    pieces = split_state(whole, specs, mesh)
    results = run(on_mesh, mesh, pieces, ids, in_specs=(P(), P("dp"))).per_rank
    for rank, (norms, state) in enumerate(results):
        torch.testing.assert_close(norms, want_norms, rtol=1e-12, atol=0)
        for name, piece in split_state(want, specs, mesh)[rank].items():
            # 4 steps of AdamW, whose first divides gradients by their own size: roundings grow to some 1e-11
            torch.testing.assert_close(state[name], piece, rtol=1e-10, atol=1e-10)


def test_sixteen_bits_are_added_up_in_thirty_two():
    def program(g):
        p = nn.Parameter(torch.zeros_like(g))
        p.grad = g
        return gradient_norm({"p": p}, {"p": P()})

    norm = run(program, Mesh(dp=2), torch.full((70_000,), 0.01, dtype=torch.bfloat16)).per_rank[0]
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(torch.tensor(0.01, dtype=torch.bfloat16)) * 70_000**0.5, rel=1e-5)


# --- parameters that ZeRO has cut, which know it themselves -----------------------------------------------------------


def small_model(tied: bool, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7, bias=False))
    for place, p in enumerate(net.parameters()):
        p.data = torch.tensor(np.random.default_rng(place).normal(size=p.shape))
    if tied:
        net[4].weight = net[0].weight
    return net.to(dtype)


def losses(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (net(x) ** 2).sum(1).mean()


def one_device_clips(tied: bool, norm_type: float) -> tuple[float, list[np.ndarray]]:
    net = small_model(tied)
    losses(net, BATCH).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5, norm_type)
    return float(norm), [p.grad.numpy() for p in net.parameters() if p.grad is not None]


BATCH = torch.tensor(np.random.default_rng(8).normal(size=(12, 5)))


def stage_1(net, **options):
    return shard_optimizer(partial(torch.optim.SGD, lr=1.0), net.parameters(), "dp", bucket_bytes=200, **options)


def stage_2(net, **options):
    return shard_gradients(partial(torch.optim.SGD, lr=1.0), net.parameters(), "dp", bucket_bytes=200, **options)


def stage_3(net, **options):
    shard_parameters(net, "dp", **options)
    return torch.optim.SGD(net.parameters(), lr=1.0)


AS_GIVEN = {
    "the model": lambda net: net,
    "a list": lambda net: list(net.parameters()),
    "an iterator": lambda net: net.parameters(),
    "by name": lambda net: dict(net.named_parameters()),
}


@pytest.mark.parametrize("make", [stage_1, stage_2, stage_3])
@pytest.mark.parametrize(
    "mesh, tied, norm_type, given",
    [
        (Mesh(dp=2), False, 2, "the model"),
        (Mesh(dp=3), True, 2, "a list"),
        (Mesh(dp=4), True, 1, "by name"),
        (Mesh(dp=40), False, math.inf, "the model"),  # more ranks than elements: pieces of nothing
        (Mesh(node=2, dp=2), False, 3, "the model"),
        (Mesh(dp=1), True, 2, "an iterator"),
    ],
    ids=str,
)
def test_pieces_of_zero_are_counted_without_specs(make, mesh, tied, norm_type, given):
    """Every rank clips by the norm of one device's gradients, whatever it holds of them."""
    options = {"replicate_axis": "node"} if "node" in mesh.shape else {}
    batch = BATCH if mesh.size <= 12 else BATCH.repeat(10, 1)

    def program(x):
        net = small_model(tied)
        before = [p.detach().clone() for p in small_model(tied).parameters()]
        optimizer = make(net, **options)
        losses(net, x).backward()
        if make is not stage_3:
            optimizer.reduce_gradients()
        given_as = "the model" if make is stage_3 else given  # its pieces are bare tensors, which know nothing
        norm = clip_gradients(AS_GIVEN[given_as](net), 0.5, norm_type=norm_type)
        optimizer.step()  # a rate of 1: what it changes is the clipped gradient
        after = [p.detach() for p in net.parameters()]
        if make is stage_3:
            after = [all_gather(pad(p, before[i], mesh), "dp")[: before[i].numel()] for i, p in enumerate(after)]
        return norm, [b.reshape(-1) - a.reshape(-1) for a, b in zip(after, before)]

    want_norm, want = one_device_clips(tied, norm_type)
    spec = P(mesh.axis_names)
    for norm, got in run(program, mesh, batch, in_specs=spec).per_rank:
        assert float(norm) == pytest.approx(want_norm, rel=1e-12)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g.numpy(), w.reshape(-1), rtol=1e-9, atol=1e-13)  # a difference of parameters


def pad(piece, whole, mesh):
    width = -(-whole.numel() // mesh.axis_size("dp"))
    return torch.cat([piece, piece.new_zeros(width - piece.numel())])


def test_pieces_of_zero_are_counted_where_specs_speak_of_another_axis():
    """A column-parallel weight whose pieces are cut once more: specs need not name "dp", and may; of tplab's own layer,
    nothing need be named."""
    g = torch.arange(1.0, 13)

    for spec in (P("tp"), P(("tp", "dp")), None):

        def program(g, spec=spec):
            net = nn.Linear(1, 6, bias=False) if spec else ColumnParallelLinear(1, 12, "tp", bias=False)
            shard_parameters(net, "dp")
            net.weight.grad = g
            return gradient_norm(net, {"weight": spec} if spec else None)

        norms = run(program, Mesh(tp=2, dp=2), g, in_specs=P(("tp", "dp"))).per_rank
        assert [float(norm) for norm in norms] == pytest.approx([math.sqrt(650)] * 4)


@pytest.mark.parametrize("make", [stage_1, stage_2])
def test_gradients_that_the_optimizer_has_not_reduced_are_refused(make):
    """Each rank would clip by the norm of its own gradients, or by none."""

    def program(x):
        net = small_model(False)
        optimizer = make(net)
        losses(net, x).backward()
        clip_gradients(net, 0.5)
        optimizer.step()

    with pytest.raises(RankError, match=r"parameter '.*' .*call optimizer.reduce_gradients\(\) first"):
        run(program, Mesh(dp=2), BATCH, in_specs=P("dp"))


def test_averaged_gradients_are_clipped_before_the_optimizer_cuts_them():
    def program(x):
        net = small_model(False)
        optimizer = stage_1(net, is_reduced=True)
        losses(net, x).backward()
        average_gradients(net, "dp")
        norms = [clip_gradients(net, 0.5)]
        optimizer.reduce_gradients()
        norms.append(gradient_norm(net))
        optimizer.zero_grad()
        return [*norms, gradient_norm(net)]

    want, _ = one_device_clips(False, 2)
    for norms in run(program, Mesh(dp=2), BATCH, in_specs=P("dp")).per_rank:
        assert [float(norm) for norm in norms] == pytest.approx([want, 0.5, 0], rel=1e-5)


def test_a_nan_in_one_rank_s_piece_reaches_every_rank():
    def program():
        net = nn.Linear(4, 1, bias=False)
        shard_parameters(net, "dp")
        net.weight.grad = torch.tensor([math.nan if axis_index("dp") else 1.0, 1.0])
        return [gradient_norm(net, norm_type=p) for p in (1, 2, math.inf)], clip_gradients(net, 1.0)

    for norms, norm in run(program, Mesh(dp=2)).per_rank:
        assert norm.isnan() and all(n.isnan() for n in norms)


# --- modules know how they are cut, whatever tensors they are given ---------------------------------------------------


def saved_and_loaded(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def on_meta_first(net: nn.Module) -> nn.Module:
    state = {name: x.clone() for name, x in net.state_dict().items()}
    net.to("meta").to_empty(device="cpu").load_state_dict(state)
    return net


def assigned(net: nn.Module) -> nn.Module:
    net.load_state_dict({name: x.clone() for name, x in net.state_dict().items()}, assign=True)
    return net


def with_new_parameters(net: nn.Module) -> nn.Module:
    for module in net.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    return net


def averaged(net: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(net).requires_grad_()


def as_child(net: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.ModuleDict({"net": net}))


SAME_MODULE = [lambda net: net, copy.deepcopy, saved_and_loaded, on_meta_first, assigned, with_new_parameters, averaged,
               as_child]  # fmt: skip


@pytest.mark.parametrize("change", SAME_MODULE, ids=lambda change: change.__name__)
def test_a_module_knows_its_cuts_after_its_tensors_were_replaced(change):
    """Columns, GELU, rows: their gradients are the parameters themselves, of which each rank has its piece."""

    def program():
        layers = [
            ColumnParallelLinear(6, 12, "tp"),
            nn.GELU(),
            RowParallelLinear(12, 6, "tp"),
            ParallelRMSNorm(8, "tp"),
        ]
        net = change(nn.Sequential(*layers, VocabParallelEmbedding(9, 4, "tp")).double())
        for p in net.parameters():
            p.grad = p.detach() + 1
        return gradient_norm(net), clip_gradients(net, 0.5), gradient_norm(net)

    want = run(program, Mesh(tp=1)).per_rank[0][0]
    for mesh in (Mesh(tp=2), Mesh(dp=2, tp=2)):
        for norms in run(program, mesh).per_rank:
            assert [float(norm) for norm in norms] == pytest.approx([float(want), float(want), 0.5], rel=1e-6)


def test_a_tied_weight_is_a_piece_wherever_it_comes_first():
    def program(is_first: bool):
        table, head = VocabParallelEmbedding(8, 3, "tp"), nn.Linear(3, 4, bias=False)
        head.weight = table.weight
        net = nn.ModuleList([head, table] if is_first else [table, head])
        table.weight.grad = torch.ones_like(table.weight)
        return gradient_norm(net)

    for is_first in (True, False):
        assert float(run(program, Mesh(tp=2), is_first).per_rank[1]) == pytest.approx(24**0.5)


def test_a_piece_that_is_made_of_other_parameters_is_refused():
    def program(specs=None):
        net = torch.nn.utils.parametrizations.weight_norm(ColumnParallelLinear(3, 4, "tp", bias=False))
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        return gradient_norm(net, specs)

    with pytest.raises(RankError, match=r"'weight' of \w+ '' is a piece of a parameter, and is now .* give specs"):
        run(program, Mesh(tp=2))
    specs = {f"parametrizations.weight.original{part}": P("tp") for part in (0, 1)}
    assert float(run(program, Mesh(tp=2), specs).per_rank[0]) == pytest.approx(16**0.5)


@pytest.mark.parametrize("given", ["a list", "an iterator", "by name"])
def test_bare_tensors_of_unknown_cut_are_refused_on_several_ranks(given):
    def program():
        net = ColumnParallelLinear(3, 4, "tp", bias=False)
        net.weight.grad = torch.ones_like(net.weight)
        return clip_gradients(AS_GIVEN[given](net), 1.0)

    assert float(run(program, Mesh(tp=1)).per_rank[0]) == pytest.approx(12**0.5)
    with pytest.raises(RankError, match=r"nothing says how parameter '\w+' is placed on Mesh\(tp=2\): give its module"):
        run(program, Mesh(tp=2))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_pairs_of_names_and_parameters_are_no_parameters():
    def program():
        return gradient_norm(list(nn.Linear(2, 2).named_parameters()))  # type: ignore[arg-type]

    with pytest.raises(RankError, match=r"pair of a name and a parameter; give the module, or dict\(model.named"):
        run(program, Mesh(tp=1))


def norm_of(parameters, *args, **kwargs):
    def program():
        for p in parameters.values():
            p.grad = torch.ones_like(p)
        return clip_gradients(parameters, *args, **kwargs)

    return run(program, Mesh(tp=2)).per_rank


def test_norms_that_are_not_finite():
    def program(g):
        p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        p.grad, q.grad = g.clone(), torch.ones(2)
        norm = clip_gradients({"p": p, "q": q}, 1.0, {"p": P("tp"), "q": P()}, error_if_nonfinite=strict)
        return norm, q.grad

    g, strict = torch.tensor([1.0, 2.0, math.nan, 3.0]), False
    for norm, grad in run(program, Mesh(tp=2), g, in_specs=(P("tp"),)).per_rank:
        assert norm.isnan() and grad.isnan().all()  # as torch's
    strict = True
    with pytest.raises(
        RankError, match=r"the norm of the gradients is nan, so they cannot be clipped: .*skip this step"
    ):
        run(program, Mesh(tp=2), g, in_specs=(P("tp"),))


def test_what_is_wrong_is_said():
    p = {"w": nn.Parameter(torch.zeros(2))}
    with pytest.raises(SpecError, match="specs say nothing of parameter 'w'; give a P for every parameter"):
        norm_of(p, 1.0, {"v": P()})
    for wrong in ({"w": P(), "frozen": None}, {"w": ("tp",)}):
        with pytest.raises(
            SpecError, match=r"specs has .* where a P belongs; P\(\) stands for all of it on every rank"
        ):
            norm_of(p, 1.0, wrong)
    with pytest.raises(SpecError, match=r"specs is P\(\); give a P by the name of each parameter, \{'weight': P\(\)\}"):
        norm_of(p, 1.0, P())
    with pytest.raises(RankError, match="max_norm is -1"):
        norm_of(p, -1)
    with pytest.raises(RankError, match="norm_type is 0; it must be above 0"):
        norm_of(p, 1.0, norm_type=0)
    with pytest.raises(MeshError, match="no axis 'dp'"):
        norm_of(p, 1.0, {"w": P("dp")})
    with pytest.raises(RankError, match="nothing says along which axis it runs; give what stages_of returned"):
        run(lambda: gradient_norm({0: nn.Linear(2, 2)}), Mesh(pp=1))


def test_jax_types_say_where_specs_are_wrong():
    fw = FRAMEWORKS["jax"]()
    w, norm = fw.array(np.ones(4)), fw.lab.gradient_norm
    with pytest.raises(
        SpecError, match=r"\['w'\] differs along 'dp' by JAX's types, and P\(\) says .*; average it first"
    ):
        fw.lab.run(lambda w: norm({"w": w}), Mesh(dp=2), w, in_specs=P("dp"))
    with pytest.raises(SpecError, match=r"\['w'\] is the same along 'dp' by JAX's types, and P\('dp'\) says"):
        fw.lab.run(lambda w: norm({"w": w}, {"w": P("dp")}), Mesh(dp=2), w)
    with pytest.raises(SpecError, match="specs has 'dp' where a P belongs"):
        fw.lab.run(lambda w: norm({"w": w}, {"w": "dp"}), Mesh(dp=2), w)


@pytest.mark.parametrize("fw", FRAMEWORKS, indirect=True)
@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_a_gradient_that_is_not_a_number_is_seen_on_every_rank(fw, norm_type):
    """On whichever rank it is, in a piece or in a copy."""
    mesh, specs = Mesh(tp=2), {"cut": P("tp"), "copied": P()}
    for name, place in (("cut", 0), ("cut", 3), ("copied", 1)):
        gradients = {"cut": np.ones(4, np.float32), "copied": np.ones(2, np.float32)}
        gradients[name][place] = np.nan

        def program(given):
            if fw.name == "torch":
                parameters = {key: nn.Parameter(torch.zeros_like(g)) for key, g in given.items()}
                for key, g in given.items():
                    parameters[key].grad = g.clone()
                given = parameters
            return fw.lab.gradient_norm(given, specs, norm_type=norm_type)

        given = {key: fw.array(g) for key, g in gradients.items()}
        assert np.isnan([float(n) for n in fw.lab.run(program, mesh, given, in_specs=(specs,)).per_rank]).all()
