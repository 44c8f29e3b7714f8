"""The front page: an animated picture, the paths through the course, and a map of its labs."""

from __future__ import annotations

import html
from collections.abc import Callable

from labs.source import course
from website import opening

TEMPLATE = "front.html"

TITLE = "See what travels between your GPUs"
LEAD = (
    "You write the program of one rank. tplab runs it on simulated ranks, in torch or JAX, and shows each message as "
    "it was sent. Change something:"
)
COMMAND = "python -m tplab.torchrun --nproc-per-node 8 --cluster h100 --html run.html train.py"
DOCTOR = "python -m tplab.doctor --nproc-per-node 4 train.py"
CHOICES = (
    ("ranks", "Ranks", tuple((str(ranks), str(ranks)) for ranks in opening.RANKS)),
    ("shift", "Send to", (("1", "next rank"), ("-1", "previous rank"))),
    ("without", "Leave out", (("0", "nothing"), *((str(line), f"line {line}") for line in opening.LEFT_OUT[1:]))),
)
"""The reader's choices for the program: an attribute of `Ring`, its label, and values with their labels."""


def body(
    labs: list[course.Lab],
    shown: opening.Opening,
    figure: str,
    ddp: str,
    thumbnail: Callable[[str], str],
    repository: str,
) -> str:
    """The page of these labs as HTML, without blank lines, since one would end it in Markdown.

    shown       the outputs of the page's programs
    figure      the animated picture
    ddp         the timeline of a script with DDP
    thumbnail   gives the HTML of a small picture of a lab, by the lab's name
    """
    total = course.hours(sum(lab.minutes for lab in labs))
    first = labs[0]
    deadlock, finding = shown.deadlock, shown.finding
    lines = [
        '<div class="front">',
        f'<section class="hero"><h1>{TITLE}</h1><p class="lead">{LEAD}</p>',
        f'<div class="try"><div class="change">{opening.marked(opening.FIRST.source, set())}',
        f'<p class="says" aria-live="polite">{html.escape(shown.says(opening.FIRST))}</p>',
        f'<form class="choices" hidden>{"".join(_choice(*choice) for choice in CHOICES)}</form>',
        f'<p class="doors"><a class="door" href="labs/{first.name}.html">Start the first lab</a>'
        '<a href="readme.html#two-commands">Install it</a></p></div>',
        figure,
        f'</div><script type="application/json" id="runs">{shown.choices()}</script>',
        "</section>",
        '<section class="own"><h2>Your own script</h2><p>A script that you start with <code>torchrun</code> runs as it '
        "is, on a laptop without a GPU. Here two ranks send before they receive, and the error names both lines:</p>",
        '<div class="beside">',
        opening.marked(opening.HANG, opening.lines_named(deadlock, "hang.py")),
        f"<pre>DeadlockError: {html.escape(deadlock)}</pre></div>",
        "<h3>What DDP sends, and when</h3><p>An ordinary training script on eight simulated GPUs, with the times of "
        "an H100's data sheet. In its first step, DDP sends all gradients at the end, in one piece. From the second "
        f"step on, it sends them while the backward pass is running.</p><pre>$ {COMMAND}</pre>",
        ddp,
        "<h3>Does it train the same model?</h3><p>The doctor runs a script on four ranks and on one, compares every "
        "gradient, and states a cause only if a run with its repair was right.</p>"
        f"{opening.marked(opening.SUM, _first_line(finding))}",
        f"<pre>$ {DOCTOR}\n&#8203;\n{html.escape(finding)}</pre>",
        '<p><a href="docs/torch_distributed.html">What is supported</a> · '
        '<a href="labs/on_monday.html">What things are called in other libraries</a> · '
        f'<a href="{html.escape(repository)}">The code</a></p></section>',
        '<section class="paths"><h2>Three paths</h2><div class="three">',
        *(_path(path, members) for path in course.PATHS if (members := course.along(path, labs))),
        "</div></section>",
        f'<section class="map" id="course"><h2>The course</h2><p class="under">{len(labs)} labs, {total}. '
        '<span class="pointed">A lab under the pointer is joined to those that it builds on.</span></p>',
        *(_part(index, part, members, thumbnail) for index, (part, members) in enumerate(course.parts(labs), 1)),
        "</section>",
        "</div>",
    ]
    return "\n".join(lines)


def _first_line(finding: str) -> set[int]:
    """The line at fault, without other lines that the report names."""
    return opening.lines_named(finding[: finding.index("also see")] if "also see" in finding else finding, "train.py")


def _choice(name: str, label: str, values: tuple[tuple[str, str], ...]) -> str:
    buttons = "".join(
        f'<label><input type="radio" name="{name}" value="{value}"'
        f"{' checked' * (value == str(getattr(opening.FIRST, name)))}><span>{text}</span></label>"
        for value, text in values
    )
    return f"<fieldset><legend>{label}</legend>{buttons}</fieldset>"


def _path(path: course.Path, members: list[course.Lab]) -> str:
    links = "\n".join(
        f'<li><a href="labs/{lab.name}.html"><i>{lab.number}</i> {html.escape(lab.title)}</a></li>' for lab in members
    )
    time = course.hours(sum(lab.minutes for lab in members))
    return (
        f'<div class="path"><h3>{html.escape(path.title)}</h3>\n<p>{html.escape(path.about)}</p>\n'
        f'<ol>\n{links}\n</ol>\n<p class="time">{time}</p></div>'
    )


def _part(index: int, part: course.Part, members: list[course.Lab], thumbnail: Callable[[str], str]) -> str:
    time = course.hours(sum(lab.minutes for lab in members))
    tiles = "\n".join(_tile(lab, thumbnail(lab.name)) for lab in members)
    return (
        f'<div class="part"><div class="about"><h3><i>{index}</i> {html.escape(part.title)}</h3>\n'
        f'<p>{html.escape(part.about)}</p>\n<p class="time">{time}</p></div>\n'
        f'<div class="tiles">\n{tiles}\n</div></div>'
    )


def _tile(lab: course.Lab, picture: str) -> str:
    needs = f"builds on {', '.join(lab.needs)}" if lab.needs else "needs no other lab"
    return (
        f'<a class="tile" id="lab-{lab.number}" href="labs/{lab.name}.html" data-needs="{" ".join(lab.needs)}">'
        f'<span class="frame">{picture}</span>\n'
        f"<b><i>{lab.number}</i> {html.escape(lab.title)}</b>\n<span>{html.escape(lab.question)}</span>\n"
        f"<small>{lab.minutes} min, {needs}</small></a>"
    )
