"""Scripts that train the same on their ranks as on one. The doctor must report nothing.

`test_scripts` compares their printed numbers, step by step. Repaired scripts of `wrong` are right, too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Right:
    """A script of the folder `right`, and how to run it.

    tolerance   the largest difference of printed numbers: a sum in bfloat16 has 8 bits; None if ranks draw their own
                dropout masks, as data-parallel ranks should
    """

    script: str
    ranks: int
    args: str = ""
    reference_args: str = ""
    mesh: str = ""
    tolerance: float | None = 1e-4

    def __str__(self) -> str:
        return "-".join([self.script, str(self.ranks), *self.args.replace("--", "").split()])


IN_BFLOAT16 = Right(
    "with_accelerate",
    2,
    "--mixed_precision bf16 --gradient_accumulation_steps 2",
    "--gradient_accumulation_steps 1 --per_device_batch_size 16",
    tolerance=2e-2,
)
"""Right within the rounding of bfloat16, and wrong within that of float32."""

RIGHT = (
    Right("gpt_ddp", 4),
    Right("gpt_ddp", 2, "--accumulate 2", "--accumulate 1"),
    Right("gpt_ddp", 2, "--dtype bfloat16", tolerance=2e-2),
    Right("gpt_ddp", 2, "--ema 0.9 --compress"),
    Right("gpt_ddp", 2, "--dropout 0.1", tolerance=None),
    Right("megatron", 2, mesh="tp=2"),
    Right("megatron", 4, "--tensor-parallel 4", mesh="tp=4"),
    Right("megatron", 4, mesh="dp=2,tp=2"),
    Right("megatron", 2, "--sequence-parallel"),
    Right("megatron", 4, "--sequence-parallel", mesh="dp=2,tp=2"),
    Right("pipeline_by_hand", 2),
    Right("pipeline_by_hand", 4, mesh="dp=2,pp=2"),
    Right("pipeline_by_hand", 4, "--stages 4"),
    Right("context_parallel", 2),
    Right("context_parallel", 2, "--zigzag"),
    Right("context_parallel", 4, "--zigzag", mesh="dp=2,cp=2"),
    Right("fsdp2", 2),
    Right("fsdp2", 4, "--hybrid 2"),
    Right("fsdp2", 2, "--accumulate 2 --keep"),
    Right("fsdp2", 2, "--bfloat16", tolerance=2e-2),
    Right("fsdp2", 2, "--checkpoint"),
    Right("fsdp2_tensor_parallel", 4, mesh="dp=2,tp=2"),
    Right("dtensor", 2),
    Right("dtensor", 2, "--sequence-parallel"),
    Right("torch_pipeline", 2, "--schedule gpipe"),
    Right("torch_pipeline", 4, "--schedule 1f1b"),
    Right("torch_pipeline", 2, "--schedule interleaved", "--schedule gpipe"),
    Right("with_accelerate", 2, "", "--per_device_batch_size 8"),
    Right(
        "with_accelerate",
        2,
        "--gradient_accumulation_steps 2",
        "--gradient_accumulation_steps 1 --per_device_batch_size 16",
    ),
    Right("with_trainer", 2, "", "--per_device_train_batch_size 8"),
    Right(
        "with_trainer",
        2,
        "--uneven --gradient_accumulation_steps 2",
        "--gradient_accumulation_steps 1 --per_device_train_batch_size 16",
    ),
    IN_BFLOAT16,
    Right("with_trainer", 2, "--packed", "--per_device_train_batch_size 8"),
    Right("with_trainer", 2, "--attention_dropout 0.1", "--per_device_train_batch_size 8", tolerance=None),
    Right("autocast_two_optimizers", 2, tolerance=2e-2),
    Right("zero_redundancy", 2),
    Right("zero_by_hand", 4),
    Right("sync_batch_norm", 2),
    Right("uneven_batches", 3),
    Right("uneven_batches", 4),
    Right("gan", 2),
    Right("contrastive", 4),
    Right("flat_all_reduce", 2),
    Right("flat_all_reduce", 4, "--overlap"),
    Right("mixture_of_experts", 4),
    Right("mixture_of_experts", 4, "--clip-apart", "--clip-apart"),
    Right("half_precision_messages", 2, tolerance=2e-3),
    Right("half_precision_messages", 2, "--by-hand", tolerance=2e-3),
    *(Right("tplab_3d", 8, f"--zero {stage}", mesh="dp=2,pp=2,tp=2") for stage in (0, 2, 3)),
    Right("tplab_3d", 4, "--sequence-parallel --zero 1", mesh="dp=2,pp=1,tp=2"),
    Right("token_weighted", 2, "", "--micro 4"),
    Right("vocabulary_parallel", 2),
    Right("zigzag_by_hand", 4),
    Right("tied_pipeline_by_hand", 2),
    Right("loss_parallel", 4, mesh="dp=2,tp=2"),
)
