"""`python -m website`: the labs as a static site, in build/site, where widgets play without a kernel.

    states    runs each lab once, and keeps what its widgets show
    cards     a widget of a page: a still picture, and beside it the data from which it is drawn
    pages     the pages that Sphinx reads, made from the notebooks, the README and docs/
    reference, docstrings, monday   the pages of reference, and what things are called elsewhere
    conf      Sphinx's configuration
    policy    the Content-Security-Policy of a page: from where it may load what
    mathml    formulas as MathML, which browsers draw themselves
    pyodide   Python for the pipeline lab of a page: Pyodide's core, tplab's sources; worker.js runs it
    compiled  NumPy for browsers, downloaded into the site where that is possible
    front     the front page: what a reader can change, the paths, the map of the course; opening has its programs
    lite      JupyterLite, which runs labs without a framework as notebooks in the reader's browser
    static/   what the site adds to its theme; play.js draws the widgets

Sphinx, with myst-nb and the theme furo, makes the pages out of build/site-pages. A page loads
nothing from another host; only where NumPy could not be put into the site, the pipeline lab asks for it. A notebook in
JupyterLite loads NumPy and Pillow, once a cell imports tplab.
"""
