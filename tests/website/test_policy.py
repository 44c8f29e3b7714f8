"""What a page of the site may load: from the site, and NumPy for the pipeline lab."""

from __future__ import annotations

import re

from website import policy, pyodide


def rules(has_lab: bool) -> dict[str, list[str]]:
    return {rule.split()[0]: rule.split()[1:] for rule in policy.policy(has_lab).split("; ")}


def test_a_page_may_ask_no_other_host():
    plain = rules(has_lab=False)
    assert plain["default-src"] == ["'self'"]
    assert "://" not in policy.policy(has_lab=False)
    scripts = plain["script-src"]
    assert scripts[0] == "'self'" and len(scripts) == 2 and re.fullmatch(r"'sha256-[\w+/]{43}='", scripts[1])


def test_a_pipeline_lab_may_ask_for_numpy_and_for_nothing_else():
    plain, lab = rules(has_lab=False), rules(has_lab=True)
    assert {name for name in lab if lab[name] != plain.get(name)} == {"script-src", "worker-src", "connect-src"}
    assert lab["script-src"] == [*plain["script-src"], "'wasm-unsafe-eval'"]
    assert lab["worker-src"] == ["'self'", "blob:"]
    assert lab["connect-src"] == ["'self'", pyodide.numpy_from()]


def test_it_can_stand_in_an_attribute():
    assert re.fullmatch(r'<meta http-equiv="Content-Security-Policy" content="[^"<>&]+">', policy.meta(has_lab=True))
