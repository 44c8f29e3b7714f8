"""A GPT-2 of `transformers` converted for tplab: its configuration, and its weights under our names.

Nothing here imports transformers or a framework: a state is a mapping from names to anything that NumPy can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tplab.errors import ShapeError, SpecError, one_of
from tplab.models.gpt import GPTConfig, gpt_parameters

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_MUST_BE = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def gpt2_config(config: Any) -> GPTConfig:
    """The GPTConfig of the same model as a transformers.GPT2Config, or a dict of its fields.

    Raises ValueError for features that tplab's GPT does not have. It has no dropout on the attention scores, only the
    model's other two dropouts, which must have the same probability.
    """
    fields = config if isinstance(config, Mapping) else config.to_dict()
    for name, value in _MUST_BE.items():
        if fields.get(name, value) != value:
            raise ValueError(f"{name} is {fields[name]!r}; tplab's GPT has {value!r}, so it would be a different model")
    activation = fields.get("activation_function", "gelu_new")
    one_of("activation_function", activation, _ACTIVATIONS)
    drops = fields.get("resid_pdrop", 0.1), fields.get("embd_pdrop", 0.1)
    if drops[0] != drops[1]:
        raise ValueError(f"resid_pdrop is {drops[0]} and embd_pdrop {drops[1]}; tplab's GPT has one dropout for both")
    return GPTConfig(
        fields["vocab_size"],
        fields["n_embd"],
        fields["n_layer"],
        fields["n_head"],
        fields["n_positions"],
        hidden=fields.get("n_inner"),
        activation=_ACTIVATIONS[activation],
        dropout=drops[0],
        deviation=fields.get("initializer_range", 0.02),
    )


def gpt2_state(state: Mapping[str, Any], config: GPTConfig) -> dict[str, Any]:
    """The whole state of GPT(config), as NumPy arrays, from that of a transformers GPT-2. The model is the same.

    state   "transformer.h.0.attn.c_attn.weight", with or without "transformer." -> torch tensors, NumPy arrays, ...

        c_attn [D, 3 D]   ->   query, key, value [D, D]: its columns become their rows
        c_proj, c_fc      ->   output, up, down: [in, out] becomes [out, in]
        wte, lm_head      ->   embedding, once: the head is tied

    Raises SpecError if names are missing or left over, ShapeError if a shape does not fit the config, and ValueError if
    the head is not tied.
    """
    import numpy as np  # here, so that `import tplab` stays quick

    state = {name.removeprefix("transformer."): x for name, x in state.items()}
    if "lm_head.weight" in state and "wte.weight" in state:
        head = _array(state.pop("lm_head.weight"))
        if not np.array_equal(head, _array(state["wte.weight"])):
            raise ValueError("lm_head.weight is not wte.weight; tplab's GPT has one weight for both (a tied head)")
    names = _names(config)
    left_over = [name for name in state if name not in names and not name.endswith(_MASKS)]
    if missing := [name for name in names if name not in state]:
        raise SpecError(
            f"the state has no {missing[0]!r}, and {len(missing)} of {len(names)} names are missing: it is not "
            f"the state of a GPT-2 with {config}"
        )
    if left_over:
        raise SpecError(f"the state has {left_over[0]!r}, which a GPT-2 of {config.num_layers} blocks does not have")
    found: dict[str, Any] = {}
    for name, ours in names.items():
        whole = _array(state[name])
        whole = whole.T if whole.ndim == 2 and ours[0].startswith("blocks.") else whole
        pieces = np.split(whole, len(ours)) if whole.shape[0] % len(ours) == 0 else [whole]
        found |= dict(zip(ours, pieces))
    for name, parameter in gpt_parameters(config).items():
        have, expected = list(found[name].shape), list(parameter.shape)
        if have != expected:
            raise ShapeError(f"{name} would be {have}, but GPTConfig makes it {expected}; gpt2_config gives its sizes")
    return found


_MASKS = (".attn.bias", ".attn.masked_bias")  # buffers of older versions, not parameters


def _names(config: GPTConfig) -> dict[str, list[str]]:
    """transformers' name -> our names, of which c_attn has three."""
    found = {"wte.weight": ["embedding.weight"], "wpe.weight": ["positions.weight"]}
    for number in range(config.num_layers):
        theirs, ours = f"h.{number}", f"blocks.{number}"
        for kind in ("weight", "bias"):
            found |= {
                f"{theirs}.ln_1.{kind}": [f"{ours}.norm_1.{kind}"],
                f"{theirs}.attn.c_attn.{kind}": [f"{ours}.attention.{n}.{kind}" for n in ("query", "key", "value")],
                f"{theirs}.attn.c_proj.{kind}": [f"{ours}.attention.output.{kind}"],
                f"{theirs}.ln_2.{kind}": [f"{ours}.norm_2.{kind}"],
                f"{theirs}.mlp.c_fc.{kind}": [f"{ours}.mlp.up.{kind}"],
                f"{theirs}.mlp.c_proj.{kind}": [f"{ours}.mlp.down.{kind}"],
            }
    return found | {"ln_f.weight": ["norm.weight"], "ln_f.bias": ["norm.bias"]}


def _array(x: Any) -> Any:
    """`x` as a NumPy array; torch's bfloat16, which NumPy does not have, becomes float32."""
    import numpy as np

    x = x.detach().cpu() if hasattr(x, "detach") else x
    return np.asarray(x.float() if str(getattr(x, "dtype", "")) == "torch.bfloat16" else x)
