"""The flag of the engine hf reaches it, and is refused beside other engines."""

from __future__ import annotations

from training.utils.base.errors import Mistakes
from training.utils.contracts.rollout_engine import RolloutSettings
from training.utils.flags.flags import note_mistakes
from training.utils.generation.engines.arguments import PREFILL_TOKENS, HfArguments
from training.utils.generation.engines.hf import TransformersRollout
from training.utils.generation.table import RolloutEngineFlags


def test_the_flag_reaches_the_engine():
    assert TransformersRollout.create(None, RolloutSettings(64, HfArguments(7)))._prefill_tokens == 7
    assert TransformersRollout()._prefill_tokens == HfArguments().prefill_tokens == PREFILL_TOKENS


def test_what_cannot_be_is_refused():
    mistakes, flags = Mistakes(), RolloutEngineFlags()
    note_mistakes(HfArguments(0), mistakes)
    flags.hf.prefill_tokens = 1024  # type: ignore[attr-defined]
    flags.refuse_others("other", mistakes)
    assert mistakes.sentences == [
        "--prefill_tokens expects 1 or more, got 0",
        "--prefill_tokens: of --rollout_engine hf, and it is other; leave out what has no effect",
    ]
