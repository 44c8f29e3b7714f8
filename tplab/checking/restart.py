"""What a script that is started again begins with, beside the run that goes on."""

from __future__ import annotations

from tplab.checking.facts import Facts, Found, same
from tplab.checking.gaps import farthest
from tplab.checking.samples import compare_samples
from tplab.checking.starts import NeedsWeights, weights


def lost(facts: Facts) -> Found:
    """Weights, or samples, that are not those of the run that goes on. Here nothing is handed over."""
    forward, found = facts.line("forward"), compare_samples(facts.mine, facts.theirs)
    try:
        list(weights(facts, may_ask=True))
    except NeedsWeights as needs:
        theirs = facts.reference.weights
        name, *others = [name for name, x in needs.weights.items() if not same(x, theirs[name])]
        values = farthest(needs.weights[name], theirs[name])
        got, want = f"{values[0]:.6g}", f"{values[1]:.6g}"
        words, where = "not those with which the run goes on", facts.ours[0].lines.get("weights", forward)
        yield facts.fault("weights", name, words, None, where, "", values=(got, want), others=others, lines=[forward])
        return
    if found.kind in ("more", "other"):
        words, where = f"{found.words}, which goes on", facts.line_of_data() or forward
        yield facts.fault("samples", "", words, None, where, "", lines=[forward])
