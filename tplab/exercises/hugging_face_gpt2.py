"""The exercises of lab 09: repair a layer in someone else's sharded GPT-2, and write a plan for a Llama."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from html import escape
from types import FunctionType
from typing import Any

import numpy as np

from tplab.checking.report import ParallelReport
from tplab.exercises.check import MOST_WORK
from tplab.exercises.damage import Untouched
from tplab.exercises.trials import share_of_work
from tplab.exercises.verdict import Refused, Verdict, check, on, refuse, run_on
from tplab.mesh import Mesh
from tplab.sharding import P

MOST_RANKS = 4
MESHES = (Mesh(tp=2), Mesh(tp=MOST_RANKS), Mesh(tp=1))
VOCABULARY, SEQUENCE = 53, 8
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "max_position_embeddings": 16}
SIZES |= {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": None}


def small_gpt2(seed: int = 0) -> Any:
    """A GPT-2 of two layers, four heads, width 32; no dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SIZES))
    model.loss_type = "ForCausalLM"
    with torch.no_grad():
        for parameter in model.parameters():  # norms of ones and biases of zeros would hide mistakes
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) / 8)
    return model


def small_llama(seed: int = 0) -> Any:
    """A Llama of two layers, eight heads on four key-value heads, width 32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(intermediate_size=48, num_attention_heads=8, num_key_value_heads=4, **SIZES))


def _ids() -> Any:
    import torch

    return torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))


class Reported(Verdict):
    """A verdict with its full report, which a notebook shows folded below the text."""

    def __init__(self, passed: bool, text: str, report: ParallelReport):
        super().__init__(passed, text)
        self.report = report

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        lines = "".join(f"<p>{escape(line)}</p>" for line in self.text.splitlines())
        table = self.report._repr_html_().replace("<details open>", "<details>")
        return {"text/plain": self.text, "text/html": lines + table}


def _compare(mesh: Mesh, sharded: Callable[[Any], Any], model: Any) -> ParallelReport:
    """The report on a model that `sharded` shards; refuses one with a different tensor."""
    from tplab.torch import check_parallel

    with on(mesh):
        report = check_parallel(sharded, model, inputs=(_ids(),), kwargs={"labels": _ids()}, mesh=mesh)
    if not report.ok:
        first = report.wrong[0]  # the one that explains most of the others
        words = first.words.removeprefix("the first that is wrong: ")
        for known, way in KNOWN.items():
            if re.search(known, f"{first.title}: {words}"):
                words = f"{words.split('; cause not known')[0]}. {way}"
        text = (
            f": on {mesh}, {len(report.wrong)} of {len(report.rows)} tensors differ from the unsharded model's.\n"
            f"It begins with the {first.title}: {words}."
        )
        raise Refused(Reported(False, text, report))
    return report


KNOWN = {
    "^output of .*: its bias is not added": "Add it once, after the sum",
    "^gradient of .*bias: 1/. of the reference on every": "Does each rank add a share? Add all of it, after the sum",
    "^gradient of .*bias: . times the reference on every": "Is there a copy_to on the bias? Every rank adds it to the "
    "same sum, and so has all of its gradient",
    "^gradient of .*c_fc.*: off by .*cause not known": "Is there a copy_to on x? Ranks have different features of x, "
    "whose gradients are not added up",
}
"""Advice on mistakes that `check_parallel` finds, but does not explain."""


@check(takes=(type, FunctionType), how="Give the class itself.")
def check_row(layer: Callable[..., Any]) -> Verdict:
    """Check that `layer(given)` is the row-parallel form, over "tp", of a GPT-2's Conv1D `given`.

    It replaces mlp.c_proj in every block of a sharded GPT-2. check_parallel compares the result with the unsharded
    model, and each rank may hold only its share of the weight.
    """
    from tplab.torch import gpt2_plan, parallelize

    held: list[int] = []
    harm: list[str] = []

    def model(whole: Any) -> Any:
        given = [block.mlp.c_proj for block in whole.transformer.h]
        parallelize(whole, gpt2_plan(whole))
        for block, theirs in zip(whole.transformer.h, given):
            before = Untouched({"given.weight": theirs.weight, "given.bias": theirs.bias}, generators=False)
            block.mlp.c_proj = mine = layer(theirs)
            harm.append(before.damage())
            _refuse_other_parameters(mine, theirs)
            mine.register_forward_hook(_refuse_none)
            held.append(sum(parameter.numel() for parameter in block.mlp.c_proj.parameters()))
        return whole

    report = None
    for mesh in MESHES:
        held.clear()
        report = _compare(mesh, model, small_gpt2())
        if any(harm):
            refuse(f": the numbers are right, but {next(filter(None, harm))}")
        given = small_gpt2().transformer.h[0].mlp.c_proj
        share = given.weight.numel() // mesh.axis_size("tp") + given.bias.numel()
        if max(held) > share:
            refuse(
                f": the numbers are right, but on {mesh} a rank holds {max(held):,} parameters of this layer, where "
                f"{share:,} would do.\nIn a row-parallel layer, each rank holds its own rows of the weight."
            )
    assert report is not None
    if (share := _share_of_work(layer)) >= MOST_WORK:
        refuse(
            f": the numbers are right, but each of {MOST_RANKS} ranks does {share:.0%} of the whole layer's work.\n"
            "Multiply by the rank's own rows, and add up the results."
        )
    listed = ", ".join(map(str, MESHES))
    return Reported(
        True, f" is right: logits, loss and every gradient equal the unsharded model's on {listed}.", report
    )


def _refuse_other_parameters(mine: Any, given: Any) -> None:
    """Refuse a layer whose parameters cannot be compared with those of the given one."""
    rows, columns = given.weight.shape
    names = [name for name, _ in mine.named_parameters()]
    if set(names) != {"weight", "bias"}:
        refuse(
            f": its parameters are {' and '.join(names) or 'none'}. The check compares them with those of `given`: "
            "make self.weight and self.bias, each an nn.Parameter."
        )
    if (shape := list(mine.weight.shape))[-1] != columns:
        refuse(
            f": its weight has shape {shape} on this rank. Let each rank have rows of given.weight, which is "
            f"[{rows}, {columns}]. (The weight of nn.Linear is the transpose.)"
        )


def _refuse_none(layer: Any, args: Any, output: Any) -> None:
    if output is None:
        refuse(": its forward returned None; is a `return` missing?")


def _share_of_work(layer: Callable[..., Any]) -> float:
    """The FLOPs of the busiest rank in the layer's forward pass, relative to those of one rank alone."""
    given = small_gpt2().transformer.h[0].mlp.c_proj
    x = np.ones((2, SEQUENCE, given.weight.shape[0]), np.float32)
    specs = {"x": P(None, None, "tp")}
    return share_of_work("torch", lambda x: layer(deepcopy(given))(x), specs, {"x": x}, "tp", MOST_RANKS)


def check_llama_plan(plan: Callable[[], Mapping[str, Any] | None] | Mapping[str, Any]) -> Verdict:
    """Check that `plan()`, or `plan` itself, is a correct plan for `small_llama()`: with it, the model computes the
    same as before, and no matrix is whole on every rank."""
    name = getattr(plan, "__name__", "the plan")
    return check(name, ("llama_plan",), ("tplab",))(_planned)(plan if callable(plan) else lambda: plan)


def _planned(plan_of: Callable[[], Mapping[str, Any] | None]) -> Verdict:
    from tplab.torch import parallelize

    def sharded(whole: Any) -> Any:
        plan = plan_of()
        if not isinstance(plan, Mapping):
            raise TypeError(f"a plan is a dict from module names to what becomes of them, not {plan!r}")
        return parallelize(whole, plan)

    def sizes(model: Any) -> dict[str, int]:
        return {name: parameter.numel() for name, parameter in model.named_parameters()}

    report, here, model = None, {}, small_llama()
    for mesh in MESHES:
        report = _compare(mesh, sharded, small_llama())
        if mesh.size == MOST_RANKS:
            here = run_on(mesh, lambda whole: sizes(sharded(whole)), small_llama()).per_rank[0]
    whole = [key for key, given in model.named_parameters() if given.dim() > 1 and here.get(key) == given.numel()]
    percent = 100 * sum(here.values()) / sum(sizes(model).values())
    held = f"each of {MOST_RANKS} ranks holds {percent:.0f}% of the parameters"
    if whole:
        more = f", and {len(whole) - 1} more" if len(whole) > 1 else ""
        refuse(f" computes the right numbers, but {held}.\nEvery rank holds all of {whole[0]}{more}.")
    assert report is not None
    return Reported(True, f" is right on {', '.join(map(str, MESHES))}; {held}.", report)
