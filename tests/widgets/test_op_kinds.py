"""On a timeline an operation has the colour of its kind."""

import pytest

from tplab.widgets.score.op_kinds import KINDS, kind_of


@pytest.mark.parametrize(
    ("kind", "ops"),
    {
        "product": "mm addmm addmm_ bmm baddbmm matmul dot_general mv linear _flash_attention",
        "norm": "native_layer_norm _softmax _log_softmax rms_norm logsumexp",
        "copy": "clone copy_ cat concatenate index_select embedding dynamic_slice _to_copy zeros_like",
        "elementwise": "add gelu tanh mul silu max compute sum maximum command",
    }.items(),
)
def test_the_kind_of_an_operation(kind: str, ops: str):
    assert kind in KINDS
    assert {op: kind_of(op) for op in ops.split()} == dict.fromkeys(ops.split(), kind)
