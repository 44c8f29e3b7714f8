"""`python -m website`: the labs as a static site, in build/site, where widgets play without a kernel.

    states    runs each lab once, and keeps the states of its widgets
    cards     a widget of a page: a still picture, and the data from which it is drawn
    pages     the pages that Sphinx reads, made from the notebooks, the README and docs/
    reference, docstrings, monday   the reference pages, and the page of names in other libraries
    conf      Sphinx's configuration
    policy    the Content-Security-Policy of a page: what it may load, and from where
    mathml    formulas as MathML, which browsers draw themselves
    pyodide   Python for the pipeline lab of a page: Pyodide's core, tplab's sources; worker.js runs it
    compiled  NumPy for browsers, downloaded into the site if possible
    front     the front page: a program to change, the paths, the map of the course; opening has its programs
    lite      JupyterLite, which runs labs without a framework as notebooks in the reader's browser
    static/   what the site adds to its theme; play.js draws the widgets

Sphinx, with myst-nb and the theme furo, makes the pages out of build/site-pages. A page loads nothing from another
host, except that the pipeline lab loads NumPy if it could not be put into the site. A notebook in JupyterLite loads
NumPy and Pillow when a cell imports tplab.
"""
