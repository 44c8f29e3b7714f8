"""A mixture of experts on ranks against one device: outputs, every gradient, parameters after some steps of AdamW.

The oracle computes token by token: no table, no buffer, no sort.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.frameworks import FRAMEWORKS, Framework, in_both
from tests.sharded import close, double, flat, nested, numbers
from tplab import Mesh, P
from tplab.errors import ShapeError
from tplab.experts import Routing, contiguous, rows_between

WIDTH, HIDDEN, SHARED, TOKENS = 6, 8, 4, 24
EVERYTHING = ("node", "dp", "ep", "etp")  # all ranks have tokens of their own
STEPS, MOST = {"torch": 3, "jax": 2}, 0.5
"""JAX compiles each step."""


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


class Case(NamedTuple):
    mesh: Mesh
    dispatch: str
    rule: Routing
    activation: str = "swiglu"
    over: str = "microbatch"
    tokens: int = TOKENS

    @property
    def axis(self) -> Any:
        return ("node", "ep") if self.dispatch == "two_levels" else "ep"

    def layer(self, lab: Any) -> Any:
        return lab.MixtureOfExperts(
            WIDTH,
            HIDDEN,
            self.rule,
            self.axis,
            activation=self.activation,
            dispatch=self.dispatch,
            tensor_axis="etp" if "etp" in self.mesh.axis_names else None,
            shared=SHARED,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return self.mesh.axis_names


# A cover: every dispatcher, mesh, rule, activation and loss, and each pair of the first three that can differ.
PLAIN, ONE, ALL = Routing(8, 2), Routing(8, 1, normalized=False), Routing(8, 8)
DEEP = Routing(8, 3, score="sigmoid", groups=4, top_groups=2, scale=2.5)
TIGHT, LOOSE = Routing(8, 2, capacity=0.5), Routing(8, 3, capacity=1.25, score="sigmoid")
CASES = [
    Case(Mesh(ep=1), "all_to_all", DEEP, over="global"),
    Case(Mesh(ep=1), "gather", TIGHT, "gelu"),
    Case(Mesh(ep=2), "per_rank", ALL, "gelu_tanh", over="sequence"),
    Case(Mesh(ep=2), "all_to_all", TIGHT, over="global"),
    Case(Mesh(ep=4), "all_to_all", DEEP),
    Case(Mesh(ep=4), "gather", ONE, over="sequence"),
    Case(Mesh(ep=4), "per_rank", LOOSE, over="global"),
    Case(Mesh(ep=8), "per_rank", PLAIN, "gelu"),
    Case(Mesh(ep=8), "gather", DEEP, over="global"),
    Case(Mesh(ep=8), "all_to_all", ALL),
    Case(Mesh(node=2, ep=2), "two_levels", DEEP, over="global"),
    Case(Mesh(node=2, ep=4), "two_levels", TIGHT),
    Case(Mesh(node=4, ep=2), "two_levels", PLAIN, "gelu", over="sequence"),
    Case(Mesh(dp=2, ep=2), "per_rank", TIGHT),
    Case(Mesh(dp=3, ep=2), "all_to_all", PLAIN, over="global"),
    Case(Mesh(ep=2, etp=2), "per_rank", DEEP, over="global"),
    Case(Mesh(dp=2, ep=2, etp=2), "all_to_all", LOOSE),
    Case(Mesh(ep=2, etp=4), "gather", PLAIN, "gelu_tanh"),
    Case(Mesh(node=2, ep=2, etp=2), "two_levels", ONE, over="sequence"),
]
OF_JAX = [CASES[place] for place in (1, 2, 4, 5, 6, 9, 10, 11, 14, 15, 16, 17, 18)]
"""Every value; and with each dispatcher a capacity, and a tensor axis."""


# --- the oracle -------------------------------------------------------------------------------------------------------


def numbers_of(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.clone()


def mlp(up, down, gate, x, activation):
    hidden = up @ x
    if activation == "swiglu":
        hidden = F.silu(gate @ x) * hidden
    else:
        hidden = F.gelu(hidden, approximate="tanh" if activation == "gelu_tanh" else "none")
    return down @ hidden


def choose(scores: torch.Tensor, rule: Routing) -> list[list[int]]:
    """The experts of each token, the best first; -1 where there is no room."""
    found = []
    for row in scores.tolist():
        size = rule.group_size
        groups = [sorted(row[i : i + size], reverse=True) for i in range(0, rule.experts, size)]
        best = sorted(range(rule.groups), key=lambda g: -sum(groups[g][:2]))[: rule.top_groups]
        able = [expert for expert in range(rule.experts) if expert // size in best]
        found.append(sorted(able, key=lambda e: -row[e])[: rule.top_k])
    left = [rule.room(len(found))] * rule.experts
    for slot in range(rule.top_k):
        for chosen in found:
            expert = chosen[slot]
            left[expert] -= 1
            if left[expert] < 0:
                chosen[slot] = -1
    return found


def one_rank(state: Mapping[str, torch.Tensor], x: torch.Tensor, case: Case) -> tuple[torch.Tensor, Any]:
    """The layer on the tokens of one rank, with all experts."""
    rule = case.rule
    logits = x @ state["router.weight"].T
    scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()
    chosen = choose(scores, rule)
    gates = state.get("experts.gate", [None] * rule.experts)
    rows = []
    for token, experts in enumerate(chosen):
        of_chosen = [scores[token, e] for e in experts if e >= 0]
        total = sum(of_chosen) if rule.normalized else 1
        y = mlp(state["shared.up"], state["shared.down"], state.get("shared.gate"), x[token], case.activation)
        for expert, score in zip([e for e in experts if e >= 0], of_chosen):
            up, down = state["experts.up"][expert], state["experts.down"][expert]
            y = y + score / total * rule.scale * mlp(up, down, gates[expert], x[token], case.activation)
        rows.append(y)
    return torch.stack(rows), (chosen, scores, logits)


def whole(state: Mapping[str, torch.Tensor], x: torch.Tensor, c: torch.Tensor, case: Case) -> tuple[Any, Any]:
    """The mean of the ranks' losses, and y, on one device."""
    pieces = zip(x.chunk(case.mesh.size), c.chunk(case.mesh.size))
    results = [(*one_rank(state, piece, case), weights) for piece, weights in pieces]
    experts, k = case.rule.experts, case.rule.top_k
    loss: Any = 0

    def balance(chosen: list[list[int]], p: torch.Tensor) -> torch.Tensor:
        counts = [sum(row.count(expert) for row in chosen) for expert in range(experts)]
        fractions = torch.tensor(counts, dtype=torch.float64) / (len(chosen) * k)
        return experts * (fractions * p.mean(0)).sum()

    everywhere = [row for _, (chosen, _, _), _ in results for row in chosen]
    for y, (chosen, scores, logits), weights in results:
        p = scores / scores.sum(-1, keepdim=True)
        if case.over == "sequence":  # of one token
            uneven = sum(balance([row], one[None]) for row, one in zip(chosen, p)) / len(p)
        else:
            uneven = balance(everywhere if case.over == "global" else chosen, p)
        loss = loss + (y * weights).sum() / len(y) + 0.1 * uneven
        loss = loss + 0.01 * logits.exp().sum(-1).log().square().mean()
    return loss / len(results), torch.cat([y for y, _, _ in results])


def reference(
    state: Mapping[str, np.ndarray], x: np.ndarray, c: np.ndarray, case: Case, steps: int = 1
) -> dict[str, Any]:
    """y, dx and all gradients of the first step, and the parameters after the last."""
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in state.items()}
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-2)
    first: dict[str, Any] = {}
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.tensor(x, requires_grad=True)
        loss, y = whole(tensors, inputs, torch.tensor(c), case)
        loss.backward()
        if step == 0:
            first = {"y": y, "dx": inputs.grad} | {f"gradient of {n}": numbers_of(t.grad) for n, t in tensors.items()}
        torch.nn.utils.clip_grad_norm_(tensors.values(), MOST)
        optimizer.step()
    return {n: t.detach().numpy() for n, t in (first | {f"{n} after": t for n, t in tensors.items()}).items()}


# --- the ranks --------------------------------------------------------------------------------------------------------


def _loss(lab: Any, y: Any, routed: Any, c: Any, case: Case) -> Any:
    axis = case.names if case.over == "global" else None
    sequence = 1 if case.over == "sequence" else None
    balance = lab.balance_loss(routed, over=case.over, axis=axis, sequence=sequence)
    return (y * c).sum() / len(y) + 0.1 * balance + 0.01 * lab.z_loss(routed)


def _torch_program(lab: Any, case: Case) -> Any:
    def program(state: dict[str, torch.Tensor], x: torch.Tensor, c: torch.Tensor) -> dict[str, Any]:
        layer = case.layer(lab).double()
        assert layer.load_state_dict(state, strict=False).missing_keys == ["router.bias"]
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        first: dict[str, Any] = {}
        for step in range(STEPS["torch"]):
            optimizer.zero_grad()
            inputs = x.clone().requires_grad_()
            y, routed = layer(inputs)
            _loss(lab, y, routed, c, case).backward()
            lab.average_gradients(layer, case.names, bucket_bytes=None if step else 1e3)
            if step == 0:
                first = {"y": y.detach(), "dx": numbers_of(inputs.grad) / case.mesh.size}
                first |= {f"gradient of {n}": numbers_of(p.grad) for n, p in layer.named_parameters()}
            lab.clip_gradients(layer, MOST)
            optimizer.step()
        return first | {f"{n} after": p.detach() for n, p in layer.named_parameters()}

    return program


def _jax_program(lab: Any, case: Case, specs: Mapping[str, P]) -> Any:
    import jax
    import optax

    layer = case.layer(lab)

    def program(state: dict[str, Any], x: Any, c: Any) -> dict[str, Any]:
        def loss(state: dict[str, Any], x: Any) -> Any:
            y, routed = layer(nested(state), x)
            return lab.all_reduce(_loss(lab, y, routed, c, case), case.names, "mean"), y

        optimizer = optax.adamw(1e-2, weight_decay=1e-2)
        moments: Any = optimizer.init(state)
        first: dict[str, Any] = {}
        for step in range(STEPS["jax"]):
            (_, y), (grads, dx) = jax.value_and_grad(loss, (0, 1), has_aux=True)(state, x)
            if step == 0:
                first = {"y": y, "dx": dx} | {f"gradient of {n}": g for n, g in grads.items()}
            grads, _ = lab.clip_gradients(grads, MOST, dict(specs))
            updates, moments = optimizer.update(grads, moments, state)
            state = dict(optax.apply_updates(state, updates))  # type: ignore[call-overload]
        return first | {f"{n} after": p for n, p in state.items()}

    return program


def specs_of(case: Case) -> dict[str, P]:
    """How the parameters lie on the mesh, as JAX's layer says it."""
    import tplab.jax

    return flat(case.layer(tplab.jax).specs)


def state_of(case: Case) -> dict[str, np.ndarray]:
    experts, names = case.rule.experts, ("gate", "up", "down") if case.activation == "swiglu" else ("up", "down")
    state = {"router.weight": numbers(experts, WIDTH, seed=1)}
    for seed, name in enumerate(names):
        turn = -1 if name == "down" else 1
        state[f"experts.{name}"] = numbers(experts, *(HIDDEN, WIDTH)[::turn], seed=10 + seed) / 3
        state[f"shared.{name}"] = numbers(*(SHARED, WIDTH)[::turn], seed=20 + seed) / 3
    return state


def sharded(fw: Framework, case: Case, state: Mapping[str, np.ndarray], x: np.ndarray, c: np.ndarray) -> Any:
    specs, rows = specs_of(case), P(case.names)
    program = _torch_program(fw.lab, case) if fw.name == "torch" else _jax_program(fw.lab, case, specs)
    args = {name: fw.array(value) for name, value in state.items()}, fw.array(x), fw.array(c)
    out_specs = {"y": rows, "dx": rows}
    for name, spec in specs.items():
        out_specs |= {f"gradient of {name}": spec, f"{name} after": spec}
    return fw.lab.run(program, case.mesh, *args, in_specs=(specs, rows, rows), out_specs=out_specs)


@pytest.mark.parametrize(
    ("fw", "case"),
    in_both([(case,) for case in CASES], [(case,) for case in OF_JAX]),
    ids=lambda of: f"{of.mesh}-{of.dispatch}" if isinstance(of, Case) else of,
    indirect=["fw"],
)
def test_ranks_train_what_one_device_trains(fw, case):
    state, x, c = state_of(case), numbers(TOKENS, WIDTH, seed=3), numbers(TOKENS, WIDTH, seed=4)
    with double(fw):
        got, want = sharded(fw, case, state, x, c).value, reference(state, x, c, case, STEPS[fw.name])
        assert got.keys() == want.keys()
        largest = max(np.abs(value).max() for name, value in want.items() if name.startswith("gradient"))
        for name, value in want.items():
            close(fw.numpy(got[name]), value, name, cancelled=largest)


# --- what travels -----------------------------------------------------------------------------------------------------


def test_torch_sends_what_the_table_says():
    """A row of D numbers for each choice whose expert is elsewhere, or for each rank: there and back, forward and again
    backward, with numbers of experts (4 B each) and, where ranks weight, weights; and a count (8 B) for each rank."""
    import tplab.torch as tt

    case = Case(Mesh(ep=4), "all_to_all", DEEP)
    x = torch.tensor(numbers(TOKENS, WIDTH, seed=3))

    def program(x):
        layer = case.layer(tt).double()
        y, routed = layer(x.requires_grad_())
        y.sum().backward()
        return routed.choices

    for once, dispatch in ((False, "all_to_all"), (True, "per_rank")):
        case = case._replace(dispatch=dispatch)
        out = tt.run(program, case.mesh, x, in_specs=P("ep"), out_specs=P("ep"))
        table = rows_between(out.value.numpy(), contiguous(8, 4), once=once)
        leave, come = table.sum(1) - table.diagonal(), table.sum(0) - table.diagonal()
        choices = 1 if dispatch == "all_to_all" else 3
        for rank in range(4):
            rows = 8 * WIDTH * 2 * (leave[rank] + come[rank])
            about = 4 * choices * leave[rank] + 8 * 3
            weights = 0 if dispatch == "all_to_all" else 8 * choices * (leave[rank] + come[rank])
            assert out.trace.bytes_sent(rank=rank) == rows + about + weights


def test_jax_sends_slots():
    """Of 6 tokens per rank an expert takes 3 at most. So a rank sends 3 others the rows of 2 experts, there and back,
    forward and backward; and their choices. In the last step nothing uses dx, and XLA does not compute it."""
    with double(FRAMEWORKS["jax"]()):
        fw = FRAMEWORKS["jax"]()
        case = Case(Mesh(ep=4), "all_to_all", Routing(8, 2, capacity=2.0))
        assert case.rule.room(6) == 3
        out = sharded(fw, case, state_of(case), numbers(TOKENS, WIDTH), numbers(TOKENS, WIDTH))
        exchanged = [event for event in out.trace.select(kind="collective", rank=0).events if event.op == "all_to_all"]
        assert sum(event.bytes for event in exchanged) == (4 + 3) * 3 * 6 * WIDTH * 8 + STEPS["jax"] * 3 * 6 * 4


# --- what users expect ------------------------------------------------------------------------------------------------


def test_routing_is_replayed_with_the_weights_of_the_router_that_replays_it(fw):
    """A router with other weights follows recorded choices, and its own weights have the gradient."""
    case = Case(Mesh(ep=2), "per_rank", PLAIN)
    state, x = state_of(case), numbers(8, WIDTH)
    other = state | {"router.weight": numbers(8, WIDTH, seed=77)}
    specs = specs_of(case)

    def program(states, x):
        if fw.name == "jax":
            apply = lambda state, *more: case.layer(fw.lab)(nested(state), x, *more)  # noqa: E731
        else:

            def apply(state, *more):
                layer = case.layer(fw.lab).double()
                layer.load_state_dict(state, strict=False)
                return layer(x, *more)

        _, recorded = apply(states[0])
        _, replayed = apply(states[1], recorded.choices)
        _, own = apply(states[1])
        return recorded.choices, replayed.choices, replayed.scores, own.scores, own.choices

    with double(fw):
        states = [{n: fw.array(v) for n, v in each.items()} for each in (state, other)]
        rows = (P("ep"),) * 5
        out = fw.lab.run(program, case.mesh, states, fw.array(x), in_specs=([specs, specs], P("ep")), out_specs=rows)
        recorded, replayed, scores, own, choices = map(fw.numpy, out.value)
        assert (recorded == replayed).all() and (recorded != choices).any()
        assert (scores == own).all()


def test_choices_that_are_replayed_are_followed_whatever_the_capacity(fw):
    """Recorded token by token, as in generation, where each finds room: one expert of a batch may have more."""
    loose, tight = (Case(Mesh(ep=2), "all_to_all", Routing(8, 1, capacity=capacity)) for capacity in (None, 1.0))
    state, x, choices = state_of(loose), numbers(8, WIDTH), np.full((8, 1), 5)

    def program(state, x, choices):
        found = []
        for case in (loose, tight):
            layer = case.layer(fw.lab)
            if fw.name == "jax":
                found.append(layer(nested(state), x, choices)[0])
            else:
                layer.double().load_state_dict(state, strict=False)
                found.append(layer(x, choices)[0].detach())
        return found

    with double(fw):
        given = {name: fw.array(value) for name, value in state.items()}, fw.array(x), fw.array(choices)
        specs = specs_of(loose), P("ep"), P("ep")
        out = fw.lab.run(program, loose.mesh, *given, in_specs=specs, out_specs=P("ep"))
        want, got = map(fw.numpy, out.value)
    close(got, want)


def test_a_dropped_choice_has_no_part_in_the_weights(fw):
    """Those that are left add up to 1, and are the same where the choices are replayed."""
    weight, x = numbers(8, WIDTH, seed=1), numbers(TOKENS, WIDTH)

    def program(weight, x):
        router = fw.lab.Router(WIDTH, TIGHT)
        if fw.name == "torch":
            router.weight.data = weight
            apply = router
        else:
            apply = lambda x, *choices: router({"weight": weight}, x, *choices)  # noqa: E731
        routed = apply(x)
        return routed.choices, routed.weights, apply(x, routed.choices).weights, routed.scores

    with double(fw):
        out = fw.lab.run(program, Mesh(ep=1), fw.array(weight), fw.array(x)).per_rank[0]
        choices, weights, replayed, scores = map(fw.numpy, out)
    kept = np.where(choices < 0, 0, np.take_along_axis(scores, np.maximum(choices, 0), 1))
    some = kept.any(1)
    assert (choices < 0).any() and not some.all()
    np.testing.assert_allclose(weights[some], kept[some] / kept[some].sum(1, keepdims=True))
    assert not weights[~some].any() and (weights == replayed).all()


@pytest.mark.parametrize("dispatch", ["all_to_all", "per_rank", "gather"])
def test_in_jax_all_ranks_may_have_no_tokens(dispatch):
    import jax

    import tplab.jax as tj

    case = Case(Mesh(ep=2), dispatch, TIGHT)
    specs, state = specs_of(case), {name: value.astype(np.float32) for name, value in state_of(case).items()}
    layer = case.layer(tj)

    def program(state, x):
        gradient = jax.grad(lambda state: tj.all_reduce(layer(nested(state), x)[0].sum(), "ep"))(state)
        return layer(nested(state), x)[0], gradient

    x = np.zeros((0, WIDTH), np.float32)
    y, gradient = tj.run(program, case.mesh, state, x, in_specs=(specs, P("ep")), out_specs=(P("ep"), specs)).value
    assert y.shape == (0, WIDTH) and not any(np.any(value) for value in gradient.values())


def test_ranks_may_have_other_numbers_of_tokens_and_none():  # in JAX all ranks have one shape
    import tplab.torch as tt

    x = torch.tensor(numbers(5, WIDTH, seed=3))
    sizes = [3, 0, 2, 0]

    def program(dispatch, sizes):
        begin, count = sum(sizes[: tt.axis_index("ep")]), sizes[tt.axis_index("ep")]
        layer = tt.MixtureOfExperts(WIDTH, HIDDEN, DEEP, "ep", dispatch=dispatch).double()
        mine = x[begin : begin + count].clone().requires_grad_()
        y, _ = layer(mine)
        y.square().sum().backward()
        return y.detach(), mine.grad, layer.experts.up.grad

    want = tt.run(program, Mesh(ep=1), "gather", [5]).per_rank[0]
    for dispatch in ("all_to_all", "per_rank", "gather"):
        found = tt.run(program, Mesh(ep=4), dispatch, sizes).per_rank
        for got, whole in zip(map(torch.cat, zip(*found)), want):
            close(got, whole)


def test_experts_may_stay_unchosen(fw):
    """Their gradient is zero, and present."""
    case = Case(Mesh(ep=4), "all_to_all", ONE)
    state, x = state_of(case), np.abs(numbers(TOKENS, WIDTH))
    state["router.weight"] = np.zeros((8, WIDTH))
    state["router.weight"][5] = 1.0  # every token chooses expert 5
    with double(fw):
        got = sharded(fw, case, state, x, numbers(TOKENS, WIDTH)).value
        gradient = fw.numpy(got["gradient of experts.up"])
        assert np.abs(gradient[5]).max() > 0
        assert not np.delete(gradient, 5, 0).any()


def test_gradients_leave_during_the_backward_pass_too():
    """`data_parallel` knows that experts have copies along dp alone."""
    import tplab.torch as tt

    case = Case(Mesh(dp=2, ep=2), "per_rank", DEEP)
    state, x, c = state_of(case), numbers(TOKENS, WIDTH), numbers(TOKENS, WIDTH)
    specs = specs_of(case)

    def program(state, x, c):
        layer = case.layer(tt).double()
        layer.load_state_dict(state, strict=False)
        tt.data_parallel(layer, case.names)
        y, routed = layer(x)
        _loss(tt, y, routed, c, case).backward()
        return {name: p.grad for name, p in layer.named_parameters()}

    rows = P(case.names)
    args = {name: torch.tensor(value) for name, value in state.items()}, torch.tensor(x), torch.tensor(c)
    got = tt.run(program, case.mesh, *args, in_specs=(specs, rows, rows), out_specs=specs).value
    want = reference(state, x, c, case)
    for name in specs:
        close(got[name], want[f"gradient of {name}"], name)


@pytest.mark.parametrize("stage", ["shard_optimizer", "shard_gradients", "is_reduced"])
def test_zero_in_jax_shares_experts_among_the_ranks_that_hold_copies(stage):
    """Along dp=2; the rest is shared by all 4 ranks. A step of gradient descent takes the gradient off."""
    import jax
    import optax

    fw = FRAMEWORKS["jax"]()
    lab, case = fw.lab, Case(Mesh(ep=2, dp=2), "per_rank", DEEP)
    specs, state = specs_of(case), state_of(case)
    x, c = numbers(TOKENS, WIDTH), numbers(TOKENS, WIDTH, seed=4)
    widths = {}

    def program(state, x, c):
        layer, how = case.layer(lab), {"is_reduced": True} if stage == "is_reduced" else {}
        make = lab.shard_gradients if stage == "shard_gradients" else lab.shard_optimizer
        optimizer = make(optax.sgd(1.0, momentum=0.5), case.names, specs=specs, **how)
        states = optimizer.init(state)
        widths.update({name: trace.shape for name, trace in states["states"][0].trace.items()})

        def loss(state):
            y, routed = layer(nested(state), x)
            own = _loss(lab, y, routed, c, case)
            return lab.all_reduce(own, case.names, "mean") if how else own

        grads = (jax.grad(loss)(state),) if how else optimizer.value_and_grad(loss)(state)[1:]
        updates, _ = optimizer.update(grads[0], states, state)
        return updates

    rows = P(case.names)
    with double(fw):
        args = {name: fw.array(value) for name, value in state.items()}, fw.array(x), fw.array(c)
        got = lab.run(program, case.mesh, *args, in_specs=(specs, rows, rows), out_specs=specs).value
        want = reference(state, x, c, case)
        for name in specs:
            close(-fw.numpy(got[name]), want[f"gradient of {name}"], name)
            assert widths[name] == (state[name].size // 4,)  # of experts, two halves of a half


def test_the_bias_moves_choices_and_no_weights(fw):
    """Each expert's load comes nearer to the mean, and scores stay what they were."""
    rule = Routing(8, 2, score="sigmoid")
    x, weight = numbers(256, WIDTH), numbers(8, WIDTH, seed=1) / 2

    def program(x, weight, bias):
        router = fw.lab.Router(WIDTH, rule)
        if fw.name == "torch":
            router = router.double()
            router.weight.data, router.bias = weight, bias
            routed = router(x)
        else:
            routed = router({"weight": weight, "bias": bias}, x)
        counts = fw.lab.chosen_counts(routed, "dp")
        return counts, fw.lab.balanced_bias(bias, counts, 0.01), routed.scores

    with double(fw):
        bias, spread, first = np.zeros(8), [], None
        for _ in range(40):
            args = fw.array(x), fw.array(weight), fw.array(bias)
            out = fw.lab.run(program, Mesh(dp=2), *args, in_specs=(P("dp"), P(), P()), out_specs=(P(), P(), P("dp")))
            counts, bias, scores = map(fw.numpy, out.value)
            first = scores if first is None else first
            spread.append(counts.max() - counts.min())
        assert spread[-1] < spread[0] / 4
        assert (scores == first).all()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda lab: lab.ParallelExperts(4, 8, Routing(6, 2), "ep"), "experts is 6"),
        (lambda lab: lab.ParallelExperts(4, 8, Routing(8, 2), "ep", dispatch="ring"), "dispatch is 'ring'"),
        (lambda lab: lab.ParallelExperts(4, 8, Routing(8, 2), "ep", dispatch="two_levels"), "two levels are two axes"),
        (lambda lab: lab.ParallelExperts(4, 8, Routing(8, 2), "ep", activation="relu"), "activation is 'relu'"),
    ],
)
def test_layers_that_cannot_be_made(fw, make, words):
    def program():
        layer = make(fw.lab)
        if fw.name == "jax":
            import jax

            layer.init(jax.random.key(0))
        return fw.lab.axis_index("ep")

    with pytest.raises(ShapeError if "is 6" in words else Exception, match=words):
        fw.lab.run(program, Mesh(ep=4))


def test_pieces_that_do_not_fit_are_named():
    import tplab.torch as tt

    def program(sizes, received):
        return tt.all_to_all(torch.arange(4.0), "ep", sizes=sizes, received=received)

    for sizes, received, words in (
        ([1, 2], [1, 2], "add up to 3, and x has 4 rows"),
        ([1, 3, 0], [2, 2], "must be 2 numbers"),
        ([1, 3], None, "need sizes, the rows for each position, and received"),
        ([1, 3], [1, 2], r"rank 0 have sizes \[1, 2\], one for each rank, but the ranks send it \[1, 1\]"),
    ):
        with pytest.raises(Exception, match=words):
            tt.run(program, Mesh(ep=2), sizes, received)


def test_zero_refuses_experts_along_the_axis_that_cuts_them():
    import tplab.torch as tt

    def program(axis):
        tt.shard_parameters(tt.ParallelExperts(4, 8, Routing(8, 2), "ep"), axis)
        return 1

    assert tt.run(program, Mesh(dp=2, ep=2), "dp").per_rank == [1] * 4
    with pytest.raises(Exception, match="'gate' of ParallelExperts is cut along 'ep'"):
        tt.run(program, Mesh(dp=2, ep=2), ("dp", "ep"))


@pytest.mark.parametrize("dispatch", ["all_to_all", "per_rank", "gather"])
def test_meta_tensors_count_as_if_experts_were_chosen_equally_often(dispatch):
    """Bytes are those of a run that replays such choices, and so is the memory, up to the choices themselves."""
    import tplab.torch as tt

    def program(x):
        with x.device:
            layer = tt.MixtureOfExperts(64, 128, PLAIN, "ep", dispatch=dispatch)
        equal = (torch.arange(len(x))[:, None] + torch.arange(2) * 4) % 8
        y, routed = layer(x, None if x.is_meta else equal)
        (y.sum() + tt.balance_loss(routed)).backward()
        return y

    runs = [
        tt.run(program, Mesh(ep=4), torch.randn(256, 64), in_specs=P("ep"), device=device, count_memory=True)
        for device in ("cpu", "meta")
    ]
    for rank in range(4):
        real, meta = (run.trace.bytes_sent(rank=rank) for run in runs)
        assert real == meta > 0
        assert runs[0].memory[rank].peak == pytest.approx(runs[1].memory[rank].peak, rel=0.01)


@pytest.mark.parametrize("over, axes, words", [
    ("microbatch", {"axis": "ep"}, r"over each microbatch does not count the choices of all ranks along 'ep': leave"),
    ("sequence", {"axis": "ep", "sequence": 3}, r"over each sequence does not count .* give sequence_axis"),
    ("global", {}, "give axis, along which these are"),
    ("global", {"axis": "ep", "sequence_axis": "ep"}, "and no sequence_axis"),
])  # fmt: skip
def test_a_balance_loss_refuses_an_axis_that_its_name_denies(fw, over, axes, words):
    def program(x):
        chosen = x[:, :2].astype("int32") if fw.name == "jax" else x[:, :2].long()
        routed = fw.lab.Routed(chosen, x, x, x)
        return fw.lab.balance_loss(routed, over=over, **axes)

    with pytest.raises(Exception, match=words):
        fw.lab.run(program, Mesh(ep=2), fw.array(np.ones((6, 4))), in_specs=P("ep"))


def test_what_a_balance_loss_counts(fw):
    """Ranks with skewed choices of their own, which are balanced over both: only the microbatch's loss sees the skew.
    A sequence that both share counts as one."""
    rows = [[0.7, 0.1, 0.1, 0.1]] * 3 + [[0.1, 0.1, 0.1, 0.7]] * 3
    chosen = [[0, 1]] * 3 + [[2, 3]] * 3

    def program(scores, choices):
        routed = fw.lab.Routed(choices, scores, scores, scores)
        ways = {"over": "microbatch"}, {"over": "global", "axis": "ep"}, {"over": "microbatch", "sequence_axis": "ep"}
        return [fw.lab.all_reduce(fw.lab.balance_loss(routed, **way), "ep", "mean") for way in ways]

    with double(fw):
        given = fw.array(rows), fw.array(chosen)
        out = fw.lab.run(program, Mesh(ep=2), *given, in_specs=P("ep"), out_specs=P())
        own = 4 * (0.7 + 0.1) / 2
        assert [float(loss) for loss in out.value] == pytest.approx([own, 1.0, 1.0], rel=1e-12)
