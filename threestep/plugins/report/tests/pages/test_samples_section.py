"""Samples as HTML: escaped, coloured by what is better, every kind of step under a heading of its own."""

from __future__ import annotations

import pytest

from threestep.plugins.report.figures.reading import read_runs
from threestep.plugins.report.pages.samples_section import samples_section
from threestep.plugins.report.tests.conftest import PAIRS, SAMPLES, pair_sample


def section(*folders) -> str:
    return samples_section([step for run in read_runs(folders) for step in run.steps])


def test_pairs_are_escaped_and_coloured(pair_run):
    html = section(pair_run("one", PAIRS, "training.step2_dpo.main"))
    assert "good &lt;b&gt;" in html and "good <b>" not in html
    assert "<span>implicit reward <b>0.5 → 0</b></span>" in html
    assert '<span>margin <b class="bad">0.25 → -8</b></span>' in html and "below 0 the order is wrong" in html


@pytest.mark.parametrize("broken", [{"scores": 3}, {"responses": 4}, {"responses": [None, {}]}, {"margin": "x"}])
def test_what_is_not_as_expected_is_a_gap(pair_run, broken):
    assert section(pair_run("one", [*PAIRS, {**pair_sample(9, 50, 1.0, 2.0), **broken}]))


def test_pictures_stand_below_the_prompt_of_every_kind_of_step(ppo_run, pair_run):
    folders = [
        pair_run("pairs", [{**sample, "images": ["c" * 64]} for sample in PAIRS]),
        ppo_run("answers", [{**sample, "images": ["c" * 64]} for sample in SAMPLES]),
    ]
    for folder in folders:
        before = section(folder)
        assert "<img" not in before and before.count("1 image not shown") == before.count('class="card sample"') > 0
        (folder / "sample_pictures").mkdir()
        (folder / "sample_pictures" / f"{'c' * 64}.png").write_bytes(b"a picture")
        html = section(folder)
        shown = '<div class="pictures"><img src="data:image/png;base64,YSBwaWN0dXJl" alt="image 1 of 1"></div>'
        assert html.count(shown) == html.count('class="card sample"') and "not shown" not in html


def test_turns_of_conversations_stand_apart(ppo_run):
    acted = {
        "parts": [["model", " [look(<b>)]"], ["environment", "Tool: 37"], ["model", " 37"]],
        "turns": 2, "cut_by": "turns", "ended": False, "environment_figures": {"right": 1.0, "cut_answers": 0.0},
    }  # fmt: skip
    html = section(ppo_run("one", [{**sample, **acted} for sample in SAMPLES]))
    model, environment = (f'<span class="soft">{who}</span>' for who in ("model", "environment"))
    turns = [f'<div class="said">{model}<div>{text}</div></div>' for text in ("[look(&lt;b&gt;)]", "37")]
    assert f'{turns[0]}<div class="heard">{environment}<div>Tool: 37</div></div>{turns[1]}' in html
    assert "<span>turns <b>2</b></span><span>right <b>1</b></span>" in html and "cut_answers" not in html
    assert '<span class="bad">cut by the turn limit</span>' in html
    # Long ones end with how many parts are left, and files of users may hold anything.
    long = {**acted, "parts": [["model", "a" * 4000], ["environment", "b"], ["model", "c"]]}
    assert "(2 more parts)" in section(ppo_run("two", [{**sample, **long} for sample in SAMPLES]))
    for broken in ({"parts": 3}, {"parts": [[]]}, {"turns": "x"}, {"environment_figures": []}, {"cut_by": 3}):
        assert section(ppo_run(f"broken {broken}", [{**sample, **acted, **broken} for sample in SAMPLES]))
