"""`python -m tplab.merge tplab_trace --html run.html`: merges the files of a real run's ranks into one trace."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tplab.commands import add_flags, check_files, mesh_from, write_files
from tplab.errors import TplabError
from tplab.parser import Parser, ended
from tplab.trace import merge, summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if the files belong to one run."""
    parser = Parser(
        prog="python -m tplab.merge",
        description="Make one trace of what tplab.record has written down on each rank of a real run.",
    )
    parser.add_argument("folder", help="where the files rank0.jsonl, rank1.jsonl ... are")
    parser.add_argument("--mesh", metavar="dp=2,tp=4", help="axes of the mesh: they name the groups of ranks")
    add_flags(parser)
    given = parser.parse_args(arguments)
    try:
        check_files(given)
        merged = merge(given.folder, None if given.mesh is None else mesh_from(given.mesh))
    except (ValueError, OSError, TplabError) as error:
        print(f"tplab.merge: {error}", file=sys.stderr)
        return 2
    print(summary(merged.trace))
    if merged.doubt:
        print(f"\n{merged.clocks}")
    if merged.unfinished:
        print("\n" + "\n".join(merged.unfinished))
    write_files(merged.trace, given)
    return 0


if __name__ == "__main__":
    ended(main)
