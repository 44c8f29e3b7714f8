"""`python -m tplab.forecast llama3-70b --gpus 256 --batch 1024`: finds the best plans, or forecasts given ones."""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from tplab.cost import NAMED
from tplab.errors import TplabError
from tplab.forecast.clusters import COLUMNS, USUAL, add_flags, check_dtype, flagged
from tplab.forecast.forecast import Forecast
from tplab.forecast.memory import room
from tplab.forecast.page import to_page
from tplab.forecast.plan import CHOICES
from tplab.forecast.ranking import OF_PLANS
from tplab.forecast.rows import ANSWERS, forecast_file, forecast_rows, model_of, unread
from tplab.forecast.search import SEQUENCE, VIRTUAL, Plans, plans
from tplab.forecast.stacks import STACKS
from tplab.parser import Parser, ended
from tplab.units import counted

_CHOICES = ("attention", "compiled", "state_dtype", "dispatch", "skew")
_COLUMNS = (*COLUMNS, "gpus", "batch", "sequence", "stack", "etp", *_CHOICES)
"""Flags that are also columns of a table."""
_SEEN = 500
"""How many plans are considered to find the best of each layout."""
_REASONS = 8
"""The most reasons printed for impossible layouts of ranks."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="python -m tplab.forecast",
        description="Which plan trains a model fastest on a cluster, what each rank holds, and why the others lost; or "
        "with --rows, what each plan of a table takes.",
        epilog=f"A table:\n\n{inspect.getdoc(forecast_rows)}\n\nAdded, with GB of 1e9 bytes and GiB of 2^30:\n\n"
        + textwrap.fill(", ".join(ANSWERS), 100),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", help="a model by name, or the config.json of a transformers model")
    add_flags(parser, USUAL)
    parser.add_argument("--gpus", type=int, metavar="N", help="how many GPUs there are")
    parser.add_argument("--batch", type=int, metavar="N", help="sequences in a step")
    parser.add_argument("--sequence", type=int, metavar="N", help=f"tokens in a sequence (default: {SEQUENCE})")
    parser.add_argument("--stack", choices=STACKS, help="what trains it (default: megatron)")
    parser.add_argument("--attention", choices=CHOICES["attention"], help="its kernel (default: the stack's)")
    parser.add_argument("--compiled", choices=("true", "false"), help="torch.compile, of fsdp (default: the stack's)")
    parser.add_argument("--state-dtype", choices=CHOICES["state_dtype"], help="of the optimizer (default: the stack's)")
    parser.add_argument("--etp", type=int, nargs="+", metavar="N", help="divide each expert over N ranks, too")
    parser.add_argument(
        "--dispatch", choices=CHOICES["dispatch"], help="how tokens travel to experts (default: the stack's)"
    )
    parser.add_argument("--skew", type=float, metavar="X", help="how unequally experts are chosen (default: 0)")
    parser.add_argument("--virtual", type=int, default=VIRTUAL, metavar="N", help=f"most stages per rank ({VIRTUAL})")
    parser.add_argument("--outside", action="store_true", help="also search plans of classes that were not measured")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="how many plans are shown (default: 10)")
    parser.add_argument("--html", metavar="FILE", help="write a page, too")
    parser.add_argument("--rows", metavar="CSV", help="a table with one plan in each row")
    parser.add_argument("--out", metavar="CSV", help="where the table goes, with what was found")
    given = parser.parse_args(arguments)
    if given.rows:
        if given.out is None:
            parser.error("--rows needs --out: where the table goes")
        said = next((name for name in _COLUMNS if getattr(given, name) is not None), None)
        if said is not None:
            parser.error(f"--{said.replace('_', '-')} is a column of the table of --rows; write it there")
        _rows(parser, given.rows, given.out)
        return
    if given.out is not None:
        parser.error("--out is where the table of --rows goes; give --rows, or --html for a page")
    if given.model is None or given.gpus is None or given.batch is None:
        parser.error("give a model, --gpus and --batch, as in: llama3-70b --gpus 256 --batch 1024; or --rows")
    stack, sequence = given.stack or "megatron", SEQUENCE if given.sequence is None else given.sequence
    for name in ("gpus", "batch", "sequence", "virtual", "top"):
        if (number := getattr(given, name)) is not None and number < 1:
            parser.error(f"{name} is {number}; it must be 1 or more")
    if given.compiled and stack != "fsdp":
        parser.error(f"--compiled is a choice of --stack fsdp; it changes nothing for {stack}")
    if given.html and not Path(given.html).parent.is_dir():
        parser.error(f"--html {given.html}: there is no folder {Path(given.html).parent}")
    try:
        model, cluster = model_of({"model": given.model}), flagged(given, USUAL)
        check_dtype(cluster, "bfloat16")
        if given.etp and not model.experts:
            parser.error(f"--etp divides experts, and {model.name} has none")
        chosen = {name: value for name in _CHOICES if (value := getattr(given, name)) is not None}
        chosen |= {"compiled": given.compiled == "true"} if "compiled" in chosen else {}
        chosen |= {"virtual": given.virtual, "stack": stack, "inside": not given.outside}
        chosen |= {"etp": (None, *given.etp)} if given.etp else {}
        found = plans(model, cluster, gpus=given.gpus, batch=given.batch, sequence=sequence, **chosen)
    except (TplabError, ValueError) as error:
        parser.refuse(error)
    except OSError as error:
        parser.refuse(f"{error.filename}: {error.strerror}")
    title = f"{model.name} on {given.gpus} x {cluster.chip.name}"
    about = (
        f"{counted(given.batch, 'sequence')} of {sequence} tokens in a step, {stack}, {cluster.name}: {cluster.kind}. "
    )
    if given.gpus > cluster.node_size and (left := given.gpus % cluster.node_size):
        about += f"The last node has {left} of its {cluster.node_size} GPUs. "
    if cluster.fitted is None and f"{cluster.name}-measured" in NAMED:
        about += f"For a forecast, take {cluster.name}-measured. "
    about += "The best plan of each layout of ranks"
    best = _layouts(found, given.top)
    if not best:
        usable, most = room(cluster.chip, stack)
        fits = "surely fits" if found.smallest <= most else "fits"
        need = f"the smallest needs {found.smallest / 2**30:.1f} GiB per GPU, and {usable / 2**30:.1f} can be used"
        print(f"{title}\n{about}\n\nno plan {fits}: {need}; take more GPUs\n\n{_lost(found)}")
        sys.exit(1)
    print(f"{title}\n{about}\n\n{_table(best)}")
    print(f"\n1: {best[0].why}\n\n{_lost(found)}")
    if given.html:
        try:
            Path(given.html).write_text(to_page(title, about, best, found.lost), encoding="utf-8")
        except OSError as error:
            parser.refuse(f"--html {given.html}: {error.strerror}")
        print(f"\n{given.html}")


def _rows(parser: Parser, table: str, out: str) -> None:
    """Forecast the table, and report columns that were not read and the number of rows that failed."""
    try:
        done = forecast_file(table, out)
    except OSError as error:
        parser.refuse(f"{error.filename}: {error.strerror}")
    except UnicodeDecodeError:
        parser.refuse(f"{table} is not a table: it is no text in UTF-8")
    except ValueError as error:
        parser.exit(1, f"{parser.name}: {error}\n")
    for sentence in unread(name for name in done[0] if name):
        print(sentence, file=sys.stderr)
    failed = sum(not row["seconds"] for row in done)
    print(f"{len(done)} rows, of which {failed} could not be forecast: {out}")
    if failed == len(done):
        parser.exit(1, f"{parser.name}: no row could be forecast; the first one: {done[0]['why']}\n")


def _layouts(found: Plans, count: int) -> list[Forecast]:
    """The best plan of each of the best layouts of ranks; other plans of a layout are often as fast."""
    best: dict[tuple[int, ...], Forecast] = {}
    for place in range(min(len(found), _SEEN)):
        one = found[place]
        best.setdefault(tuple(one.plan.mesh.shape.values()), one)
        if len(best) == count:
            break
    return list(best.values())


def _table(found: Sequence[Forecast]) -> str:
    lines = [f"{'':>3}  {'seconds':>8}  {'tokens/s/GPU':>12}  {'MFU':>6}  {'GiB':>6}  plan"]
    for number, one in enumerate(found, 1):
        figures = f"{f'{one.seconds:#.3g}'.rstrip('.'):>8}  {one.tokens_per_second_per_gpu:>12,.0f}  {one.mfu:>6.1%}"
        lines.append(f"{number:>3}  {figures}  {one.peak.total / 2**30:>6.1f}  {one.plan}")
    return "\n".join(lines)


def _lost(found: Plans) -> str:
    """Why the other plans lost, and why layouts of ranks, which have no plans then, were refused."""
    of_plans = [reason for reason in found.lost.items() if reason[0].startswith(OF_PLANS)]
    refused = [reason for reason in found.lost.items() if reason not in of_plans]
    lines = [f"of {found.considered:,} plans, {len(found):,} fit. The others are larger or slower:"]
    lines += [f"{count:>9,}  {reason}" for reason, count in of_plans]
    if refused:
        lines += [f"{sum(count for _, count in refused):,} layouts of ranks are not among these plans:"]
        lines += [f"{count:>9,}  {reason}" for reason, count in refused[:_REASONS]]
        rest = sum(count for _, count in refused[_REASONS:])
        lines += [f"{rest:>9,}  for other reasons"] if rest else []
    return "\n".join(lines)


if __name__ == "__main__":
    ended(main)
