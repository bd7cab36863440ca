"""The section on gamed rewards as a page has it."""

from __future__ import annotations

import json

from threestep.plugins.report.figures.reading import read_runs
from threestep.plugins.report.pages.page import parts_of


def samples(check_after: float) -> list[dict]:
    return [
        {"step": step, "prompt_index": index, "sample": 0, "uid": f"u{index}", "prompt": "<b>p", "response_tokens": 3,
         "response": "owl " * (1 + index % 3 + step), "reward": 1 + index % 3 + step,
         "check": check_after if step else 0.5 + 0.1 * (index % 2)}
        for step in (0, 2) for index in range(60)
    ]  # fmt: skip


def written(ppo_run, check_after: float, name: str = "ppo", settings: str = "checker: gsm8k\n") -> str:
    folder = ppo_run(name=name, samples=samples(check_after))
    (folder / "config.yaml").write_text(f"program: training.step3_ppo.main\nreward: model\n{settings}")
    lines = [
        *({"step": step, "rollout/kl": 0.1 * step} for step in (1, 2)),
        *({"step": at, "eval/reward": 2.0 + at, "eval/check": 0.5} for at in (0, 1, 2)),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_a_gamed_reward_is_on_the_page_with_its_pairs(ppo_run):
    parts = parts_of(read_runs([written(ppo_run, 0.1)]))
    assert ("gaming", "Is the reward being gamed?") in parts.sections
    html = parts.html["gaming"]
    assert (
        '<p class="warning">The score rose by 2 ' in html and "while checker, which is not trained on, fell by" in html
    )
    assert "10 responses whose score rose most while a held-out value fell" in html and "&lt;b&gt;p" in html
    assert "pairs of neighbouring words" in html and "A linear model of these features" in html
    assert "gaming-0" in parts.drawings and 'data-chart="gaming-0"' in html
    assert "it does not promise to warn" in html
