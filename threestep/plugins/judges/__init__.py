"""Rewards from a service: language models that judge with a rubric, and reward models behind HTTP."""

from training.utils.plugins.plugin import Plugin, RewardEntry

_HTTP = RewardEntry(
    f"{__name__}.http_reward:http_reward",
    name=f"{__name__}.names:server_name",
    check=f"{__name__}.judge:check_entry",
    form="http:URL",
    note="a reward model behind HTTP",
)

PLUGIN = Plugin(
    "judges",
    "rewards from a service: judges and reward models behind HTTP",
    needs=("serving",),
    tables={
        "rewards": {
            "judge:": RewardEntry(
                f"{__name__}.judge:judge_reward",
                name=f"{__name__}.names:judge_name",
                check=f"{__name__}.judge:check_entry",
                form="judge:FILE.yaml",
                note="a language model with a rubric",
            ),
            "http:": _HTTP,
            "https://": _HTTP,
        }
    },
)
