"""A mixture of experts on ranks against one device: outputs, every gradient, parameters after three steps of AdamW.

The oracle computes token by token: no table, no buffer, no sort.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.frameworks import FRAMEWORKS, Framework
from tests.sharded import close, double, flat, nested, numbers
from tplab import Mesh, P
from tplab.experts import Routing

WIDTH, HIDDEN, SHARED, TOKENS = 6, 8, 4, 24
EVERYTHING = ("node", "dp", "ep", "etp")  # all ranks have tokens of their own
STEPS, MOST = 3, 0.5


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


# --- the oracle -------------------------------------------------------------------------------------------------------


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
        of_chosen = [scores[token, e] if e >= 0 else scores[token, 0] for e in experts]
        total = sum(of_chosen) if rule.normalized else 1
        y = mlp(state["shared.up"], state["shared.down"], state.get("shared.gate"), x[token], case.activation)
        for expert, score in zip(experts, of_chosen):
            if expert >= 0:
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


def reference(state: Mapping[str, np.ndarray], x: np.ndarray, c: np.ndarray, case: Case) -> dict[str, Any]:
    """y, dx and all gradients of the first step, and the parameters after three."""
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in state.items()}
    optimizer = torch.optim.AdamW(tensors.values(), lr=1e-2)
    first: dict[str, Any] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.tensor(x, requires_grad=True)
        loss, y = whole(tensors, inputs, torch.tensor(c), case)
        loss.backward()
        if step == 0:
            first = {"y": y, "dx": inputs.grad} | {f"gradient of {n}": t.grad.clone() for n, t in tensors.items()}
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
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs = x.clone().requires_grad_()
            y, routed = layer(inputs)
            _loss(lab, y, routed, c, case).backward()
            lab.average_gradients(layer, case.names, bucket_bytes=None if step else 1e3)
            if step == 0:
                first = {"y": y.detach(), "dx": inputs.grad / case.mesh.size}
                first |= {f"gradient of {n}": p.grad.clone() for n, p in layer.named_parameters()}
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
        moments, first = optimizer.init(state), {}
        for step in range(STEPS):
            (_, y), (grads, dx) = jax.value_and_grad(loss, (0, 1), has_aux=True)(state, x)
            if step == 0:
                first = {"y": y, "dx": dx} | {f"gradient of {n}": g for n, g in grads.items()}
            grads, _ = lab.clip_gradients(grads, MOST, dict(specs))
            updates, moments = optimizer.update(grads, moments, state)
            state = optax.apply_updates(state, updates)
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.mesh}-{case.dispatch}")
def test_ranks_train_what_one_device_trains(fw, case):
    state, x, c = state_of(case), numbers(TOKENS, WIDTH, seed=3), numbers(TOKENS, WIDTH, seed=4)
    with double(fw):
        got, want = sharded(fw, case, state, x, c).value, reference(state, x, c, case)
        assert got.keys() == want.keys()
        largest = max(np.abs(value).max() for name, value in want.items() if name.startswith("gradient"))
        for name, value in want.items():
            close(fw.numpy(got[name]), value, name, cancelled=largest)
