"""A transformers GPT-2, Llama and its like, sharded: equal to the unsharded ones; wrong plans refused; what is sent."""

import copy
import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # every model is made from a config

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.sharded import close
from tplab import Mesh, P
from tplab.errors import PlanError
from tplab.layout import take
from tplab.torch import (
    FusedColumn,
    check_parallel,
    gpt2_plan,
    gradient_norm,
    llama_plan,
    parallelize,
    run,
    vocab_parallel_cross_entropy,
    whole_state,
)

transformers = pytest.importorskip("transformers", reason="the extra `huggingface` is not installed")

VOCABULARY, BATCH, SEQUENCE = 53, 2, 8
MESHES = [Mesh(tp=1), Mesh(tp=2), Mesh(tp=3), Mesh(tp=4)]


def loss_in_float64(logits, labels, vocab_size, **_):
    """transformers' own rounds logits to float32."""
    return F.cross_entropy(logits.flatten(0, 1), F.pad(labels, (0, 1), value=-100)[:, 1:].flatten())


class Norm(nn.Module):
    """Llama's norm without its rounding to float32."""

    def __init__(self, given):
        super().__init__()
        self.weight, self.eps = given.weight, given.variance_epsilon

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Angles(nn.Module):
    """Llama's cosines and sines without its rounding to float32, in which a GPU's differ from the CPU's."""

    def __init__(self, given):
        super().__init__()
        self.register_buffer("frequencies", given.inv_freq, persistent=False)

    def forward(self, x, position_ids):
        angles = (position_ids[..., None] * self.frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


class Router(nn.Module):
    """The routers of Mixtral, Qwen3-MoE and DeepSeek-V3 without their rounding to float32."""

    def __init__(self, given):
        super().__init__()
        self.weight, self.top_k, self.is_normalized = given.weight, given.top_k, getattr(given, "norm_topk_prob", True)
        self.groups, self.top_groups = getattr(given, "num_group", 1), getattr(given, "topk_group", 1)
        self.scale, self.is_sigmoid = getattr(given, "routed_scaling_factor", 1), hasattr(given, "num_group")
        self.register_buffer("bias", getattr(given, "e_score_correction_bias", torch.zeros(len(given.weight))))

    def forward(self, x):
        logits = x.flatten(0, -2) @ self.weight.T
        scores = logits.sigmoid() if self.is_sigmoid else logits.softmax(-1)
        grouped = (scores + self.bias).unflatten(-1, (self.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1).topk(self.top_groups).indices
        is_open = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
        chosen = grouped.masked_fill(~is_open[..., None], -torch.inf).flatten(1).topk(self.top_k).indices
        weights = scores.gather(1, chosen)
        if self.is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * self.scale, chosen


REPLACED = {"RMSNorm": Norm, "RotaryEmbedding": Angles, "TopKRouter": Router, "TopkRouter": Router}


def exact(model):
    """The model in float64 throughout, every parameter far from where it starts."""
    generator = torch.Generator().manual_seed(0)
    for name, module in list(model.named_modules()):
        for ending, made in REPLACED.items():
            if type(module).__name__.endswith(ending):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, made(module))
    model.double().loss_function = loss_in_float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def gpt2(heads=12, dropout=0.0, attention="sdpa", vocabulary=VOCABULARY, **options):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=2 * heads,
        n_head=heads,
        n_positions=16,
        vocab_size=vocabulary,
        attn_implementation=attention,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=options.pop("attn_pdrop", dropout),
        bos_token_id=0,
        eos_token_id=None,
        **options,
    )
    return exact(transformers.GPT2LMHeadModel(config))


def llama(family="Llama", heads=12, kv_heads=12, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=2 * heads,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=heads,
        head_dim=2,
        num_key_value_heads=kv_heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=options.pop("pad_token_id", None),
        attn_implementation=options.pop("attention", "sdpa"),
        **options,
    )
    config._experts_implementation = "eager"  # the others have no float64
    return exact(getattr(transformers, f"{family}ForCausalLM")(config))


IDS = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, SEQUENCE)))

QWEN_EXPERTS = {
    "num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 10, "mlp_only_layers": [0],
    "norm_topk_prob": False,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "q_lora_rank": 10, "kv_lora_rank": 8, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4,
}  # fmt: skip

MODELS = {
    "gpt2, sdpa": (gpt2, gpt2_plan),
    "gpt2, eager": (lambda: gpt2(attention="eager"), gpt2_plan),
    "llama": (llama, llama_plan),
    "llama, grouped, tied": (lambda: llama(kv_heads=4, heads=8, tie_word_embeddings=True), llama_plan),
    "llama, with padding": (lambda: llama(pad_token_id=int(IDS[0, 0])), llama_plan),
    "mistral": (lambda: llama("Mistral"), llama_plan),
    "qwen2, with biases": (lambda: llama("Qwen2"), llama_plan),
    "qwen3, norms of heads": (lambda: llama("Qwen3"), llama_plan),
    "mixtral": (lambda: llama("Mixtral", num_local_experts=12, num_experts_per_tok=3), llama_plan),
    "qwen3, experts in one layer": (lambda: llama("Qwen3Moe", **QWEN_EXPERTS), llama_plan),
    "deepseek-v3": (lambda: llama("DeepseekV3", **DEEPSEEK), llama_plan),
}


def step_of(model, ids, optimizer=None):
    if optimizer is not None:
        optimizer.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    if optimizer is not None:
        optimizer.step()
    return out


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # a large eps: no step of rounding alone


# --- equal to the unsharded model -------------------------------------------------------------------------------------


CASES = [
    *(("gpt2, sdpa", mesh, gather) for mesh in MESHES for gather in (True, False)),
    *(("llama", mesh, True) for mesh in MESHES),
    ("gpt2, eager", Mesh(tp=3), False),
    ("llama, grouped, tied", Mesh(tp=2), True),
    ("llama, grouped, tied", Mesh(tp=4), False),
    ("llama, with padding", Mesh(tp=3), True),
    ("mistral", Mesh(tp=2), False),
    ("qwen2, with biases", Mesh(tp=3), True),
    ("qwen3, norms of heads", Mesh(tp=4), True),
    *(("mixtral", mesh, True) for mesh in MESHES),
    ("qwen3, experts in one layer", Mesh(tp=2), False),
    ("qwen3, experts in one layer", Mesh(tp=4), True),
    ("deepseek-v3", Mesh(tp=2), True),
    ("deepseek-v3", Mesh(tp=3), False),
]


@pytest.mark.parametrize("name, mesh, gather_logits", CASES, ids=str)
def test_logits_loss_gradients_and_three_steps_are_those_of_the_unsharded_model(name, mesh, gather_logits):
    make, plan_of = MODELS[name]
    model = make()
    whole = copy.deepcopy(model)
    want = step_of(whole, IDS)
    want_grads = {n: p.grad.clone() for n, p in whole.named_parameters()}
    optimizer = adamw(whole)
    for _ in range(3):
        step_of(whole, IDS, optimizer)

    def program(model, ids):
        parallelize(model, plan_of(model), gather_logits=gather_logits)
        out = step_of(model, ids)
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer = adamw(model)
        for _ in range(3):
            step_of(model, ids, optimizer)
        layouts = {
            f"{n}.{p}": layout
            for n, m in model.named_modules()
            if hasattr(m, "layouts")
            for p, layout in m.layouts().items()
        }
        return out.logits, out.loss, grads, dict(model.named_parameters()), layouts

    ranks = run(program, mesh, model, IDS).per_rank
    logits = ranks[0][0] if gather_logits else torch.cat([logits for logits, *_ in ranks], -1)
    close(logits, want.logits.detach(), "logits")
    for rank, (_, loss, grads, parameters, layouts) in enumerate(ranks):
        close(loss, want.loss.detach(), "loss")
        assert grads.keys() == want_grads.keys()
        largest = max(float(g.abs().max()) for g in want_grads.values())
        for n, g in want_grads.items():

            def piece(x, n=n, rank=rank, layouts=layouts):
                return take(x, layouts[n], mesh, rank) if n in layouts else x

            if g.abs().max() > 1e-13 * largest:  # softmax does not see key's bias
                error = (grads[n] - piece(g)).abs().max() if grads[n].numel() else 0
                assert error <= 1e-12 * g.abs().max(), f"{n} on rank {rank}: {error}"
            error = (parameters[n] - piece(dict(whole.named_parameters())[n])).detach().abs()
            assert error.max() <= 1e-11, f"{n} after three steps: {error.max()}"  # of numbers about 1


@pytest.mark.parametrize("name", ["gpt2, sdpa", "llama, grouped, tied", "qwen3, norms of heads", "mixtral"])
def test_check_parallel_passes_it_and_knows_its_layouts(name):
    make, plan_of = MODELS[name]

    model = lambda whole: parallelize(whole, plan_of(whole))  # noqa: E731
    report = check_parallel(model, make(), inputs=(IDS,), kwargs={"labels": IDS}, mesh=Mesh(tp=4))
    assert report.ok, report
    if "gpt2" in name:
        assert report.of("transformer.h.0.attn.c_attn.weight").layout == "P(None, 'tp') in 3 parts"
        assert report.of("lm_head.weight").layout == "P('tp')"


def test_the_models_own_loss_in_float32():
    """transformers' loss as it is, which works in float32: sharded, it is the same up to rounding."""
    model = gpt2().float()
    del model._loss_function

    def program(model, ids, gather):
        parallelize(model, gpt2_plan(model), gather_logits=gather)
        return model(ids, labels=ids, num_items_in_batch=10).loss, model(ids, labels=ids).loss

    want = model(IDS, labels=IDS, num_items_in_batch=10).loss.detach(), model(IDS, labels=IDS).loss.detach()
    for gather in (True, False):
        for ranks in run(program, Mesh(tp=4), model, IDS, gather).per_rank:
            for got, wanted in zip(ranks, want):
                close(got, wanted, tolerance=1e-5)  # float32: sums of 53 exponentials and 16 tokens, behind two layers


def test_a_vocabulary_of_50257_over_4_ranks():
    model = gpt2(heads=4, vocabulary=50257)
    ids = torch.tensor([[0, 12564, 12565, 25130, 37695, 50256]])
    whole = copy.deepcopy(model)
    want = step_of(whole, ids)

    def program(model, ids):
        parallelize(model, gpt2_plan(model), gather_logits=False)
        out = step_of(model, ids)
        assert model.lm_head.weight is model.transformer.wte.weight
        return out.loss, model.lm_head.weight.grad, out.logits.shape[-1]

    ranks = run(program, Mesh(tp=4), model, ids).per_rank
    assert [count for *_, count in ranks] == [12565, 12565, 12565, 12562]
    close(ranks[3][0], want.loss.detach(), "loss")
    close(torch.cat([gradient for _, gradient, _ in ranks]), whole.lm_head.weight.grad, "tied gradient")


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_outside_of_the_attention_is_the_same_on_any_mesh():
    def program(model, ids):
        return step_of(parallelize(model, gpt2_plan(model)).train(), ids).logits

    model = gpt2(dropout=0.3, attn_pdrop=0.0)
    alone = run(program, Mesh(tp=1), model, IDS, seed=5).per_rank[0]
    for mesh in MESHES[1:]:
        for logits in run(program, mesh, model, IDS, seed=5).per_rank:
            close(logits, alone, "logits with dropout")
    assert not torch.equal(alone, run(program, Mesh(tp=1), model, IDS, seed=6).per_rank[0])


@pytest.mark.parametrize("family", ["SeedOss", "DeepseekV3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_functions_drop_outside_of_parallel_regions_is_the_same_on_any_mesh(family, attention):
    """SeedOss drops of the residual stream; the latent attention of DeepSeek is the same on all ranks."""
    options = {"SeedOss": {"residual_dropout": 0.3}, "DeepseekV3": {**DEEPSEEK, "attention_dropout": 0.3}}[family]
    model = llama(family, attention=attention, **{"attention_dropout": 0.0, **options})

    def program(model, ids):
        parallelize(model, llama_plan(model)).train()
        return model(ids, output_hidden_states=True).hidden_states[-1]

    alone = run(program, Mesh(tp=1), model, IDS, seed=5).per_rank[0]
    for mesh in MESHES[1:]:
        for hidden in run(program, mesh, model, IDS, seed=5).per_rank:
            close(hidden, alone, "hidden states with dropout")
    assert not torch.equal(alone, run(program, Mesh(tp=1), model, IDS, seed=6).per_rank[0])


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_a_checkpoint_drops_the_same_again():
    model = llama("SeedOss", residual_dropout=0.3, attention_dropout=0.2)

    def program(model, ids, is_checkpointed):
        parallelize(model, llama_plan(model)).train()
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        return [p.grad for p in model.parameters()]

    plain, again = (run(program, Mesh(tp=2), model, IDS, one).per_rank for one in (False, True))
    for one, other in zip(plain, again):
        for a, b in zip(one, other):
            close(b, a, "gradient")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_masks_agree_outside_and_differ_inside(attention):
    model, options = gpt2(dropout=0.3, attention=attention), {"inputs": (IDS,), "kwargs": {"labels": IDS}}
    right = lambda whole: parallelize(whole, gpt2_plan(whole)).train()  # noqa: E731
    report = check_parallel(right, model, **options, mesh=Mesh(tp=4))
    assert report.ok, report
    assert (
        sum(row.kind == "dropout" for row in report.rows) == 1 + 2 * 3
    )  # of the embedding; attention, and after it, MLP

    differing = lambda whole: parallelize(whole, gpt2_plan(whole), data_axis="tp").train()  # noqa: E731
    wrong = check_parallel(differing, model, **options, mesh=Mesh(tp=2)).wrong
    assert wrong[0].name == "transformer.drop" and "different dropout" in wrong[0].words


def test_data_parallel_ranks_drop_other_elements():
    def program(model, ids):
        model = parallelize(model, gpt2_plan(model), data_axis="dp").train()
        return model(ids).logits

    model = gpt2(dropout=0.3, attn_pdrop=0.0)
    a, b, c, d = run(program, Mesh(dp=2, tp=2), model, IDS).per_rank
    assert torch.equal(a, b) and torch.equal(c, d) and not torch.equal(a, c)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_in_eval_mode_stays_so_and_drops_nothing(attention):
    """Each module keeps its own mode: here the first block alone trains, as in fine-tuning with frozen blocks."""
    model = gpt2(dropout=0.3, attention=attention).eval()
    want = model(IDS).logits.detach()

    def program(model, ids):
        parallelize(model, gpt2_plan(model))
        return model(ids).logits, {name: module.training for name, module in model.named_modules()}

    for logits, training in run(program, Mesh(tp=2), model, IDS).per_rank:
        close(logits, want, "logits")
        assert not any(training.values())
    model.transformer.h[0].train()
    modes = {name: module.training for name, module in model.named_modules()}
    assert run(program, Mesh(tp=2), model, IDS).per_rank[0][1] == modes


# --- generation, and where it runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, gather_logits", [("gpt2, sdpa", True), ("gpt2, eager", False), ("llama, grouped, tied", False)]
)
def test_greedy_generation_with_a_cache_gives_the_same_tokens(name, gather_logits):
    make, plan_of = MODELS[name]
    model = make().eval()
    prompt, how = IDS[:, :3], {"max_new_tokens": 10, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    want = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)

    def program(model, prompt):
        parallelize(model, plan_of(model), gather_logits=gather_logits)
        cache = model(prompt, use_cache=True).past_key_values
        assert cache.get_seq_length() == 3
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)

    for mesh in (Mesh(tp=1), Mesh(tp=2), Mesh(tp=4)):  # 8 or 12 heads
        for tokens in run(program, mesh, model, prompt).per_rank:
            assert torch.equal(tokens, want)


def test_ranks_do_not_share_what_transformers_keeps():
    """Hidden states and attentions are collected while ranks take turns: each gets its own."""
    model = gpt2(attention="eager")
    want = model(IDS, output_hidden_states=True, output_attentions=True)

    def program(model, ids):
        out = parallelize(model, gpt2_plan(model))(ids, output_hidden_states=True, output_attentions=True)
        return tuple(out.hidden_states), tuple(out.attentions)

    ranks = run(program, Mesh(tp=4), model, IDS).per_rank
    for hidden, _ in ranks:
        for got, wanted in zip(hidden, want.hidden_states, strict=True):
            close(got, wanted.detach(), "hidden state")
    for layer, wanted in enumerate(want.attentions):
        close(torch.cat([attentions[layer] for _, attentions in ranks], 1), wanted.detach(), "attentions")


@pytest.mark.timeout(240)
def test_on_processes():
    def program(model, ids):
        parallelize(model, gpt2_plan(model), gather_logits=False)
        out = step_of(model, ids)
        return (
            out.loss,
            model.transformer.wpe.weight.grad,
            model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0),
        )

    model = gpt2()
    processes = run(program, Mesh(tp=2), model, IDS, on="processes").per_rank
    for got, wanted in zip(processes, run(program, Mesh(tp=2), model, IDS).per_rank, strict=True):
        for one, other in zip(got, wanted):
            close(one, other)


def test_a_sharded_model_can_be_copied_and_checkpointed():
    model = gpt2()
    whole = copy.deepcopy(model)
    step_of(whole, IDS)

    def program(model: Any, ids):
        model = copy.deepcopy(parallelize(model, gpt2_plan(model))).train()
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        step_of(model, ids)
        return model.transformer.wpe.weight.grad

    for gradient in run(program, Mesh(tp=2), model, IDS).per_rank:
        close(gradient, whole.transformer.wpe.weight.grad)


@pytest.mark.parametrize("make, plan_of", [(gpt2, gpt2_plan), (llama, llama_plan)], ids=["gpt2", "llama"])
def test_the_norm_of_its_gradients_is_the_unsharded_models(make, plan_of):
    """A tied head, fused columns, and copies of the model, of which each rank has its pieces."""
    whole = make()
    want = torch.cat([p.detach().reshape(-1) for p in whole.parameters()]).norm()

    def program(model: Any):
        model = copy.deepcopy(parallelize(model, plan_of(model)))
        for p in model.parameters():
            p.grad = p.detach().clone()
        return gradient_norm(model)

    for norm in run(program, Mesh(tp=2), whole).per_rank:
        close(norm, want)


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make, plan_of", [(gpt2, gpt2_plan), (llama, llama_plan)], ids=["gpt2", "llama"])
@pytest.mark.parametrize("gather_logits", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_training_step_sends_four_a_layer_and_those_of_the_words(make, plan_of, num_ranks, gather_logits):
    model = make()
    layers, width = model.config.num_hidden_layers, model.config.hidden_size

    def program(model, ids):
        step_of(parallelize(model, plan_of(model), gather_logits=gather_logits), ids)

    trace = run(program, Mesh(tp=num_ranks), model, IDS).trace
    tokens = BATCH * SEQUENCE
    activations = 8 * tokens * width
    ring = 2 * (num_ranks - 1) / num_ranks
    per_layer, words = 4 * layers * ring * activations, 2 * ring * activations  # the embedding, and back from the head
    if gather_logits:
        most = -(-VOCABULARY // num_ranks)
        pieces = [min(most, VOCABULARY - most * rank) for rank in range(num_ranks)]
        loss, loss_calls = 8 * tokens * (VOCABULARY - pieces[1]), 1  # around the ring all pieces but the next rank's
    else:
        loss, loss_calls = ring * 8 * tokens * (1 + 2), 2
    assert trace.bytes_sent(0) == pytest.approx(per_layer + words + loss, abs=4)
    assert len(trace.select(rank=0, kind="collective")) == 4 * layers + 2 + loss_calls
    assert len(trace.select(rank=0, kind="collective", op="all_reduce")) == 4 * layers + 2 + (0 if gather_logits else 2)


def test_parameters_are_shared_out():
    def program(model):
        return sum(p.numel() for p in parallelize(model, gpt2_plan(model)).parameters())

    model = gpt2(vocabulary=52)
    copies = sum(p.numel() for n, p in model.named_parameters() if "ln_" in n or "wpe" in n or "c_proj.bias" in n)
    total = sum(p.numel() for p in model.parameters())
    assert run(program, Mesh(tp=4), model).per_rank == [copies + (total - copies) // 4] * 4


@pytest.mark.parametrize("name", ["gpt2, sdpa", "llama, grouped, tied"])
def test_the_whole_state_comes_back_bit_for_bit(name):
    make, plan_of = MODELS[name]
    model = make()

    def program(model):
        return whole_state(parallelize(model, plan_of(model)))

    for state in run(program, Mesh(dp=2, tp=4), model).per_rank:
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(value, state[n]) for n, value in model.state_dict().items())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_whole_state_is_a_snapshot(num_ranks):
    """Of every parameter, sharded or held by all: what an optimizer writes afterwards is not in it."""
    model = llama("Qwen3")

    def program(model):
        before = whole_state(parallelize(model, llama_plan(model)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return before

    for state in run(program, Mesh(tp=num_ranks), model).per_rank:
        assert all(torch.equal(value, state[n]) for n, value in model.state_dict().items())


# --- a plan that cannot be right is refused ---------------------------------------------------------------------------

BLOCK = "transformer.h.*."
REFUSED = {
    "a name that matches nothing": (
        {f"{BLOCK}attn.c_atn": "column"}, r"matches no module .*'transformer\.h\.\*\.attn\.c_attn'",
    ),
    "a parameter": ({f"{BLOCK}mlp.c_proj.bias": "column"}, "names a parameter.*added once, after the sum"),
    "an unknown kind": ({"transformer.wpe": "rows"}, "planned as 'rows'; it must be one of 'column', 'row'"),
    "a column without a row": (
        {f"{BLOCK}mlp.c_proj": "replicate"}, "c_fc are split.*c_proj, which takes them, is 'replicate'",
    ),
    "a row without a column": ({f"{BLOCK}mlp.c_fc": "replicate"}, "a row takes some of the features on each rank"),
    "a fused weight in one piece": (
        {f"{BLOCK}attn.c_attn": "column"}, r"query, key and value side by side: plan it as FusedColumn\(3\)",
    ),
    "parts that do not add up": ({f"{BLOCK}attn.c_attn": FusedColumn((24, 24))}, r"parts \(24, 24\) have 48"),
    "tied and planned in two ways": ({"lm_head": "replicate"}, "have one weight.*'vocab' and as 'replicate'"),
    "words of a norm": ({"transformer.ln_f": "vocab"}, "for an nn.Embedding or a head .* it is LayerNorm"),
    "columns of an embedding": ({"transformer.wpe": "column"}, "for a linear layer; it is Embedding"),
    "no parts": ({f"{BLOCK}attn.c_attn": FusedColumn(0)}, r"FusedColumn\(parts=0\) has no such parts"),
    "a part below nothing": ({f"{BLOCK}attn.c_attn": FusedColumn((96, -24))}, "has no such parts: give how many"),
    "a list as kind": ({"transformer.wpe": ["row"]}, r"planned as \['row'\]; it must be one of"),
    "query, key and value of other sizes": (
        {f"{BLOCK}attn.c_attn": FusedColumn((24, 12, 36))}, "c_attn gives 3 parts of 24, 12, 36 features.* takes 24",
    ),
    "the query last": (
        {f"{BLOCK}attn.c_attn": FusedColumn((12, 36, 24))}, "c_attn gives 3 parts of 12, 36, 24 features.* takes 24",
    ),
    "another mask on each rank where all hold the same": (
        {"transformer.drop": "local"}, "transformer.drop is planned as 'local', but there are no columns around it",
    ),
}  # fmt: skip


def test_a_parameter_of_the_model_itself_is_in_no_module_that_a_plan_could_name():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.up, self.down = nn.Parameter(torch.ones(4)), nn.Linear(4, 8), nn.Linear(8, 4)

    plan = {"scale": "column", "up": "column", "down": "row"}
    with pytest.raises(PlanError, match="'scale' matches no module of Scaled; similar names are 'up', 'down'"):
        run(lambda: parallelize(Scaled(), plan), Mesh(tp=2))


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_plan_is_refused_with_the_reason(what):
    change, reason = REFUSED[what]

    def program(model):
        parallelize(model, {**gpt2_plan(model), **change})

    with pytest.raises(PlanError, match=f"(?s){reason}"):
        run(program, Mesh(tp=2), gpt2())


MLP, ATTENTION = "model.layers.*.mlp.", "model.layers.*.self_attn."


@pytest.mark.parametrize(
    "change",
    [
        {f"{MLP}up_proj": FusedColumn(2)},
        {f"{MLP}gate_proj": FusedColumn(2)},
        {f"{MLP}up_proj": FusedColumn((12, 24))},
        {f"{MLP}gate_proj": FusedColumn(2), f"{MLP}up_proj": FusedColumn(2)},
        {f"{ATTENTION}q_proj": FusedColumn(2)},
        {f"{ATTENTION}k_proj": FusedColumn(2)},
        {f"{ATTENTION}v_proj": FusedColumn(4)},
        {f"{ATTENTION}{name}_proj": FusedColumn(2) for name in "kv"},
        {f"{ATTENTION}{name}_proj": FusedColumn(2) for name in "qkv"},
    ],
    ids=lambda change: ", ".join(f"{name.rpartition('.')[2]} {kind.parts}" for name, kind in change.items()),
)
@pytest.mark.parametrize("kv_heads", [12, 4])
def test_layers_whose_outputs_meet_must_be_cut_alike(change, kv_heads):
    """Up in two halves and gate in one piece would multiply features of different numbers."""

    def program(model):
        parallelize(model, {**llama_plan(model), **change})

    with pytest.raises(PlanError, match=r"gives [24] parts of .* must be cut alike, in parts of (24|36) features"):
        run(program, Mesh(tp=2), llama(kv_heads=kv_heads))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_part_is_a_column(num_ranks):
    def program(model, ids):
        one = {f"{MLP}up_proj": FusedColumn(1), f"{ATTENTION}k_proj": FusedColumn((8,))}
        return parallelize(model, {**llama_plan(model), **one})(ids).logits

    model = llama(kv_heads=4)
    for logits in run(program, Mesh(tp=num_ranks), model, IDS).per_rank:
        close(logits, model(IDS).logits.detach(), "logits")


class Fused(nn.Module):
    """An attention of 6 query heads and 2 key and value heads in one weight, in this order."""

    def __init__(self, scale=None, core=None):
        super().__init__()
        self.head_dim, self.num_heads = 2, 6
        self.qkv, self.out = nn.Linear(12, 20), nn.Linear(12, 12)
        self.scale, self.core = None if scale is None else nn.Parameter(torch.ones(scale)), core

    def forward(self, x):
        width = self.num_heads * self.head_dim
        kv = (self.qkv(x).shape[-1] - width) // 2
        parts = self.qkv(x).split([width, kv, kv], -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def test_grouped_heads_in_one_weight():
    plan, model, x = {"qkv": FusedColumn((12, 4, 4)), "out": "row"}, Fused(), torch.randn(2, 3, 12)
    for y in run(lambda m: parallelize(m, plan)(x), Mesh(tp=2), model).per_rank:
        close(y, model(x).detach(), tolerance=1e-5)  # float32
    with pytest.raises(PlanError, match="qkv gives 3 parts of 4, 4, 12 features, and out takes 12"):
        run(lambda m: parallelize(m, {**plan, "qkv": FusedColumn((4, 4, 12))}), Mesh(tp=2), model)


@pytest.mark.parametrize(
    "model, name",
    [(Fused(()), ""), (Fused(1), ""), (Fused(2), ""), (Fused(core=nn.Sequential(nn.LayerNorm(2))), "core.0")],
    ids=["a number", "one number", "one head", "a norm deeper in it"],
)
def test_a_weight_among_sharded_heads_that_is_not_named_as_a_norm_is_refused(model, name):
    """Its gradient would be of this rank's heads only."""
    plan = {"attention.qkv": FusedColumn((12, 4, 4)), "attention.out": "row"}
    plan[f"attention.{name}" if name else "attention"] = "replicate"
    whole = nn.ModuleDict({"attention": model})
    with pytest.raises(PlanError, match=r"is among sharded activations.*only a norm of single heads"):
        run(lambda m: parallelize(m, plan), Mesh(tp=2), whole)


def test_a_weight_of_the_whole_width_beside_sharded_heads_is_a_copy():
    """It can only meet what the row gives: it does not fit a rank's share of the heads."""
    plan = {"attention.qkv": FusedColumn((12, 4, 4)), "attention.out": "row", "attention": "replicate"}
    run(lambda m: parallelize(m, plan), Mesh(tp=2), nn.ModuleDict({"attention": Fused(12)}))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_row_before_its_column_is_refused_when_it_runs(num_ranks):
    """Which of two layers comes first only their module's forward knows."""

    def program(model, ids):
        model = parallelize(model, {**gpt2_plan(model), f"{BLOCK}mlp.c_fc": "row", f"{BLOCK}mlp.c_proj": "column"})
        return model(ids)

    share = 24 // num_ranks
    with pytest.raises(PlanError, match=rf"h\.0\.mlp\.c_fc is planned as a row, which takes this rank's {share} of 24"):
        run(program, Mesh(tp=num_ranks), gpt2(), IDS)

    def two_columns(model, x):
        return parallelize(model, {"0": "column", "1": "column", "2": "row"})(x)

    layers = nn.Sequential(*(nn.Linear(12, 12) for _ in range(3)))
    with pytest.raises(PlanError, match="1 is planned as a column, which takes all 12 features, but was given"):
        run(two_columns, Mesh(tp=num_ranks), layers, torch.ones(1, 12))


def test_a_plan_that_is_none():
    for plan in ("column", None, [("lm_head", "vocab")]):
        with pytest.raises(PlanError, match=f"the plan is of type {type(plan).__name__}; it must be a dict"):
            run(lambda model, plan=plan: parallelize(model, plan), Mesh(tp=1), gpt2())  # type: ignore[arg-type]
    model = nn.ModuleDict({"words": nn.Embedding(6, 4, max_norm=1.0)})
    with pytest.raises(PlanError, match="words is an embedding with max_norm or scale_grad_by_freq"):
        run(lambda model: parallelize(model, {"words": "vocab"}), Mesh(tp=2), model)
    two = nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(4, 6)})
    for b, reason in ("vocab", "there are 2: a, b;"), ("replicate", "has no loss"):
        heads = {"a": "vocab", "b": b}
        with pytest.raises(PlanError, match=f"gather_logits=False .*{reason}.*leave gather_logits=True"):
            run(lambda model, heads=heads: parallelize(model, heads, gather_logits=False), Mesh(tp=2), two)


def test_what_is_left_out_or_does_not_divide_is_refused():
    def program(model, plan_of, change, drop=""):
        plan = {pattern: kind for pattern, kind in plan_of(model).items() if pattern != drop}
        before = dict(model.named_modules())
        try:
            parallelize(model, {**plan, **change})
        finally:
            assert dict(model.named_modules()) == before  # nothing was changed

    with pytest.raises(PlanError, match=r"leaves out 2 modules that hold parameters: 'transformer\.h\.\*\.ln_1'"):
        run(program, Mesh(tp=2), gpt2(), gpt2_plan, {}, "transformer.h.*.ln_1")
    with pytest.raises(PlanError, match=r"leaves out 1 module that holds parameters: 'transformer\.ln_f'"):
        run(program, Mesh(tp=2), gpt2(), gpt2_plan, {}, "transformer.ln_f")
    with pytest.raises(PlanError, match="c_attn has 6 heads of 2 features, which the 4 ranks"):
        run(program, Mesh(tp=4), gpt2(heads=6), gpt2_plan, {})
    with pytest.raises(PlanError, match="k_proj has 2 heads of 2 features, which the 4 ranks"):
        run(program, Mesh(tp=4), llama(heads=8, kv_heads=2), llama_plan, {})
    with pytest.raises(PlanError, match=r"q_proj.* are split, and those of .*k_proj are not; .* sharded together"):
        run(program, Mesh(tp=2), llama(), llama_plan, {"model.layers.*.self_attn.k_proj": "replicate"})
    with pytest.raises(PlanError, match="c_fc has 30 output features, which the 4 ranks"):
        run(program, Mesh(tp=4), gpt2(heads=12, n_inner=30), gpt2_plan, {})
    with pytest.raises(PlanError, match="llama_plan is for models built like Llama, and GPT2LMHeadModel has no"):
        run(lambda model: llama_plan(model), Mesh(tp=2), gpt2())
    with pytest.raises(PlanError, match=r"planned twice: 'column' by .* and 'row' by"):
        run(program, Mesh(tp=2), gpt2(), gpt2_plan, {"transformer.h.1.mlp.c_fc": "row"})
    with pytest.raises(ValueError, match="no axis 'model'"):
        run(lambda model: parallelize(model, gpt2_plan(model), "model"), Mesh(tp=2), gpt2())


# --- what check_parallel finds in somebody's own ----------------------------------------------------------------------


def test_a_plan_applied_wrongly_is_found():
    def model(whole):
        parallelize(whole, gpt2_plan(whole))
        whole.transformer.h[1].mlp.c_fc.entrance = lambda x: x  # no copy_to
        return whole

    report = check_parallel(model, gpt2(), inputs=(IDS,), kwargs={"labels": IDS}, mesh=Mesh(tp=2))
    assert report.of("loss").ok and report.of("transformer.h.1.ln_2.weight").mistake == "partial"
    assert "right up to transformer.h.1.mlp.c_fc" in report.notes[-1]


def test_sharded_logits_can_be_checked_with_ones_own_loss():
    report = check_parallel(
        lambda whole: parallelize(whole, gpt2_plan(whole), gather_logits=False),
        gpt2(),
        inputs=(IDS,),
        mesh=Mesh(tp=3),
        loss=lambda out: vocab_parallel_cross_entropy(out.logits, IDS, "tp", VOCABULARY),
        reference_loss=lambda out: F.cross_entropy(out.logits.flatten(0, 1), IDS.flatten()),
        specs={"transformer.wte.weight": P("tp")},
    )
    assert report.ok and report.of("logits").layout == "P(None, None, 'tp')"


# --- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_experts_by_transformers_other_implementations(implementation):
    """In float32, the only type that they have on a CPU. What they are told of other ranks' experts is no number."""
    make, plan_of = MODELS["mixtral"]
    model = make().float()
    model.config._experts_implementation = implementation
    whole = copy.deepcopy(model)
    want = step_of(whole, IDS)

    def program(model, ids):
        out = step_of(parallelize(model, plan_of(model)), ids)
        return out.logits, model.model.layers[0].mlp.gate.weight.grad, model.model.layers[1].mlp.experts.down_proj.grad

    ranks = run(program, Mesh(tp=3), model, IDS).per_rank
    close(ranks[0][0], want.logits.detach(), "logits", tolerance=1e-5)
    close(ranks[1][1], whole.model.layers[0].mlp.gate.weight.grad, "router", tolerance=1e-5)
    experts = torch.cat([gradient for *_, gradient in ranks])
    close(experts, whole.model.layers[1].mlp.experts.down_proj.grad, "experts", tolerance=1e-5)


def test_experts_that_ranks_cannot_share():
    model = llama("Mixtral", num_local_experts=6, num_experts_per_tok=2)
    with pytest.raises(PlanError, match="has 6 experts, which the 4 ranks of axis 'tp' cannot share equally"):
        run(lambda: parallelize(copy.deepcopy(model), llama_plan(model)), Mesh(tp=4))
    plan = llama_plan(model) | {"model.layers.*.mlp.gate": "experts"}
    with pytest.raises(PlanError, match="a module with a row per expert in every parameter; it is"):
        run(lambda: parallelize(copy.deepcopy(model), plan), Mesh(tp=2))
