"""`python -m tplab`: which commands there are."""

from tplab import __version__

COMMANDS = {
    "python -m tplab.torchrun --nproc-per-node 8 train.py": "run a script for torchrun, unchanged, on simulated ranks",
    "python -m tplab.doctor --nproc-per-node 4 train.py": "say whether it trains the model that one rank trains",
    "torchrun --nproc-per-node 8 -m tplab.record train.py": "run it on real ranks, and record what each of them sends",
    "python -m tplab.merge tplab_trace --html run.html": "make one trace, and a page, of what real ranks recorded",
    "python -m tplab.forecast llama3-70b --gpus 256 --batch 1024": "which layout is fastest? why not the others?",
}

if __name__ == "__main__":
    width = max(map(len, COMMANDS))
    print(f"tplab {__version__}. Its commands; each has --help:\n")
    print("\n".join(f"  {command:<{width}}   {what}" for command, what in COMMANDS.items()))
    print("\nIn Python: from tplab.torch import run, or from tplab.jax import run")
