"""Our schedules against those of torch.distributed.pipelining, action for action, and its text both ways."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.distributed.pipelining import schedules as pipelining  # noqa: E402
from torch.distributed.pipelining.stage import _PipelineStageBase  # noqa: E402

from tplab.errors import ScheduleError  # noqa: E402
from tplab.schedules import (  # noqa: E402
    Schedule,
    check,
    dualpipe_v,
    faults,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    looped_bfs,
    simulate,
    to_csv,
    with_communication,
    zb_v,
)


class _Stage(_PipelineStageBase):
    """A stage that is only asked for its place."""

    def __init__(self, stage_index, num_stages, ranks):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = stage_index, num_stages, ranks, 0
        self.group, self.submod, self.has_backward, self.device = None, torch.nn.Identity(), True, torch.device("cpu")
        self.stage_index_to_group_rank = {}

    def _create_grad_recv_info(self, *args): ...
    def _prepare_backward_infra(self, *args): ...
    def _prepare_forward_infra(self, *args): ...


def torchs(name, ranks, microbatches, stages_per_rank=1):
    """Torch's schedule object, as rank 0 would make it."""
    kind = getattr(pipelining, name)
    num_stages = ranks * stages_per_rank
    stages = [_Stage(turn * ranks, num_stages, ranks) for turn in range(stages_per_rank)]
    single = issubclass(kind, pipelining.PipelineScheduleSingle)
    return kind(stages[0] if single else stages, microbatches)


SAME = [
    ("ScheduleInterleaved1F1B", interleaved_1f1b, [(4, 8), (3, 6), (4, 10), (2, 2), (4, 3)]),
    ("ScheduleInterleavedZeroBubble", interleaved_zb, [(4, 8), (3, 6), (4, 10), (2, 3)]),
    ("ScheduleZBVZeroBubble", zb_v, [(4, 8), (3, 4), (2, 9), (4, 2)]),
    ("ScheduleDualPipeV", dualpipe_v, [(4, 8), (3, 7), (2, 9), (1, 2)]),
]


@pytest.mark.parametrize("name, rule, sizes", SAME, ids=[name for name, *_ in SAME])
def test_the_same_actions_in_the_same_order(name, rule, sizes):
    for ranks, microbatches in sizes:
        theirs = torchs(name, ranks, microbatches, stages_per_rank=2)
        schedule = Schedule.from_torch(theirs)
        assert schedule == rule(ranks, microbatches)
        assert schedule.name == name
        lowered = Schedule.from_torch(theirs.pipeline_order_with_comms)
        check(lowered)
        assert lowered.compute_only() == rule(ranks, microbatches)


def test_gpipe_has_a_gradient_sum_more():
    schedule = Schedule.from_torch(torchs("ScheduleGPipe", 4, 8))
    check(schedule)
    assert schedule.compute_only() == gpipe(4, 8)


def test_breadth_first_takes_the_backwards_the_other_way_round():
    schedule = Schedule.from_torch(torchs("ScheduleLoopedBFS", 4, 8, stages_per_rank=2))
    check(schedule)
    assert schedule != looped_bfs(4, 8)
    assert simulate(schedule).makespan == simulate(looped_bfs(4, 8)).makespan


def test_torchs_1f1b_leaves_out_microbatch_0_on_its_last_rank():
    """A known bug of its grid (not of its execution); it is read as it is, and told."""
    schedule = Schedule.from_torch(torchs("Schedule1F1B", 4, 8))
    assert "rank 3 never runs F0 of stage 3" in [str(fault) for fault in faults(schedule)]


@pytest.mark.parametrize("schedule", [interleaved_1f1b(2, 4), zb_v(2, 3), dualpipe_v(2, 4)], ids=lambda s: s.name)
def test_torch_reads_what_we_write_and_writes_what_we_read(schedule, tmp_path):
    theirs = torchs("ScheduleInterleaved1F1B", 2, schedule.num_microbatches, stages_per_rank=2)
    theirs._n_microbatches = schedule.num_microbatches
    (tmp_path / "compute.csv").write_text(to_csv(schedule, "compute_only"))
    theirs._load_csv(str(tmp_path / "compute.csv"), format="compute_only")
    assert Schedule.from_torch(theirs.pipeline_order) == schedule
    check(Schedule.from_torch(theirs.pipeline_order_with_comms))  # lowered by torch, from our text
    (tmp_path / "comms.csv").write_text(to_csv(schedule, "compute_comms"))
    theirs._load_csv(str(tmp_path / "comms.csv"), format="compute_comms")
    assert Schedule.from_torch(theirs.pipeline_order_with_comms) == with_communication(schedule)
    for form in ("compute_only", "compute_comms"):
        theirs._dump_csv(str(tmp_path / f"{form}.csv"), format=form)
        assert Schedule.from_csv((tmp_path / f"{form}.csv").read_text()).compute_only() == schedule


def test_what_is_no_schedule_says_so():
    with pytest.raises(ScheduleError, match="is not a schedule of torch"):
        Schedule.from_torch(3)
