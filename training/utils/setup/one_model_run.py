"""A run that trains one model: everything before and after the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.base.console import log, log_on_main
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import PlannedDevice
from training.utils.checkpoints.parts import CheckpointParts
from training.utils.contracts.run import HeldOutRows
from training.utils.data.build.build import PhaseData, build_phase, settle_style
from training.utils.data.chat.style import PromptStyle, adopt_style
from training.utils.data.rows.documents import shared_share
from training.utils.data.rows.tokenize import end_of_conversation_id
from training.utils.engine.config.arguments import SEQUENCES_OF_A_FORWARD
from training.utils.engine.training_engine import TrainingEngine
from training.utils.engine.whole_model import WholeModel
from training.utils.flags.flags import AS_BEGUN, AutoChoice
from training.utils.layout.order import ShuffledStream
from training.utils.layout.planner import PlanSettings, forward_overhead_tokens
from training.utils.loading.configurations import check_positions, check_trains
from training.utils.loading.models import load_causal_lm, load_scalar_model
from training.utils.loading.tokenizers import add_tokens, load_padding_tokenizer, with_pad_apart
from training.utils.models.attention import plan_for
from training.utils.models.stop_tokens import set_stop_tokens, stop_tokens, unused_stop_tokens
from training.utils.models.token_model import PolicyModel, ScalarModel
from training.utils.models.weights import count_weights
from training.utils.setup.flags import chosen_by_plugin
from training.utils.setup.media import checked_media, processor_of, reader_of_start, with_kept_features
from training.utils.setup.opened_run import RunData, open_run
from training.utils.setup.setup import compute_meter, least_free_bytes, load_under, may_pack, may_share, whole_steps
from training.utils.setup.training_run import LoopSettings, TrainingRun

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.utils.contracts.media import RunMedia
    from training.utils.data.kinds.kind import RowKind
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.models.settings import ModelSettings
    from training.utils.setup.flags import CheckedStep, OneModelFlags
    from training.utils.setup.opened_run import OpenedRun
    from training.utils.setup.training_run import TrainingResult

# --share_beginnings auto looks at so many steps, and is on where one of them has this share of its tokens in common.
_STEPS_TO_LOOK_AT, _LEAST_SHARED_SHARE, _LEAST_SHARED_TOKENS = 4, 0.01, 64


def run_one_model(
    step: CheckedStep,
    train: Callable[[TrainingRun[Any], OneModelFlags], TrainingResult],
    *,
    rereads_start: bool,
    check: Callable[[OneModelFlags], None],
    check_rows: Callable[[Sequence[Any], Any], None],
) -> None:
    """Open the run, train, save the model and the closing figures. `one_model_program` says what the arguments are."""
    kind, scores, settings = step.kind, step.scores, step.flags.settings
    assert kind is not None, "a step that trains one model has rows of one kind"
    if settings["per_device_train_batch_size"] is None:  # a resumed run is compared by the step's sequences
        settings["per_device_train_batch_size"] = SEQUENCES_OF_A_FORWARD
    with open_run(step.flags.step, step.flags, settings) as run:
        ranks = run.ranks
        flags, chosen = _with_forwards(replace(step, flags=run.flags), run)
        features, most = flags.guests, flags.data.rows.max_seq_len
        check_positions(flags.start, most, "--max_seq_len")
        check_trains(flags.start, generates=not scores)
        tokenizer, added, style = _tokenizer(flags, scores, run.plan.began_with("prompt_style"))
        features.check_words(tokenizer)
        run.start(style.chat.prompt_style, flags.start.name_or_path, predicts_tokens=not scores)
        rows = _rows(flags, run, kind, tokenizer, style=style)
        check_rows(rows.train, flags.of_step)
        media = checked_media(flags, rows, kind)
        steps = whole_steps(flags.engine, len(rows.train), ranks)
        # A reference that is read again, or is the model with its adapters off, is the whole start model.
        start = replace(flags.start, head_chunk_mb=run.settings["head_chunk_mb"], trains_adapter_on=not rereads_start)
        model, engine = _engine(
            flags, start, tokenizer, added, scores=scores, total_steps=steps[0], ranks=ranks, media=media
        )
        ends = _ends(rows, tokenizer, style, None if scores else model)
        read = engine if scores else lambda token_rows: engine(token_rows).logprobs_M
        packed = may_pack(
            flags.engine.padded,
            model,
            engine,
            read,
            longest_tokens=most,
            log=log,
            sharing=len(kind.responses) > 1 or bool(flags.engine.share_beginnings),
            needs_segments=flags.data.needs_segments or features.needs_segments,
        )
        media = with_kept_features(media, flags.added, model, engine, read=read)
        [guests] = features.open([(engine, model)], start.name_or_path, steps[0], flags.run.seed)
        loop = loop_settings(flags, steps, model, packed, ranks=ranks, pad_token_id=tokenizer.pad_token_id)
        if flags.engine.share_beginnings is None:
            may = partial(may_share, model, engine, read, most)
            chosen.append(_share_beginnings(flags, run, rows.train, loop, check=check, may=may))
            loop = replace(loop, train_plan=replace(loop.train_plan, least_shared_tokens=chosen[-1].value))
        run.settle(chosen, gradient_accumulation_steps=flags.engine.gradient_accumulation_steps)
        loop = replace(
            loop,
            media=media,
            name=flags.step.label_of(run.settings),
            eval_interval=run.settings["eval_interval"],
            evaluation_observer=run.evaluation_observers(
                WholeModel(engine, model),
                tokenizer,
                batch=flags.engine.per_device_eval_batch_size,
                held_out=HeldOutRows(rows, ends, media),
            ),
            step_observers=run.step_observers(style.chat, tokenizer),
        )
        parts = CheckpointParts(
            {"model": engine, **guests.engines},
            ranks,
            guests.other_weights,
            {"model": tokenizer},
            processor_of(start.name_or_path, model),
        )
        data = RunData(rows.report, rows.train.manifest["fingerprint"], len(rows.train) / steps[1])
        read_again = flags.model.model_name_or_path if rereads_start or flags.start.has_adapters else ""
        with run.recorded(parts, data, {"model_name_or_path": read_again}) as files:
            training = TrainingRun(engine, rows.train, rows.eval, loop, *files, guests, run.folder, sum(added))
            result = train(training, flags)
        closing = (
            f"step {flags.step.number}: {result.sentence}, in {result.summary['seconds']:.0f} s; the model is in "
            f"{run.folder.model}{result.signs}"
        )
        run.finish(parts, guests, {**result.reports, "summary.json": result.summary}, closing)


def _with_forwards(step: CheckedStep, run: OpenedRun) -> tuple[OneModelFlags, list[AutoChoice]]:
    """Return the flags with --per_device_train_batch_size chosen where it was left to auto, and that choice. A resumed
    run keeps what it began with, if its step is as large. A collective."""
    flags: OneModelFlags = step.flags
    name, begun = "per_device_train_batch_size", run.plan.began_with
    if flags.engine.per_device_train_batch_size is not None:
        return flags, []
    if begun(name) is not None:
        kept = flags.with_forwards_of(begun(name))
        if kept.engine.gradient_accumulation_steps == begun("gradient_accumulation_steps"):
            return kept, [AutoChoice(name, begun(name), AS_BEGUN)]
    device = PlannedDevice(run.ranks.device.type == "cuda", least_free_bytes(run.ranks))
    choice = chosen_by_plugin(name, step, device)
    if choice is None:
        choice = AutoChoice(name, SEQUENCES_OF_A_FORWARD, "the default; no plugin estimates a forward's memory")
    return flags.with_forwards_of(choice.value), [choice]


def _share_beginnings(
    flags: OneModelFlags,
    run: OpenedRun,
    rows: Sequence[Any],
    loop: LoopSettings,
    *,
    check: Callable[[OneModelFlags], None],
    may: Callable[[], bool],
) -> AutoChoice:
    """Return what --share_beginnings auto stands for, by the rows of the run's first steps. rows: those to train on.
    may: whether the model computes rows that share their beginnings. A collective."""
    name, plan = "share_beginnings", replace(loop.train_plan, least_shared_tokens=_LEAST_SHARED_TOKENS)
    refused = AutoChoice(name, 0, "the model would compute different outputs, or has dropout")
    if not plan.packed:
        return AutoChoice(name, 0, "rows are padded")
    if (begun := run.plan.began_with(name)) is not None:
        choice = AutoChoice(name, begun, AS_BEGUN, off=0 if begun else None)
        return choice if not begun or may() else refused
    try:
        check(flags._replace(engine=replace(flags.engine, share_beginnings=_LEAST_SHARED_TOKENS)))
    except ThreestepError as refusal:
        return AutoChoice(name, 0, str(refusal).partition(";")[0])
    stream = ShuffledStream(len(rows), loop.seed, loop.shuffle)
    steps = range(min(_STEPS_TO_LOOK_AT, loop.total_steps))
    taken = [stream.take(step * loop.items_per_step, loop.items_per_step) for step in steps]
    share = max((shared_share([rows[index] for index in step], plan) for step in taken), default=0.0)
    if share < _LEAST_SHARED_SHARE:
        return AutoChoice(name, 0, f"rows of the first steps share {share:.1%} of their tokens")
    if not may():
        return refused
    return AutoChoice(name, _LEAST_SHARED_TOKENS, f"rows of the first steps share {share:.0%} of their tokens", off=0)


def _rows(
    flags: OneModelFlags, run: OpenedRun, kind: RowKind, tokenizer: PreTrainedTokenizerBase, *, style: PromptStyle
) -> PhaseData:
    """The rows that the flags ask for, whose style is written to `tokenizer` and to the settings. A collective."""
    is_main, most = run.ranks.is_main, flags.data.rows.max_seq_len
    log(style.sentence, is_main and not style.is_open)
    reader = reader_of_start(flags.start, tokenizer)
    rows = build_phase(kind.name, flags.data, tokenizer, flags.run.seed, is_main_rank=is_main, log=log, **reader)
    say = partial(log, is_main_rank=is_main)
    run.decide({"prompt_style": settle_style(style, rows.train, tokenizer, say, most_tokens=most).chat.prompt_style})
    return rows


def _ends(rows: PhaseData, tokenizer: PreTrainedTokenizerBase, style: PromptStyle, model: Any) -> list[int]:
    """The tokens that end a response. They end the answers of `model`, None of a reward model; a line of the log says
    which of its own never do."""
    stops, inside = (list(map(tokenizer.convert_tokens_to_ids, found)) for found in rows.report.stops)
    ends = [end_of_conversation_id(tokenizer, style.end_token), *stops]
    if model is not None:
        unused = unused_stop_tokens(stop_tokens(model), tokenizer)
        if unused is not None:
            log_on_main(unused)
        set_stop_tokens(model, tokenizer, ends, set(inside))
    return ends


class _Added(NamedTuple):
    """Numbers of tokens that the tokenizer gained here: those that are trained, and a pad token."""

    tokens: int
    pad: int


def _tokenizer(
    flags: OneModelFlags, scores: bool, began_with: str | None
) -> tuple[PreTrainedTokenizerBase, _Added, PromptStyle]:
    """The start model's tokenizer, how many tokens it gained here, and the style that is saved with it.

    began_with: the style of the run that is resumed
    """
    model, chat = flags.model, flags.data.chat
    path, trust = model.model_name_or_path, model.trust_remote_code
    tokenizer, added_pad = load_padding_tokenizer(path, model.pad_token, trust)
    if added_pad:
        log_on_main(
            f"the tokenizer of '{path}' has no pad token, so {tokenizer.pad_token} was added as token "
            f"{tokenizer.pad_token_id:,} and to the model's embeddings (choose another with --pad_token)"
        )
    added = add_tokens(tokenizer, flags.data.tokens_in_need)
    style = adopt_style(tokenizer, chat, began_with)
    if scores:
        tokenizer = with_pad_apart(tokenizer, style.end_token)
    return tokenizer, _Added(added, added_pad), style


def _engine(
    flags: OneModelFlags,
    start: ModelSettings,
    tokenizer: PreTrainedTokenizerBase,
    added: _Added,
    *,
    scores: bool,
    total_steps: int,
    ranks: Ranks,
    media: RunMedia | None,
) -> tuple[PreTrainedModel, TrainingEngine]:
    """The transformers model, and the engine that trains it."""
    settings = flags.engine.settings(flags.of_step.learning_rate, flags.added)
    reading: Any = {"longest_tokens": flags.data.rows.max_seq_len, "device": ranks.device, "media": media}

    def load(dtype: torch.dtype) -> PreTrainedModel:
        if scores:
            return load_scalar_model(start, dtype, tokenizer, False, added_tokens=added.tokens, **reading)
        return load_causal_lm(start, dtype, len(tokenizer), added.tokens, added_pad=added.pad, **reading)

    model = load_under(settings, ranks, load)
    ranks.sharing.check_model(model, flags.data.rows.max_seq_len)
    if scores:
        return model, TrainingEngine(ScalarModel(model, sharing=ranks.sharing), settings, ranks, total_steps)
    beside = flags.guests.inside(start.name_or_path, model, settings.zero_stage, flags.run.seed, ranks=ranks)
    policy = PolicyModel(model, start.head_chunk_mb, beside, sharing=ranks.sharing)
    return model, TrainingEngine(policy, settings, ranks, total_steps)


def loop_settings(
    flags: OneModelFlags,
    steps: tuple[int, int],
    model: PreTrainedModel,
    packed: bool,
    *,
    ranks: Ranks,
    pad_token_id: int,
) -> LoopSettings:
    """Settings of the training loop. steps: optimizer steps, and sequences of each. A collective with `--report_mfu`,
    which measures the matmul rate."""
    engine = flags.engine
    weights = count_weights(model)
    overhead = forward_overhead_tokens(weights, ranks.device.type == "cuda")
    on_cpu = ranks.device.type == "cpu"
    keeps_small = flags.guests.keep_forwards_small(model, on_cpu, ranks.sharing.size)
    if engine.share_beginnings and not packed:
        log("--share_beginnings has no effect on padded rows, which have one sequence each", ranks.is_main)

    assert engine.per_device_train_batch_size is not None, "chosen as the run was opened"

    def plan(sequences: int) -> PlanSettings:
        bounded = plan_for(
            model,
            sequences,
            flags.data.rows.max_seq_len,
            packed=packed,
            ranks=ranks.groups,
            max_tokens_per_micro_batch=engine.max_tokens_per_micro_batch,
            keeps_small=keeps_small,
        )
        return replace(bounded, forward_tokens=overhead)

    return LoopSettings(
        total_steps=steps[0],
        items_per_step=steps[1],
        train_plan=replace(plan(engine.per_device_train_batch_size), least_shared_tokens=engine.share_beginnings or 0),
        eval_plan=plan(engine.per_device_eval_batch_size),
        eval_interval=engine.eval_interval,
        eval_epochs=engine.eval_epochs,
        pad_token_id=pad_token_id,
        seed=flags.run.seed,
        shuffle=flags.run.shuffle,
        meter=compute_meter(model, ranks) if engine.report_mfu else None,
        log_pace=flags.reporting.pace(),
    )
