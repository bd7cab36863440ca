"""Step 2 without a reward model: direct preference optimisation of the policy itself, on the same ranked responses.

    python -m training.step2_dpo.main --model_name_or_path SFT_MODEL --data_path jsonl:pairs.jsonl --output_dir OUT

One process needs no launcher; several ranks start by `deepspeed`, torchrun or `accelerate launch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from training.step2_dpo.arguments import DpoArguments
from training.utils.data.arguments import DataArguments
from training.utils.engine.arguments import EngineArguments
from training.utils.models.arguments import ModelArguments
from training.utils.models.settings import check_model_folder
from training.utils.run import deepspeed_chat
from training.utils.run.arguments import parse_arguments, resolved_settings
from training.utils.run.checkpoint_arguments import CheckpointArguments
from training.utils.run.fault_arguments import FaultArguments
from training.utils.run.program import run_program
from training.utils.run.report_arguments import ReportArguments
from training.utils.run.run_arguments import RunArguments

GROUPS = (
    RunArguments,
    CheckpointArguments,
    FaultArguments,
    ReportArguments,
    DataArguments,
    ModelArguments,
    EngineArguments,
    DpoArguments,
)


def main(argv: Sequence[str]) -> None:
    """Parse, load data and model, read the reference, train, save."""
    groups = parse_arguments(GROUPS, argv, __doc__ or "", deepspeed_chat.DPO)
    run, saving, faults, reporting, data, model, engine, dpo = groups
    dpo.check_reference(model)
    check_model_folder(model.model_name_or_path)
    if run.dry_run:
        return say_plan(groups, dpo.learning_rate, data.max_seq_len)

    from training.step2_dpo.loss import Objective
    from training.step2_dpo.reference import adapter_off_references, known_references
    from training.step2_dpo.reference_file import reference_file
    from training.step2_dpo.trainer import DpoTrainer
    from training.utils.data.build import build_phase
    from training.utils.data.chat import use_chat_template
    from training.utils.data.fingerprint import digest_files
    from training.utils.engine.bad_steps import BadSteps
    from training.utils.engine.checkpoints import kept_run, only_run_in, plan_checkpoints
    from training.utils.engine.setup import load_under, loop_settings, may_pack, start_run, whole_steps
    from training.utils.engine.startup import started_process_group
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.models.loading import add_tokens, check_positions, load_causal_lm, load_tokenizer, model_files
    from training.utils.models.saving import save_model
    from training.utils.models.token_model import PolicyModel
    from training.utils.run.metrics import say
    from training.utils.run.report.writing import report_at_end

    settings = engine.settings(dpo.learning_rate)
    with started_process_group(faults.rank_timeout) as ranks, only_run_in(run.output_dir, ranks):
        plan = plan_checkpoints(saving, run.output_dir, "training.step2_dpo.main", resolved_settings(groups), ranks)
        folder = start_run(run, resolved_settings(groups), ranks)
        check_positions(model.settings(), data.max_seq_len, "--max_seq_len")
        tokenizer = use_chat_template(
            load_tokenizer(model.model_name_or_path, model.pad_token, trust_remote_code=model.trust_remote_code), data
        )
        added = add_tokens(tokenizer, data.tokens_in_need)
        phase = build_phase(2, data, tokenizer, run.seed, ranks.is_main, say)
        steps = whole_steps(engine, len(phase.train), ranks)

        causal_lm = load_under(
            settings, ranks, lambda dtype: load_causal_lm(model.settings(), dtype, len(tokenizer), added)
        )
        trained = TrainingEngine(PolicyModel(causal_lm), settings, ranks, steps[0])
        packed = may_pack(
            engine.padded,
            causal_lm,
            trained,
            lambda rows: trained(rows).logprobs_M,
            data.max_seq_len,
            say,
            needs_segments=data.needs_segments,
        )
        loop = loop_settings(engine, steps, data.max_seq_len, causal_lm, packed, ranks, tokenizer.pad_token_id, run)

        folder.write_json("data_report.json", asdict(phase.report))
        data_is = phase.train.manifest["fingerprint"]
        name = model.model_name_or_path
        start = {"model_name_or_path": partial(digest_files, model_files(name), data.cache_dir)}
        tokenizers = {"model": tokenizer}
        kept = kept_run(plan, folder, {"model": trained}, data_is, ranks, tokenizers=tokenizers, start=start)
        with kept as (metrics, checkpoints):
            if dpo.reference == "adapter_off":
                references = adapter_off_references(trained, causal_lm)
            else:
                file = None
                if ranks.is_main and not added:  # embeddings of new tokens are drawn: no file knows them again
                    file = reference_file(name, phase, data, engine.dtype, packed)
                references = known_references(trained, phase.train, phase.eval, loop, file, metrics, say)
            objective = Objective(dpo.loss_type, dpo.beta, dpo.label_smoothing, dpo.sft_coef)
            rows = (phase.train, phase.eval)
            bad_steps = BadSteps(faults.max_bad_steps, folder.path, ranks.is_main, engine.dtype)
            result = DpoTrainer(trained, *rows, references, objective, loop, metrics, checkpoints, bad_steps).train()

        tensors = trained.full_state(causal_lm)
        if ranks.is_main:
            save_model(folder.model, causal_lm, tensors, tokenizer)
        folder.write_summary(result.summary())
        report_at_end(folder.path, reporting.report and ranks.is_main)
        say(f"step 2: {result.sentence()} in {result.seconds:.0f} s; the model is in {folder.model}", ranks.is_main)


def say_plan(groups: Sequence[Any], learning_rate: float, max_seq_len: int) -> None:
    """Say what the run would be (`--dry_run`)."""
    from training.utils.engine.dry_run import dry_run

    dry_run("training.step2_dpo.main", groups, learning_rate, max_seq_len, responses=2)


if __name__ == "__main__":
    run_program(main)
