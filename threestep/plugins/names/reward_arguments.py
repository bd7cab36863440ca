"""Arguments that reward functions written for other libraries expect, and what to write instead; NAME is the
function's."""

from __future__ import annotations

_OF_TRL = {  # 1.16
    "completion_ids": "use completions and tokenize them",
    "completions_ids": "use completions and tokenize them",
    "prompt_ids": "use prompts, or --return_columns raw_prompt_ids",
    "trainer_state": "follow the run with a callback (step, figures)",
    "log_extra": "return (scores, {name: one number per response})",
    "log_metric": "return (scores, {name: one number per response})",
    "environments": "use --environment, which gives rewards itself",
}
REWARD_ARGUMENTS = {
    **{
        name: f"which only TRL passes; {remedy}, and remove {name} or give it a default"
        for name, remedy in _OF_TRL.items()
    },
    "solution_str": (
        "which only verl passes, for one response at a time; add this function and pass it instead: `def reward("
        "prompts, responses, *, data_source, ground_truth, **columns): "
        "return list(map(NAME, data_source, responses, ground_truth))`; if NAME takes extra_info, add it to both lists"
    ),
}
