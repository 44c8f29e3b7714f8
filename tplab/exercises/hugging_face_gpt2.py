"""The exercises of lab 09: a layer of somebody else's sharded GPT-2 to repair, and a plan to write for a Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tplab.errors import PlanError, RankError
from tplab.exercises.check import Verdict, not_started, raised, untouched
from tplab.mesh import Mesh

MESHES = (Mesh(tp=2), Mesh(tp=4), Mesh(tp=1))
VOCABULARY, SEQUENCE = 53, 8


def small_gpt2(seed: int = 0) -> Any:
    """A GPT-2 of two layers, four heads, width 32; no dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=32, n_head=4, n_positions=16, vocab_size=VOCABULARY, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=None,
        )
    )  # fmt: skip
    model.loss_type = "ForCausalLM"
    return model


def small_llama(seed: int = 0) -> Any:
    """A Llama of two layers, eight heads on four key-value heads, width 32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=8, num_key_value_heads=4,
            vocab_size=VOCABULARY, max_position_embeddings=16, bos_token_id=0, eos_token_id=None,
        )
    )  # fmt: skip


def _ids() -> Any:
    import torch

    return torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))


def check_row(layer: Callable[..., Any]) -> Verdict:
    """Whether `layer(given, axis)` is the row-parallel form of a GPT-2's Conv1D `given`: in every block of a sharded
    GPT-2 it takes the place of mlp.c_proj, and check_parallel holds that against the whole model."""
    from tplab.torch import check_parallel, gpt2_plan, parallelize

    def model(whole: Any) -> Any:
        given = [block.mlp.c_proj for block in whole.transformer.h]
        parallelize(whole, gpt2_plan(whole))
        for block, theirs in zip(whole.transformer.h, given):
            block.mlp.c_proj = layer(theirs, "tp")
        return whole

    for mesh in MESHES:
        try:
            report = check_parallel(model, small_gpt2(), inputs=(_ids(),), kwargs={"labels": _ids()}, mesh=mesh)
        except Exception as error:
            return Verdict(False, raised(error, layer.__init__, "Row", mesh))
        if not report.ok:
            inside = [row for row in report.wrong if row.kind == "activation"]
            first = inside[0] if inside else report.wrong[0]
            text = f"Row: of {len(report.rows)} tensors, {len(report.wrong)} are not the whole model's on {mesh}."
            return Verdict(False, f"{text}\n{first.title}: {first.words if inside else 'wrong'}.")
    listed = ", ".join(map(str, MESHES))
    return Verdict(True, f"Row is right: logits, loss and every gradient are the whole model's on {listed}.")


def check_llama_plan(plan_of: Callable[[], Mapping[str, Any] | None]) -> Verdict:
    """Whether `plan_of()` is a plan for `small_llama()` by which it computes what it did, and of which nothing large is
    left whole."""
    from tplab.torch import check_parallel, parallelize, run

    name = "my_plan"
    if not_started(plan_of):
        return untouched(name)

    def sharded(whole: Any) -> Any:
        plan = plan_of()
        if not isinstance(plan, Mapping):
            raise TypeError(f"a plan is a dict, module name -> what becomes of it; it returned {plan!r}")
        return parallelize(whole, plan)

    def size(model: Any) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    share = 1.0
    for mesh in MESHES:
        model = small_llama()
        try:
            report = check_parallel(sharded, model, inputs=(_ids(),), kwargs={"labels": _ids()}, mesh=mesh)
            here = run(lambda whole: size(sharded(whole)), mesh, model).per_rank[0]
        except Exception as error:
            cause = error.__cause__ if isinstance(error, RankError) and error.__cause__ else error
            if isinstance(cause, PlanError):
                return Verdict(False, f"{name}, on {mesh}: {cause}")
            return Verdict(False, raised(error, plan_of, name, mesh))
        if not report.ok:
            first = next((row for row in report.wrong if row.kind == "activation"), report.wrong[0])
            text = f"{name}: on {mesh} {len(report.wrong)} of {len(report.rows)} tensors are not the whole model's."
            return Verdict(False, f"{text}\n{first.title} is the first.")
        share = min(share, here / size(model))
    if share > 0.3:  # on four ranks
        return Verdict(
            False,
            f"{name} computes what it should, and each of four ranks holds {100 * share:.0f} % of the parameters: "
            "what is left whole?",
        )
    listed = ", ".join(map(str, MESHES))
    held = f"each of four ranks holds {100 * share:.0f} % of the parameters"
    return Verdict(True, f"{name} is right on {listed}; {held}.")
