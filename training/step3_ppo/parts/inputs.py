"""Inputs of a run of step 3: tokenizers, prompts, further training data, and the number of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from training.step3_ppo.contracts.records import LearntBeside
from training.step3_ppo.contracts.rollouts import PromptSource
from training.step3_ppo.roles.roles import Tokenizers
from training.utils.base.console import counted, log
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import named_object
from training.utils.contracts.rows import MEDIA_COLUMN
from training.utils.data.build.build import build_phase, settle_style
from training.utils.data.cache.cache import silent
from training.utils.data.chat.style import conversation_end, save_style, saved_style
from training.utils.data.rows.documents import prompt_document
from training.utils.data.rows.tokenize import end_of_conversation_id
from training.utils.layout.order import steps_in
from training.utils.loading.configurations import saved_stop_tokens
from training.utils.loading.tokenizers import load_tokenizer, same_tokenizer
from training.utils.models.stop_tokens import joined_stop_tokens, unused_stop_tokens
from training.utils.plugins.registry import asked_for
from training.utils.rewards.functions import check_columns
from training.utils.rewards.weighted import reads_messages
from training.utils.setup.media import reader_of_start, run_media
from training.utils.setup.opened_run import RunData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.step3_ppo.flags.checks import Components
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.contracts.media import RunMedia, SeenMedia
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rows import PromptRow
    from training.utils.data.chat.style import PromptStyle
    from training.utils.data.rows.arguments import ChatArguments
    from training.utils.engine.ranks.startup import Ranks


def load_tokenizers(flags: PpoFlags, with_critic: bool = True) -> Tokenizers:
    """Load both; ThreestepError if actor and reward model would read different texts from the same ids. with_critic:
    whether anything is loaded from the critic's path."""
    roles = flags.roles

    def load(path: str) -> PreTrainedTokenizerBase:
        return load_tokenizer(path, roles.pad_token, trust_remote_code=roles.trust_remote_code)

    actor = load(roles.actor_model_name_or_path)
    if not with_critic:
        return Tokenizers(actor, None)
    critic = load(roles.critic_model_name_or_path)
    if not same_tokenizer(actor, critic):
        raise ThreestepError(
            f"the tokenizers of --actor_model_name_or_path '{roles.actor_model_name_or_path}' ({len(actor)} tokens) "
            f"and --critic_model_name_or_path '{roles.critic_model_name_or_path}' ({len(critic)} tokens) differ: the "
            "reward model would misread the actor's responses; train step 2 from a model with the actor's "
            "tokenizer"
        )
    return Tokenizers(actor, critic)


def share_style(tokenizers: Tokenizers, chat: ChatArguments, ranks: Ranks) -> str:
    """Save the actor's prompt style with the critic; return its name. A reward model of another style is a warning."""
    style = saved_style(tokenizers.actor)
    assert style is not None  # the run has adopted one
    if tokenizers.critic is not None:
        read = saved_style(tokenizers.critic)
        if read is not None and read != style:
            log(
                f"warning: the reward model '{tokenizers.critic.name_or_path}' was trained with a different prompt "
                f"style ({read}); train step 2 with the actor's style, or use the reward model's flags here",
                ranks.is_main,
            )
        if chat.chat_template is not None:
            tokenizers.critic.chat_template = tokenizers.actor.chat_template
        save_style(tokenizers.critic, style)
    return style.prompt_style


@dataclass(frozen=True)
class Inputs:
    """The trainer's inputs, and the length of the run.

    train, eval: the prompts. columns: names that any prompt carries.
    beside: what the actor also learns from. rollouts: of the run.
    end_token_ids: each ends a response: that of a conversation, which is trained, then those at which the model stops.
    data: of the prompts and what is learned beside them; a step is a rollout.
    media: of the prompts; seen: what was read of them; both None where no prompt has one.
    """

    train: PromptSource
    eval: Sequence[PromptRow]
    columns: Sequence[str]
    beside: LearntBeside
    rollouts: int
    end_token_ids: tuple[int, ...]
    data: RunData
    media: RunMedia | None = None
    seen: SeenMedia | None = None


class PpoOpening(NamedTuple):
    """Flags, the selection of their names, and the inputs, from which models and the loop's settings are made."""

    flags: PpoFlags
    components: Components
    tokenizers: Tokenizers
    inputs: Inputs
    ranks: Ranks


def load_inputs(
    flags: PpoFlags,
    components: Components,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    *,
    style: PromptStyle | None = None,
) -> Inputs:
    """Build phase 3's prompts and what is learned beside them, and count the rollouts that they make. ThreestepError
    for a row that opens no conversation with the partners, and for a rule that names a column which the rows lack.

    style: of the prompts, which may decide on it; `tokenizer` gets it.
    """
    run, data, ppo = flags.run, flags.data, flags.ppo
    if components.partners.is_there:  # who begin with the messages of a row
        data = replace(data, rows=data.rows.with_columns("raw_prompt"))
    if reads_messages(components.rewards):
        data = replace(data, rows=data.rows.with_columns("prompt_messages"))
    read = reader_of_start(flags.model("actor"), tokenizer)
    phase = build_phase("prompts", data, tokenizer, run.seed, is_main_rank=ranks.is_main, log=log, **read)
    if style is not None:
        most, say = data.rows.max_prompt_seq_len, log if ranks.is_main else silent
        settle_style(style, phase.train, tokenizer, say, most_tokens=most)
    media = run_media(chain(phase.train, phase.eval), phase.seen, prompt_document)
    for part in (phase.train, phase.eval):
        components.partners.check_rows(part)
    if ppo.val_only and not len(phase.eval):
        raise ThreestepError(
            "--val_only evaluates held-out prompts, but there are none; raise --eval_fraction (now "
            f"{data.split.eval_fraction:g}), add data with evaluation rows, or remove --val_only"
        )
    columns = sorted({**phase.report.train.columns, **phase.report.eval.columns})
    ends = _end_tokens(flags, tokenizer, ranks)
    source = _prompt_source(flags, phase.train, tokenizer, ends, ranks=ranks)
    if not source.makes_prompts:  # which may have other columns
        of_media = [] if phase.seen is None else [MEDIA_COLUMN]
        check_columns(components.rules, [*columns, *of_media], (phase.train, phase.eval))
    _, place = asked_for("learnt_beside", flags.settings, "the actor can have only one further source")
    beside = LearntBeside() if place is None else named_object(place)(flags, tokenizer, ranks)
    fingerprint = " ".join(filter(None, (phase.train.manifest["fingerprint"], beside.fingerprint)))
    return Inputs(
        train=source,
        eval=phase.eval,
        columns=columns,
        beside=beside,
        rollouts=_count_rollouts(flags, len(phase.train), ranks.world_size),
        end_token_ids=ends,
        data=RunData(phase.report, fingerprint, len(phase.train) / ppo.prompts_of_step(ranks.world_size)),
        media=media,
        seen=phase.seen,
    )


def _prompt_source(
    flags: PpoFlags,
    prompts: Sequence[PromptRow],
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    *,
    ranks: Ranks,
) -> PromptSource:
    """ends: the tokens that end a response."""
    if flags.prompt_source is None:
        return PromptSource(prompts, flags.run.seed, flags.run.shuffle)

    def texts_of(rollout: Rollout) -> list[str]:
        return rollout.texts(tokenizer.decode, ends)

    found: PromptSource = named_object(flags.prompt_source)(flags, prompts, tokenizer, texts_of, ranks=ranks)
    return found


def _end_tokens(flags: PpoFlags, tokenizer: PreTrainedTokenizerBase, ranks: Ranks) -> tuple[int, ...]:
    """Return the tokens, and log those of the model's own: which end responses, and which end nothing."""
    roles = flags.roles
    trained = end_of_conversation_id(tokenizer, conversation_end(flags.data.chat, tokenizer))
    own = saved_stop_tokens(roles.actor_model_name_or_path, roles.trust_remote_code)
    ends, unused = tuple(joined_stop_tokens(own, tokenizer, [trained])), unused_stop_tokens(own, tokenizer)
    if unused is not None:
        log(unused, ranks.is_main)
    if len(ends) > 1:
        words = ", ".join(str(word) for word in tokenizer.convert_ids_to_tokens(list(ends)))
        log(f"responses end at any of the model's end tokens: {words}", ranks.is_main)
    return ends


def _count_rollouts(flags: PpoFlags, prompts: int, world_size: int) -> int:
    ppo, critic_warmup = flags.ppo, flags.algorithm.critic_warmup
    prompts_per_rollout = ppo.prompts_of_step(world_size)
    rollouts = steps_in(prompts, ppo.num_train_epochs, prompts_per_rollout)
    if ppo.val_only:
        rollouts = 0
    elif rollouts == 0:
        raise ThreestepError(
            f"one rollout needs {prompts_per_rollout} prompts (--per_device_generation_batch_size x "
            f"--generation_batches x {counted(world_size, 'rank')}), but {counted(ppo.num_train_epochs, 'epoch')} of "
            f"{counted(prompts, 'prompt')} cannot fill it; lower the batch size, or add prompts or epochs"
        )
    if ppo.max_train_steps is not None:
        rollouts = min(rollouts, ppo.max_train_steps)
    if critic_warmup >= max(rollouts, 1):
        raise ThreestepError(
            f"--critic_warmup {critic_warmup} leaves none of the run's {rollouts} rollouts to train the actor; lower "
            "it, or add prompts or epochs"
        )
    return rollouts
