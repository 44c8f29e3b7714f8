"""On a timeline an operation has the colour of its kind."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

import tplab.torch as tt
from tplab import Mesh, P
from tplab.trace.trace import Trace
from tplab.widgets import timeline
from tplab.widgets.paper.palette import OPS
from tplab.widgets.paper.wire import unpack
from tplab.widgets.score import words
from tplab.widgets.score.names import KINDS, kind_of, name_of
from tplab.widgets.score.score import score


@pytest.mark.parametrize(
    ("kind", "ops"),
    {
        "product": "mm addmm addmm_ bmm baddbmm matmul dot_general mv linear _flash_attention conv_general_dilated",
        "norm": "native_layer_norm _softmax _log_softmax rms_norm logsumexp",
        "copy": "clone copy_ cat concatenate index_select embedding dynamic_slice _to_copy convert_element_type",
        "elementwise": "add gelu tanh mul silu max sum maximum command",
        "computing": "compute",
    }.items(),
)
def test_the_kind_of_an_operation(kind: str, ops: str):
    assert kind in KINDS
    assert {op: kind_of(op) for op in ops.split()} == dict.fromkeys(ops.split(), kind)


def test_a_modelled_gpu_runs_no_kernel_of_a_cpu():
    def program(q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    trace = tt.run(program, Mesh(tp=2), torch.ones(1, 2, 64, 16), cluster="h100").trace
    piece = score(trace)
    assert any("_for_cpu" in op for op in piece.ops)
    assert "scaled dot-product attention" in piece.op_names and not any("cpu" in op for op in piece.op_names)
    said = [*words.sentences(piece), *(text for _, text in unpack(timeline(trace).score)[0]["hints"])]
    assert any("scaled dot-product attention" in text for text in said) and not any("cpu" in text for text in said)
    assert name_of("_scaled_dot_product_efficient_attention_backward") == "scaled dot-product attention, backward"
    assert [name_of(op) for op in ("mm", "add_", "all_reduce")] == ["mm", "add_", "all_reduce"]


def layer(x: torch.Tensor, w: torch.Tensor, is_trained: bool) -> None:
    y = tt.all_reduce((x @ w).tanh(), "tp")
    if is_trained:
        (x.requires_grad_() @ w).sum().backward()
    assert y.shape == x.shape


def traced(is_trained: bool) -> Trace:
    return tt.run(layer, Mesh(tp=2), torch.ones(4, 4), torch.ones(4, 4), is_trained, cluster="h100").trace


def test_products_of_a_backward_pass_have_a_colour_and_a_name_of_their_own():
    read = score(traced(is_trained=True))
    products = [kind for kind in read.work_kinds if kind in ("product", "backward")]
    assert sorted(products) == ["backward"] * 2 + ["product"] * 4, "on two ranks"
    assert dict(read.work_legend)["product"] == "matmul, forward"
    assert dict(read.work_legend)["backward"] == "matmul, backward"
    assert {kind for kind, _ in read.work_legend} <= OPS.keys()


def test_without_a_backward_pass_a_product_is_a_product():
    read = score(traced(is_trained=False))
    assert "backward" not in read.work_kinds
    assert dict(read.work_legend) == {"product": "matmul", "elementwise": "elementwise"}
    assert timeline(traced(is_trained=False)).picture()


def test_a_measured_stretch_is_not_called_elementwise():
    """It is one bar from message to message, and may be a product."""
    x = torch.ones(4, 4)
    measured = tt.run(layer, Mesh(tp=2), x, x, False, clock="measured").trace
    assert dict(score(measured).work_legend) == {"computing": "computing"}


def several(x: torch.Tensor) -> torch.Tensor:
    whole = tt.all_gather(x, "tp")
    return tt.reduce_scatter(whole, "tp") + tt.all_reduce(x, "tp", "max") + tt.broadcast(x, "tp")


def test_collectives_have_the_colour_of_what_they_do_and_a_legend_of_their_names():
    trace = tt.run(several, Mesh(tp=2), torch.ones(4, 4), in_specs=P("tp"), cluster="h100").trace
    read = score(trace)
    assert read.talk_legend == [("combines", "all_reduce, reduce_scatter"), ("moves", "all_gather, broadcast")]
    does = {(read.ops[op], kind) for op, kind in zip(read.bars["op"], read.talk_kinds, strict=True)}
    assert does >= {("reduce_scatter", "combines"), ("all_gather", "moves"), ("add", "")}
    assert {kind for _, kind in does} == {"", "combines", "moves"}
    assert timeline(trace).picture()


def test_a_long_legend_goes_on_in_a_second_line():
    def talks(x: torch.Tensor) -> None:
        layer(x, x, True)
        y = tt.all_gather(tt.broadcast(x.softmax(1), "tp"), "tp").clone()
        tt.reduce_scatter(tt.all_to_all(y, "tp"), "tp")

    trace = tt.run(talks, Mesh(tp=2), torch.ones(4, 4), cluster="h100").trace
    pixels = np.asarray(Image.open(io.BytesIO(timeline(trace).picture())).convert("RGB"))
    right = pixels[60:-12, -16:-4]  # beside the card's edge
    assert (right == right[0, 0]).all()
