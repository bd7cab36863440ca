"""Signs of a gamed reward in the log of a run's evaluations."""

from __future__ import annotations

from types import SimpleNamespace

from threestep.plugins.report.gaming.values import values_of
from threestep.plugins.report.gaming.watch import RewardWatch, open_watch
from training.utils.run.run_folder import RunFolder


def samples(step: int, check: float) -> list[dict]:
    return [
        {
            "step": step, "prompt": "one", "response": "r", "prompt_index": index, "reward": step + index % 3 / 10,
            "response_tokens": 3, "check": check + index % 2 / 10,
        }
        for index in range(30)
    ]  # fmt: skip


def test_a_gamed_reward_is_in_the_log_of_an_evaluation(tmp_path, capsys):
    """The first evaluation's samples come from the file, also where later ones stand behind them."""
    folder = RunFolder(tmp_path, is_main_rank=True)
    for step, check in ((0, 0.8), (5, 0.8)):
        folder.append_samples(samples(step, check))
        folder.append_samples([{**each, "greedy": True, "reward": 99.0} for each in samples(step, check)])
    watch = RewardWatch(folder, values_of("my.py:mine", "gsm8k"))
    [sign] = watch.signs(10, samples(10, 0.4))
    assert sign.startswith("the score rose by 10 ") and "checker, which is not trained on, fell by 0.4" in sign
    assert watch.signs(10, samples(10, 0.9)) == []
    assert watch.signs(0, samples(0, 0.1)) == []
    watch.samples(10, samples(10, 0.4))
    assert capsys.readouterr().out == f"PPO: after rollout 10 {sign}; see the report's section on it\n"
    assert RewardWatch(RunFolder(tmp_path, is_main_rank=False), watch.values).signs(10, samples(10, 0.4)) == []


def test_steps_without_rewards_have_no_watch(tmp_path):
    folder = RunFolder(tmp_path, is_main_rank=True)

    def opened(**settings: object) -> RewardWatch | None:
        return open_watch(SimpleNamespace(settings=settings, folder=folder))  # type: ignore[arg-type]

    assert opened(learning_rate=0.1) is None
    watch = opened(reward="model:1.0,gsm8k:0", checker=None)
    assert watch is not None and watch.values.held_out == ("reward/gsm8k",)
