"""The front page: a picture that plays, the paths through the course, and a map of its labs."""

from __future__ import annotations

import html
from collections.abc import Callable

from labs.source import course

TEMPLATE = "front.html"

TITLE = "See what travels between your GPUs"
LEAD = (
    "tplab runs parallel programs on simulated ranks, in torch or JAX, and shows what each rank sends and where it "
    "waits. Models are compared with the unsharded ones.",
    "A script that you start with <code>torchrun</code> runs unchanged, on a laptop without a GPU. If it hangs, you "
    "see which lines wait for each other.",
    "The course around it takes a transformer apart, step by step, with pictures of runs that you can repeat and "
    "change.",
)
HANG = """\
$ python -m tplab.torchrun --nproc-per-node 8 --cluster h100 --html run.html train.py

tplab.torchrun: DeadlockError: no rank can go on:
  rank 0 waits in send(x, 'world', 1) at train.py:4 for rank 1
  rank 1 waits in send(x, 'world', 0) at train.py:4 for rank 0"""


def body(labs: list[course.Lab], figure: str, thumbnail: Callable[[str], str], repository: str) -> str:
    """The page of these labs as HTML, without a blank line, at which Markdown would end it.

    figure      the picture that plays
    thumbnail   gives the HTML of a small picture of a lab, by the lab's name
    """
    total = course.hours(sum(lab.minutes for lab in labs))
    first = labs[0]
    lines = [
        '<div class="front">',
        f'<section class="hero"><div class="words"><h1>{TITLE}</h1>',
        *(f"<p>{sentence}</p>" for sentence in LEAD),
        f'<p class="doors"><a class="door" href="labs/{first.name}.html">Start the first lab</a>'
        '<a href="readme.html#two-commands">Install it</a></p></div>',
        figure,
        "</section>",
        '<section class="paths"><h2>Three paths</h2><div class="three">',
        *(_path(path, members) for path in course.PATHS if (members := course.along(path, labs))),
        "</div></section>",
        f'<section class="map" id="course"><h2>The course</h2><p class="under">{len(labs)} labs, {total}. '
        "Point at a lab to see which ones it builds on.</p>",
        *(_part(index, part, members, thumbnail) for index, (part, members) in enumerate(course.parts(labs), 1)),
        "</section>",
        '<section class="own"><h2>Your own script</h2><p>Keep the script as it is and change the command. You get '
        "every message on a timeline in one page, the bytes of each group, and the longest waits. If ranks call "
        "different collectives or wait for each other forever, an error names both lines, at once.</p>",
        f"<pre>{html.escape(HANG).replace(chr(10) * 2, chr(10) + '&#8203;' + chr(10))}</pre>",
        '<p><a href="docs/torch_distributed.html">What is supported</a> · '
        '<a href="labs/on_monday.html">What things are called in other libraries</a> · '
        f'<a href="{html.escape(repository)}">The code</a></p></section>',
        "</div>",
    ]
    return "\n".join(lines)


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
