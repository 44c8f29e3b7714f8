"""`python -m website`: the labs as a static site, in build/site, where widgets play without a kernel.

    states    runs each lab once, and keeps what its widgets show
    cards     a widget of a page: a still picture, and beside it the data from which it is drawn
    pages     the pages that Sphinx reads, made from the notebooks, the README and docs/
    conf      Sphinx's configuration
    mathml    formulas as MathML, which browsers draw themselves
    static/   what the site adds to its theme; play.js draws the widgets

Sphinx, with myst-nb and the theme furo, makes the pages out of build/site-pages. A page loads
nothing from another host.
"""
