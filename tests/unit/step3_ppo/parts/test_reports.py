"""Reports of rollouts with their updates: what the progress shows, and a warning of many responses that are cut."""

from __future__ import annotations

from types import SimpleNamespace

from training.step3_ppo.parts.reports import Reports, shown


def made_reports() -> Reports:
    sampling = SimpleNamespace(max_new_tokens=4)
    roles = SimpleNamespace(actor=SimpleNamespace(ranks=SimpleNamespace(is_main=True)))
    return Reports(roles, SimpleNamespace(drawing=SimpleNamespace(sampling=sampling)), None)


def test_many_cut_responses_are_said_once_with_their_share(capsys):
    reports = made_reports()
    for iteration, cut_share in enumerate((0.04, 0.25, 0.5), start=1):
        reports.warn_of_cut({"rollout/ended_share": 1 - cut_share}, iteration)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "warning: 25% of the responses of rollout 2 were cut at --max_answer_seq_len 4 tokens before"
    )
    made_reports().warn_of_cut({"rollout/ended_share": 0.5, "conversation/turns": 2.0}, 1)
    assert "were cut at the limits of conversations (conversation/cut_by_... in metrics.jsonl tells which) before" in (
        capsys.readouterr().out
    )


def test_the_progress_shows_what_a_rollout_has():
    figures = {"rollout/score": 0.5, "rollout/ended_share": 0.75, "train/tokens_per_second": 1200.4}
    rates = {"critic/learning_rate": 2e-5}
    assert [str(figure) for figure in shown({**figures, **rates})] == [
        "score 0.500", "cut at the length limit 25%", "learning rate 2.00e-05", "1,200 tok/s"
    ]  # fmt: skip
    whole = {**figures, **rates, "rollout/ended_share": 1.0, "rollout/kl": 0.125, "actor/learning_rate": 1e-5}
    assert [str(figure) for figure in shown(whole)][1:3] == ["KL 0.125", "learning rate 1.00e-05"]
