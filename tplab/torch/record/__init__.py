"""Recording a real run: what a program sends through torch.distributed is written down as it happens.

    from tplab.torch.record import start

    start("traces")          # before init_process_group; leave the rest of the script as it is

or without changing the script: `torchrun --nproc-per-node 8 -m tplab.record train.py`. Each rank writes a file, and
`python -m tplab.merge traces --html run.html` turns them into one trace.
"""

from tplab.torch.record.group import Recording, start

__all__ = ["Recording", "start"]
