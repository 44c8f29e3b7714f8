"""A page of forecasts: a table, time against memory, the parts of a step, the memory of each rank; without scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from tplab.forecast.forecast import GIB, LOST, NAMES, Forecast
from tplab.forecast.ranking import OF_PLANS

_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#b8a000", "#7f7f7f", "#8c6bb1", "#bcbd22")
"""The Okabe-Ito palette, which colour-blind readers can tell apart."""
_PARTS = {"computing": "computing"} | {name: text for name, (text, _) in LOST.items()}

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: light-dark(#1a1a1a, #e6e6e6); --line: light-dark(#d0d0d0, #444); }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 64rem; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top; }}
th:nth-child(2), td:nth-child(2) {{ text-align: left; }} td:nth-child(4) {{ white-space: nowrap; }}
svg {{ width: 100%; height: auto; }} svg text {{ fill: var(--ink); font-size: 12px; }}
.axis {{ stroke: var(--line); }} .limit {{ stroke: #d55e00; stroke-dasharray: 5 4; }}
.key {{ display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; vertical-align: -1px; }}
</style>
<h1>{title}</h1>
<p>{about}</p>
<table><tr><th>#<th>plan<th>seconds<th>low to high<th>tokens/s per GPU<th>MFU<th>GiB</tr>
{rows}
</table>
<h2>The first, and why</h2>
<p>{why}</p>
<h2>Time and memory</h2>
<p>Each dot is a plan, with its number; the dashed line is what a GPU has.</p>
{dots}
<h2>A step, part by part</h2>
<p>{parts_key}</p>
{parts}
<h2>What the worst rank holds at its peak</h2>
<p>{kinds_key}</p>
{kinds}
<h2>Why the others lost</h2>
<ul>{lost}</ul>
</html>
"""


def to_page(title: str, about: str, found: Sequence[Forecast], lost: Mapping[str, int]) -> str:
    """An HTML page of the plans in `found`, the best first; `lost`: see `Plans`."""
    parts = [{name: one.parts.get(name, 0.0) for name in _PARTS} for one in found]
    kinds = [{name: getattr(one.peak, name) / GIB for name in NAMES} for one in found]
    reasons = (
        (" plans" if why.startswith(OF_PLANS) else " layouts of ranks", why, count) for why, count in lost.items()
    )
    return _PAGE.format(
        title=escape(title),
        about=escape(about),
        rows="\n".join(_rows(found)),
        why=escape(found[0].why[0].upper() + found[0].why[1:]) + ".",
        dots=_dots(found),
        parts_key=_key(_PARTS),
        parts=_bars(parts, "s"),
        kinds_key=_key(NAMES),
        kinds=_bars(kinds, "GiB"),
        lost="".join(f"<li>{count:,}{what}: {escape(why)}" for what, why, count in reasons),
    )


def _rows(found: Sequence[Forecast]) -> Iterator[str]:
    for number, one in enumerate(found, 1):
        rate = f"{one.tokens_per_second_per_gpu:,.0f}<td>{one.mfu:.1%}<td>{one.peak.total / GIB:.1f}"
        took = f"{one.seconds:.3g}<td>{one.between}"
        yield f"<tr><td>{number}<td>{escape(str(one.plan))}<td>{took}<td>{rate}</tr>"


def _dots(found: Sequence[Forecast]) -> str:
    """A scatter plot: seconds along x, GiB along y."""
    width, height, left, low = 900, 300, 60, 270
    fast, slow = (few(one.seconds for one in found) for few in (min, max))
    begin, end = fast - 0.05 * slow, slow + 0.05 * slow
    most = 1.05 * max(found[0].usable, *(one.peak.total for one in found))
    limit = low - found[0].usable / most * (low - 10)
    lines = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="seconds and GiB of each plan">',
        f'<line class="axis" x1="{left}" y1="{low}" x2="{width}" y2="{low}"/>',
        f'<line class="axis" x1="{left}" y1="10" x2="{left}" y2="{low}"/>',
        f'<line class="limit" x1="{left}" y1="{limit:.0f}" x2="{width}" y2="{limit:.0f}"/>',
        f'<text x="0" y="{limit + 4:.0f}">{found[0].usable / GIB:.0f} GiB</text>',
        f'<text x="{left}" y="{low + 20}">{begin:.3g} s</text>',
        f'<text x="{width}" y="{low + 20}" text-anchor="end">{end:.3g} s</text>',
    ]
    for number, one in reversed([*enumerate(found, 1)]):
        x, y = left + (one.seconds - begin) / (end - begin) * (width - left), low - one.peak.total / most * (low - 10)
        color = _COLORS[2] if number == 1 else _COLORS[0]
        words = f"<title>{escape(str(one))}</title>"
        lines.append(f'<g>{words}<circle cx="{x:.0f}" cy="{y:.0f}" r="5" fill="{color}"/>')
        lines.append(f'<text x="{x + 7:.0f}" y="{y + 4:.0f}">{number}</text></g>')
    return "\n".join([*lines, "</svg>"])


def _bars(rows: Sequence[Mapping[str, float]], unit: str) -> str:
    """One stacked bar per plan."""
    width, left, step = 900, 30, 24
    longest = max(sum(row.values()) for row in rows)
    lines = [f'<svg viewBox="0 0 {width} {step * len(rows)}" role="img" aria-label="parts of each plan">']
    for place, row in enumerate(rows):
        x = float(left)
        lines.append(f'<text x="0" y="{place * step + 15}">{place + 1}</text>')
        for color, (name, amount) in zip(_COLORS, row.items()):
            wide = amount / longest * (width - left)
            said = f"<title>{escape({**_PARTS, **NAMES}[name])}: {amount:.3g} {unit}</title>"
            at = f'x="{x:.1f}" y="{place * step + 2}" width="{wide:.1f}" height="{step - 4}"'
            lines.append(f'<rect {at} fill="{color}">{said}</rect>')
            x += wide
    return "\n".join([*lines, "</svg>"])


def _key(names: Mapping[str, str]) -> str:
    return "".join(
        f'<span class="key" style="background:{color}"></span>{escape(name)}'
        for color, name in zip(_COLORS, names.values())
    )
