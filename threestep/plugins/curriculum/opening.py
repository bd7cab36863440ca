"""The source of prompts that a run's flags name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from threestep.plugins.curriculum.arguments import CurriculumArguments
from threestep.plugins.curriculum.prompts import EpochSampler, PromptDataset, PromptSampler, SampledPrompts
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import call_user, load_named
from training.utils.data.build.row_maker import PromptMaker

if TYPE_CHECKING:
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rows import PromptRow
    from training.utils.engine.ranks.startup import Ranks


def open_prompts(
    flags: PpoFlags,
    prompts: Sequence[PromptRow],
    tokenizer: Any,
    texts_of: Callable[[Rollout], Sequence[str]],
    *,
    ranks: Ranks,
) -> SampledPrompts:
    """Return the source of a run's flags."""
    if not flags.run.shuffle:
        raise ThreestepError(
            "--shuffle false uses the prompts in the order of the data, but --prompt_sampler and --prompt_dataset "
            "choose prompts in their own order; remove --shuffle false, or remove those flags"
        )
    return chosen_prompts(
        prompts,
        flags.added.of(CurriculumArguments),
        lambda: PromptMaker(flags.data, tokenizer),
        texts_of=texts_of,
        seed=flags.run.seed,
        ranks=ranks,
    )


def chosen_prompts(
    prompts: Sequence[PromptRow],
    named: CurriculumArguments,
    make_maker: Callable[[], PromptMaker],
    *,
    texts_of: Callable[[Rollout], Sequence[str]],
    seed: int,
    ranks: Ranks,
) -> SampledPrompts:
    """Return the source; ThreestepError if FILE.py:NAME is not a class of the right kind."""
    dataset, sampler_class = None, EpochSampler
    if named.prompt_dataset is not None:
        dataset_class = _class_of(named.prompt_dataset, "--prompt_dataset", PromptDataset)
        prompts = dataset = call_user(dataset_class, prompts, make_maker(), seed)
    if named.prompt_sampler is not None:
        sampler_class = _class_of(named.prompt_sampler, "--prompt_sampler", PromptSampler)
    return SampledPrompts(prompts, call_user(sampler_class, prompts, seed), dataset, texts_of, ranks)


def _class_of(address: str, flag: str, kind: type) -> Any:
    loaded = load_named(address, flag)
    if not isinstance(loaded, type) or not issubclass(loaded, kind):
        raise ThreestepError(f"{flag}: '{address}' is not a subclass of {kind.__module__}.{kind.__name__}")
    missing = getattr(loaded, "__abstractmethods__", ())
    if missing:
        raise ThreestepError(f"{flag}: '{address}' must define {', '.join(sorted(missing))}")
    return loaded
