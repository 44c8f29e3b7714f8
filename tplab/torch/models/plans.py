"""Plans: how each layer of a model is sharded, and whether the plan as a whole can be right.

A plan maps names of modules to how they are sharded. It is checked before anything is changed: a plan that is refused
here would run, and compute something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from tplab.errors import PlanError

KINDS = {
    "column": "the rank has some of the output features",
    "row": "the rank has some of the input features, and the outputs are added up",
    "vocab": "the rank has the rows of some vocabulary entries: an embedding, or the head",
    "experts": "the rank has some of the experts, each of them whole, and the outputs are added up",
    "replicate": "every rank has all of it; of a dropout: the same mask on every rank",
    "local": "of a dropout among sharded activations: a mask of each rank's own",
}


@dataclass(frozen=True)
class FusedColumn:
    """A column-parallel layer with several parts in one weight, each of which is sharded separately.

    parts   the number of parts of equal size, such as 3 for GPT-2's query, key and value; or the size of each
    """

    parts: int | tuple[int, ...]

    def sizes(self, num_features: int) -> tuple[int, ...]:
        """The number of features of each part. Raises PlanError if they do not add up to the features of the layer."""
        given = (self.parts,) if isinstance(self.parts, int) else self.parts
        if not given or not all(isinstance(size, int) and size > 0 for size in given):
            raise PlanError(f"{self} has no such parts: give how many there are, or the size of each, all above 0")
        sizes = (num_features // self.parts,) * self.parts if isinstance(self.parts, int) else tuple(self.parts)
        if sum(sizes) != num_features:
            raise PlanError(f"{self} of {num_features} output features: the parts {sizes} have {sum(sizes)}")
        return sizes


Kind = str | FusedColumn
Plan = Mapping[str, Kind]


@dataclass(frozen=True)
class Planned:
    """One module of a model, and how it is sharded."""

    name: str
    module: nn.Module
    kind: str
    parts: tuple[int, ...] = ()

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]


def gpt2_plan(model: nn.Module) -> dict[str, Kind]:
    """The plan for a `transformers` GPT-2: whole heads, the MLP's hidden features and the vocabulary are sharded.

    c_attn holds query, key and value side by side, and each is cut separately; c_proj adds up. Norms and positions are
    replicated. The head remains tied to the embedding.
    """
    base = "transformer." if hasattr(model, "transformer") else ""
    block = f"{base}h.*."
    plan: dict[str, Kind] = {
        f"{base}wte": "vocab",
        f"{base}wpe": "replicate",
        f"{block}ln_1": "replicate",
        f"{block}attn.c_attn": FusedColumn(3),
        f"{block}attn.c_proj": "row",
        f"{block}attn.attn_dropout": "local",
        f"{block}ln_2": "replicate",
        f"{block}mlp.c_fc": "column",
        f"{block}mlp.c_proj": "row",
        f"{base}ln_f": "replicate",
    }
    if hasattr(model, "lm_head"):
        plan["lm_head"] = "vocab"
    _check_family(model, plan, "GPT-2", "gpt2_plan")
    return plan


def llama_plan(model: nn.Module) -> dict[str, Kind]:
    """The plan for a `transformers` Llama or a similar model: Mistral, Qwen; Mixtral, Qwen3-MoE, DeepSeek-V3.

    Query, key and value heads are sharded whole, also with grouped queries. Gate and up are sharded together, and down
    adds up; each rank has some of the experts, whole. Norms and routers are replicated, including norms of single heads
    in the attention (Qwen3). So is a latent attention (DeepSeek), whose heads share the source of their keys.
    """
    base = "model." if hasattr(model, "model") else ""
    block = f"{base}layers.*."
    attention, mlp = f"{block}self_attn.", f"{block}mlp."
    names = [name for name, _ in model.named_modules()]

    def has(pattern: str) -> bool:
        return any(_matches(pattern, name) for name in names)

    plan: dict[str, Kind] = {
        f"{base}embed_tokens": "vocab",
        f"{block}input_layernorm": "replicate",
        f"{block}post_attention_layernorm": "replicate",
        f"{base}norm": "replicate",
    }
    if has(f"{attention}kv_b_proj"):
        latent = (
            "q_proj",
            "q_a_proj",
            "q_a_layernorm",
            "q_b_proj",
            "kv_a_proj_with_mqa",
            "kv_a_layernorm",
            "kv_b_proj",
        )
        plan |= {f"{attention}{name}": "replicate" for name in (*latent, "o_proj") if has(f"{attention}{name}")}
    else:
        plan |= {f"{attention}{name}_proj": "column" for name in "qkv"} | {f"{attention}o_proj": "row"}
        plan |= {f"{attention}{name}_norm": "replicate" for name in "qk" if has(f"{attention}{name}_norm")}
    if has(f"{mlp}experts"):
        plan |= {f"{mlp}gate": "replicate", f"{mlp}experts": "experts"}
    for part in (mlp, f"{mlp}shared_experts."):
        if has(f"{part}down_proj") or (part == mlp and not has(f"{mlp}experts")):
            plan |= {f"{part}gate_proj": "column", f"{part}up_proj": "column", f"{part}down_proj": "row"}
    if hasattr(model, "lm_head"):
        plan["lm_head"] = "vocab"
    _check_family(model, plan, "Llama", "llama_plan")
    return plan


def bind(model: nn.Module, plan: Plan, num_ranks: int, label: str) -> list[Planned]:
    """How each module of the model is sharded. Raises PlanError for a plan that cannot be right.

    `*` in a name matches anything between two dots. Every module that holds parameters must be named once.
    """
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"the plan is of type {type(plan).__name__}; it must be a dict from module names to how they are sharded, "
            "as gpt2_plan(model) returns it"
        )
    modules = dict(model.named_modules())
    found: dict[str, tuple[str, Kind]] = {}
    for pattern, kind in plan.items():
        matching = [name for name in modules if _matches(pattern, name)]
        if not matching:
            raise PlanError(_nothing_matches(model, pattern, modules))
        if not isinstance(kind, FusedColumn) and not (isinstance(kind, str) and kind in KINDS):
            listed = ", ".join(map(repr, KINDS))
            raise PlanError(f"{pattern!r} is planned as {kind!r}; it must be one of {listed}, or a FusedColumn")
        for name in matching:
            if name in found and found[name][1] != kind:
                raise PlanError(
                    f"{name} is planned twice: {found[name][1]!r} by {found[name][0]!r}, and {kind!r} by {pattern!r}"
                )
            found[name] = pattern, kind
    _check_all_are_named(modules, found)
    planned = [_planned(name, modules[name], found[name][1]) for name in modules if name in found]
    _check_tied(planned)
    for parent in dict.fromkeys(one.parent for one in planned):
        inside = [one for one in planned if one.parent == parent]
        _check_region(parent, modules[parent], inside)
        _check_division(modules[parent], inside, num_ranks, label)
    _check_copies(planned, modules)
    return planned


def features_of(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear layer, or of GPT-2's Conv1D, whose weight is [in, out]; None for any other module."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if is_conv1d(module):
        return module.weight.shape[0], module.weight.shape[1]  # type: ignore[union-attr,return-value]
    return None


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, recognised without an import."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def heads_in(parent: nn.Module) -> int | None:
    """The number of features of one head if the module is an attention, else None."""
    width = getattr(parent, "head_dim", None)
    return width if isinstance(width, int) else None


def experts_in(module: nn.Module) -> int:
    """The number of experts in a module with one row per expert in each parameter; 0 for any other module."""
    count, shapes = getattr(module, "num_experts", 0), [p.shape for p in module.parameters()]
    has_matrices = any(len(shape) == 3 for shape in shapes)  # a router also has one row per expert
    return count if has_matrices and all(len(shape) > 1 and shape[0] == count for shape in shapes) else 0


# --- what a plan must satisfy -----------------------------------------------------------------------------------------


def _planned(name: str, module: nn.Module, kind: Kind) -> Planned:
    """The module with its kind. Raises PlanError if the kind is impossible for it."""
    if isinstance(kind, FusedColumn):
        features = features_of(module)
        if features is None:
            raise PlanError(f"{name} is planned as {kind}, but it is a {type(module).__name__}, not a linear layer")
        return Planned(name, module, "column", kind.sizes(features[1]))
    is_fit = {
        "column": features_of(module) is not None,
        "row": features_of(module) is not None,
        "vocab": type(module) in (nn.Embedding, nn.Linear),
        "experts": bool(experts_in(module)),
        "replicate": True,
        "local": isinstance(module, nn.Dropout),
    }[kind]
    if not is_fit:
        kinds = {"column": "a linear layer", "row": "a linear layer", "vocab": "an nn.Embedding or a head (nn.Linear)",
                 "local": "an nn.Dropout", "experts": "a module with a row per expert in every parameter"}  # fmt: skip
        raise PlanError(f"{name} is planned as {kind!r}, which is for {kinds[kind]}; it is {type(module).__name__}")
    if isinstance(module, nn.Embedding) and kind == "vocab" and (module.max_norm or module.scale_grad_by_freq):
        raise PlanError(
            f"{name} is an embedding with max_norm or scale_grad_by_freq, which are not computed on a sharded "
            "vocabulary; "
            "plan it as 'replicate'"
        )
    return Planned(name, module, kind)


def _check_all_are_named(modules: Mapping[str, nn.Module], found: Mapping[str, object]) -> None:
    left = [name for name, module in modules.items() if name not in found and list(module.parameters(recurse=False))]
    if left:
        patterns = list(dict.fromkeys(_pattern(name) for name in left))
        what = "1 module that holds" if len(left) == 1 else f"{len(left)} modules that hold"
        raise PlanError(
            f"the plan leaves out {what} parameters: {', '.join(map(repr, patterns))}; plan "
            "those that every rank holds whole as 'replicate'"
        )


def _check_tied(planned: list[Planned]) -> None:
    seen: dict[int, Planned] = {}
    for one in planned:
        for parameter in one.module.parameters(recurse=False):
            other = seen.setdefault(id(parameter), one)
            if (other.kind, other.parts) != (one.kind, one.parts):
                raise PlanError(
                    f"{other.name} and {one.name} have one weight ('tied'), planned as {other.kind!r} and as "
                    f"{one.kind!r}; plan both alike, or give the head a weight of its own"
                )


def _check_region(parent: str, module: nn.Module, inside: list[Planned]) -> None:
    """Check that a parent has both columns and a row, or neither: a row takes the features that columns return."""
    linear = [one for one in inside if features_of(one.module) and one.kind != "vocab"]
    columns = [one for one in linear if one.kind == "column"]
    rows = [one for one in linear if one.kind == "row"]
    whole = [one for one in linear if one.kind == "replicate"]
    if columns and whole:
        names = ", ".join(one.name for one in whole)
        sharded, last = ", ".join(one.name for one in columns), linear[-1]
        if not rows and last in whole:
            raise PlanError(
                f"the columns of {sharded} are split: each rank has some features; {last.name}, which takes them, is "
                f"'replicate' and needs all of them: plan it as 'row'"
            )
        raise PlanError(
            f"of {parent}, the columns of {sharded} are split, and those of {names} are not; layers whose outputs "
            "meet, as query, key and value, or gate and up, must be sharded together"
        )
    if bool(columns) != bool(rows):
        names, of = ", ".join(one.name for one in columns or rows), parent or "the model"
        if columns:
            what = f"a column leaves each rank with some of the features, but no layer of {of} is made for that"
            way = "plan the layer that takes these features as 'row'"
        else:
            what = f"a row takes some of the features on each rank, but every layer of {of} gives each rank all of them"
            way = "plan the layers that give it these features as 'column'"
        alone = "plan it as 'replicate', or a model's head as 'vocab'"
        raise PlanError(f"{names}: {what}; {alone if len(linear) == 1 else way}")
    for row in rows:
        _check_joint(module, columns, row, is_last=row is rows[-1])


def _check_joint(parent: nn.Module, columns: list[Planned], row: Planned, is_last: bool) -> None:
    """Check that the row takes the features that the columns return, with every part cut alike.

    The outputs of the columns of one parent are combined: gate and up are multiplied, each query head is compared with
    its key head. A rank must hold the same features of each, so each part must be as large as the row's input. Only the
    keys and values of an attention may be narrower, both by the same factor: grouped queries.
    """
    taken = features_of(row.module)[0]  # type: ignore[index]
    parts: dict[str, tuple[int, ...]] = {
        one.name: one.parts or (features_of(one.module)[1],)  # type: ignore[index]
        for one in columns
    }
    strands = [size for sizes in parts.values() for size in sizes]
    narrow = [size for size in strands if size != taken]
    if not narrow:
        return
    is_attention = heads_in(parent) is not None
    is_grouped = len(strands) == 3 and len(narrow) == 2 and narrow[0] == narrow[1] < taken
    is_in_order = is_attention and all(sizes[0] == max(sizes) for sizes in parts.values())  # queries, keys, values
    if is_grouped and (is_in_order or len(columns) == 3):
        return
    misfits = [(name, sizes) for name, sizes in parts.items() if any(size != taken for size in sizes)]
    wrong, sizes = max(misfits, key=lambda one: len(one[1]))
    if len(sizes) != 1:
        raise PlanError(
            f"{wrong} gives {len(sizes)} parts of {', '.join(map(str, sizes))} features, and {row.name} takes {taken}; "
            "layers whose outputs meet, as gate and up, or query, key and value, must be cut alike, in parts of "
            f"{taken} features"
        )
    given = sizes[0]
    more = ""
    if is_attention and given == 3 * taken:
        more = f"; {wrong} holds query, key and value side by side: plan it as FusedColumn(3), which cuts each of them"
    elif not is_last:
        more = "; if both read the same input, as gate and up do, plan both as 'column'"
    elif given % taken == 0 and given > taken:
        more = f"; {wrong} may hold {given // taken} parts side by side: plan it as FusedColumn({given // taken})"
    raise PlanError(f"{wrong} gives {given} features, and {row.name} takes {taken}{more}")


def _check_copies(planned: list[Planned], modules: Mapping[str, nn.Module]) -> None:
    """Check that no parameter used with sharded activations is a copy, and that "local" dropout is only used with them.

    The children of a module with columns are assumed to work on sharded activations. So are parameters that an
    attention holds at any depth, if they fit one head or one number: others would not fit a rank's features.
    """
    regions = {one.parent for one in planned if one.kind == "column"}
    for one in planned:
        names = one.name.split(".")
        above = (".".join(names[:end]) for end in range(len(names), -1, -1))
        region = next((name for name in above if name in regions), None)
        if one.kind == "local" and region is None:
            raise PlanError(
                f"{one.name} is planned as 'local', but there are no columns around it: every rank holds the same "
                "activations there, and each would drop different elements; leave it out of the plan, so that all "
                "ranks draw one mask"
            )
        if one.kind != "replicate" or region is None:
            continue
        width = heads_in(modules[region])
        if region == one.parent:
            spare = [p for p in one.module.parameters() if p.numel() != width]
        else:
            own = one.module.parameters(recurse=False) if width is not None else ()
            spare = [p for p in own if p.dim() == 0 or p.shape[-1] in (1, width)]
        if spare:
            raise PlanError(
                f"{one.name} is among sharded activations, of which each rank holds some, and its parameter of "
                f"{list(spare[0].shape)} is for all of them; only a norm of single heads, planned by its name, can "
                "be a copy"
            )


def _check_division(parent: nn.Module, inside: list[Planned], num_ranks: int, label: str) -> None:
    """Check that features and whole heads can be shared equally."""
    width = heads_in(parent)
    for one in inside:
        shared: list[tuple[int, str, str]] = []  # how many, of what, and why they must divide
        if one.kind == "experts":
            shared = [(experts_in(one.module), "experts", " equally")]
        elif one.kind in ("column", "row"):
            taken, given = features_of(one.module)  # type: ignore[misc]
            for size in (one.parts or (given,)) if one.kind == "column" else (taken,):
                if width is not None and size % width == 0:
                    shared.append((size // width, f"heads of {width} features", ": heads are sharded whole"))
                shared.append((size, f"{'output' if one.kind == 'column' else 'input'} features", " equally"))
        for size, what, why in shared:
            if size % num_ranks:
                raise PlanError(
                    f"{one.name} has {size} {what}, which the {num_ranks} ranks of axis {label!r} cannot share{why};\n"
                    f"use a mesh whose {label!r} divides {size}"
                )


# --- names ------------------------------------------------------------------------------------------------------------


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]*"), name) is not None


def _pattern(name: str) -> str:
    """The name with a star for each number: transformer.h.*.ln_1"""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _nothing_matches(model: nn.Module, pattern: str, modules: Mapping[str, nn.Module]) -> str:
    for name, _ in model.named_parameters(remove_duplicate=False):
        module, _, _ = name.rpartition(".")
        if module and _matches(pattern, name):
            return (
                f"{pattern!r} names a parameter; a plan names modules, and {_pattern(module)!r} is the one that holds "
                "it. The bias of a row is held whole and added once, after the sum"
            )
    known = list(dict.fromkeys(_pattern(name) for name in modules if name))
    near = get_close_matches(pattern, known, 3, 0.4) or known[:3]
    return f"{pattern!r} matches no module of {type(model).__name__}; similar names are {', '.join(map(repr, near))}"


def _check_family(model: nn.Module, plan: Plan, family: str, function: str) -> None:
    names = [name for name, _ in model.named_modules()]
    missing = [pattern for pattern in plan if not any(_matches(pattern, name) for name in names)]
    if missing:
        raise PlanError(
            f"{function} is for models built like {family}, and {type(model).__name__} has no "
            f"{', '.join(map(repr, missing))}; write a plan for it: module name -> {', '.join(map(repr, KINDS))}"
        )
