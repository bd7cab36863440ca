"""The record of what a plugin adds to the programs. Every program imports it: nothing of ours is imported here, and the
records are NamedTuples, which take a fifth of the time of dataclasses to make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

# Who starts a command's ranks: the launcher; the command, which is told by a variable; nobody, there is one.
LAUNCHED, HANDED_ON, ALONE = "launched", "handed on", "alone"


class Command(NamedTuple):
    """A command of `threestep`, named by one word, or by two: `serve reward` is below `serve`.

    module: as `python -m` takes it. does: for the list of commands
    takes_ranks: LAUNCHED, HANDED_ON or ALONE
    ranks: by default, where they are LAUNCHED; None: one for each visible GPU, or one
    flags: that stand before the user's
    earlier: the name that it had, which still runs it
    """

    module: str
    does: str
    takes_ranks: str = ALONE
    ranks: int | None = None
    flags: tuple[str, ...] = ()
    earlier: str = ""


class EngineEntry(NamedTuple):
    """A rollout engine. Places are MODULE:NAME.

    place: of its class.
    flags: of the dataclass of its own flags (`arguments` of the class), in a module that is cheap to import.
    note: on it, for `--help`.
    other_logprobs: another program computes its log-probabilities (not `logprobs_are_trained_models` of the class).
    server: of what returns the command of its own server for a `ServerOrder`; None where it has none.
    head_writer: of what changes a finished model's folder, so that the engine guesses tokens by the head for
        multi-token prediction in it, and returns a sentence on how it is told to; None where there is nothing to write.
    """

    place: str
    flags: str | None = None
    note: str = ""
    other_logprobs: bool = False
    server: str | None = None
    head_writer: str | None = None


class TrackerEntry(NamedTuple):
    """A tracker.

    place: of its class, MODULE:NAME.
    package: that must be installed for it.
    writes: names in a run's folder that must be the run's own; a folder's ends with a slash.
    """

    place: str
    package: str | None = None
    writes: tuple[str, ...] = ()


class RewardEntry(NamedTuple):
    """A kind of reward, by its name in --reward or the beginning of its addresses, such as `http:`. Places are
    MODULE:NAME.

    make: of a function (address, name in the log, flag) -> the rule (`training.utils.rewards.table`), which may be an
        `OpenedRule` (`training.utils.rewards.table`).
    name: of a function (address) -> its name in the log, in a module that is cheap to import.
    check: of a function (entry) that raises ThreestepError for mistaken files, before anything loads; "" for none.
    form: of an address, as messages show it, such as `http:URL`.
    note: on it, for `--help`.
    """

    make: str
    name: str
    check: str = ""
    form: str = ""
    note: str = ""


class AttentionEntry(NamedTuple):
    """An attention kernel.

    place: of its `AttentionKernel`'s class (`models.attention`), MODULE:NAME.
    note: on it, for `--help`, behind its name.
    by_auto: --attn_implementation auto tries it, in the order of the table.
    """

    place: str
    note: str = ""
    by_auto: bool = False


class OptimizerEntry(NamedTuple):
    """An optimizer.

    make: of a function (groups, `EngineSettings`) -> torch.optim.Optimizer, MODULE:NAME. groups: as torch takes
        them, each with its weights, `weight_decay` and perhaps its `lr`. The state is tensors, numbers and texts.
    states, states_name: numbers that it keeps of each weight, and their name, for dry runs.
    whole_weights: it reads weights in their shapes, and not flat pieces of them, which ZeRO hands out from stage 1 on.
    """

    make: str
    states: int = 1
    states_name: str = ""
    whole_weights: bool = False


class RunFile(NamedTuple):
    """A file or folder in a run's folder, which must be the run's own. is_result: a new run there removes that of an
    earlier one, a folder with `--overwrite`."""

    is_result: bool = False


class RowFormEntry(NamedTuple):
    """A form of responses that are no one run of tokens (`contracts.drawing`). Places are MODULE:NAME.

    place: of the `RowForm`'s class.
    asked: of a function (AddedFlags of a program's rows) -> TextForm | None: what its flags ask for.
    """

    place: str
    asked: str


class AdapterEntry(NamedTuple):
    """Adapters that stand in folders. Places are MODULE:NAME.

    find: of a function (a model's folder or hub name) -> GivenAdapter | None (`loading.weight_files`)
    described: of a function (model on meta, folder) -> None: puts the adapters on that `Adapters.describe` wrote there
    """

    find: str
    described: str


class InPlaceOfRun(NamedTuple):
    """An act of a step in place of its run, once its flags are checked: in one process, and nothing is loaded before.

    place: of a function (`setup.flags.CheckedStep`) -> None, MODULE:NAME.
    ranks: what --num_ranks, which otherwise no step reads, does then: a sentence's verb, such as "plans for".
    ranks_help: the same as a sentence for `--help`.
    """

    place: str
    ranks: str
    ranks_help: str


class OtherNames(NamedTuple):
    """Other programs' flags that programs here read as ours.

    flags: by a program, such as `step1_sft`: a table of them
    reads: a function (words of a file, words typed, table) -> (both by names here, a line for each that was read so)
    launcher: a function (words typed, environment) -> (other words, environment with what flags of launchers say, a
        line for each)
    run: a module that reads another program's flags as the file of `threestep all`: NAME, add_flags, given_flags,
        settings_of
    """

    flags: Mapping[str, str] = MappingProxyType({})
    reads: str = ""
    launcher: str = ""
    run: str = ""


class StepNeeds(NamedTuple):
    """The needs of a plugin in optimizer steps: which it looks at, or whose forwards and loss it changes.

    whole_rows: flags as they were given that read whole rows on one rank, and whether they ask for that
    own_forwards: why a step must read and learn in forwards of their own, as the begin of a sentence; "": it need not
    """

    whole_rows: Mapping[str, bool] = {}
    own_forwards: str = ""


class Hooks(NamedTuple):
    """Functions that steps call; "" where the plugin has nothing to do there. A plugin's are called after those of the
    plugins that it needs.

    check: (flags, mistakes) -> None: notes settings that do not go together, before a model loads. flags: the step's
        `OneModelFlags` or `PpoFlags`
    step_needs: (flags) -> StepNeeds: what checks ask of a plugin in optimizer steps; flags: as of check
    at_start: (settings) -> None: on the main rank, before the run writes to its folder; a ThreestepError ends the run.
        settings: by the flags' names
    preparers: (AddedFlags, role) -> Iterable[ModelPreparer]: changes to models as they are loaded
        (`models.settings`); with `AddedFlags()`, those to a model that a program loads without such flags. role: in
        step 3, `actor` or `critic`; otherwise ""
    guests: (flags) -> GuestFeature: what trains beside a run's models, or adds to their losses; flags as of `check`
    rollout_scheduler: (PpoFlags) -> RolloutScheduler | None: which weights draw the rollouts of a step
    partners: (AddedFlags) -> Partners: who answers the model while it draws, in step 3 and in a chat
        (`training.utils.generation.partners`)
    step_observer: (ObservedRun) -> StepObserver | None: what looks at the optimizer steps of a run
        (`contracts.run`); None: nothing of this run
    evaluation_observer: (EvaluatedRun) -> EvaluationObserver | None: what sees the evaluations of a run, opened before
        the first, on all ranks
    at_end: (EndedRun) -> str | None: on the main rank, once the run has written its models and figures. A text ends the
        last line of the log
    """

    check: str = ""
    step_needs: str = ""
    at_start: str = ""
    preparers: str = ""
    guests: str = ""
    rollout_scheduler: str = ""
    partners: str = ""
    step_observer: str = ""
    evaluation_observer: str = ""
    at_end: str = ""


class ExportedModel(NamedTuple):
    """A model folder, `out`, that was made of a checkpoint. run: its folder. checkpoint: its name. part: of the models
    that the run trains, or `average`."""

    run: Path
    checkpoint: str
    part: str
    out: Path


class ProgramHooks(NamedTuple):
    """Functions that `threestep export` and `threestep all` call, in the same order.

    exported: (checkpoint, engine's name, state by the names of weights, dtype, out=) -> None: writes what a checkpoint
        has beside the model of that engine, or with it, into the exported folder `out`
    at_export: (ExportedModel) -> None: once a checkpoint's weights are a model folder
    at_end_of_all: (folder, switches) -> None: once `threestep all` has run its steps. folder: of the whole run.
        switches: those of `whole_run_switches`
    """

    exported: str = ""
    at_export: str = ""
    at_end_of_all: str = ""


EVERY_STEP = "every step"
# Names of `Plugin.tables`, which says what each holds.
TABLES = frozenset(
    """
rollout_engines decode_loops rollout_sources trackers data_sources row_forms rewards media optimizers policy_losses
evaluated_figures model_losses meant_flags kept_as_begun logs run_files in_place_of_run auto_choices advice curves
evaluation_flags whole_run_switches stored_forms packed_layers backends row_sharing attention_kernels adapters critics
row_stores run_courses learnt_beside sft_regularizers prompt_sources advantages preference_losses corrections
engine_configs conversions captured_steps model_files reward_arguments
""".split()
)


class Plugin(NamedTuple):
    """An optional feature.

    Addresses are MODULE or MODULE:NAME, and are imported when they are used.

    does: for the list of plugins. needs: plugins that it imports, by name
    commands: by their words
    flags: by a step's name, such as `step1_sft`, EVERY_STEP, the name of another program that takes some, such as
        `chat`, or a kind of programs: `rows` (those that read rows), `rollouts` (step 3, in its place) and `answers`
        (those that ask finished models about rows, in its place): dataclasses of flags, in modules that are cheap to
        import; `flags.added.of(DATACLASS)` is what a run was given, and `DataArguments.forms` has those of a kind
    topics: of flags, for `--help`, with their titles
    tables: by the name of a table of the core, entries by their names:
        `rollout_engines`: EngineEntry, by the names that --rollout_engine takes
        `decode_loops`: addresses of functions (PpoFlags, Mistakes) -> AskedLoop | None: in what loop an engine draws
            responses in the place of its own (`contracts.decode_loops`); by the names of the flags that ask for it
        `captured_steps`: the address of a class of decode steps whose tensors stay where they are, on CUDA captured
            (`generation.decoding.decoding`); one at most in all plugins
        `trackers`: TrackerEntry, by the names that --report_to takes
        `data_sources`: addresses of PromptRawDataset classes, by the names that --data_path takes, under which they
            register themselves; by the beginning of names where that ends with a colon
        `row_stores`: addresses of `RowStore` classes (`data.files.readers`), by the word before the colon of a
            --data_path, such as `hub`: rows in the columns of files that are stored elsewhere
        `model_files`: addresses of functions (model as given) -> its folder, or the name as it is; by files' endings
        `rewards`: RewardEntry, by names or the beginning of addresses that --reward takes
        `media`: the address of the `MediaKind` of a class, by the name of the column of rows that holds such media;
            one at most in all plugins
        `optimizers`: OptimizerEntry, by the names that --optimizer takes
        `attention_kernels`: AttentionEntry, by the names that --attn_implementation takes
        `policy_losses`, `advantages`: addresses of a `PolicyLoss` or an `Estimator` (`plugins.objectives`),
            or of its function, by the names that --policy_loss and --advantage take; in modules that are cheap to
            import
        `preference_losses`: addresses of a `PreferenceLoss` there, by the names that --loss_type takes, in the same way
        `evaluated_figures`: steps, such as ("step1_sft",), by the figures that their evaluations then have too, as
            `StepFigures.evaluates` names them
        `model_losses`: what the plugin computes of a model's own losses, in words, by the fields of configurations
            that weigh them: where the plugin is not there, a run says so
        `meant_flags`: names of the flags that are meant, by what people type in their place
        `reward_arguments`: why a reward function does not get an argument, and the remedy, with NAME for its name
        `kept_as_begun`: values of flags with which a resumed run keeps what it began with, such as None for `auto`, by
            the flags' names: of those that decide speed and rounding alone
        `logs`: what each is, by the names of files in a run's folder to which its steps append: a run that resumes
            cuts them back
        `run_files`: RunFile, by the names in a run's folder; a folder's ends with a slash
        `in_place_of_run`: InPlaceOfRun, by the names of flags of every step that are true or false, and ask for it
        `auto_choices`: addresses of functions (`setup.flags.CheckedStep`, PlannedDevice) -> AutoChoice: what a
            flag stands for that was left to `auto`, in a run that is about to load its models on a device with so much
            free memory; by the flag's name, `per_device_train_batch_size` or `reuse_forwards`
        `advice`: by flags, words that name them in messages, pages and `--help`, by their places there
            (`flags.added.advice`): `no_own_loss`, for a model without the trainer's loss; `plain_text`, ways to give
            text without prompts, after "give it"; `old_weights`, flags by which older weights draw rollouts;
            `other_forward`, for forwards that differ from the family's own; `batch`, on how a forward's size is chosen;
            `own_reference`, flags by which a model without its adapters is the start model; `page`, what a reader of a
            run's page has to know, with {} for the value; a key of DeepSpeed's configuration, what to do in its place
        `curves`: by the group of their figures, curves of a step's page: the step, a title, a note, figures by the
            names of their lines
        `rollout_sources`: addresses of RolloutSource classes (`step3_ppo.flags.rollout_choices`), by the flags that ask
            for them
        `sft_regularizers`: addresses of functions (AddedFlags) -> Regularizer | None: what is added to step 1's loss
            and inputs (`step1_sft.regularizer`), by a flag's name; one at most in all plugins
        `prompt_sources`: addresses of functions (PpoFlags, prompts, tokenizer, texts of a rollout, ranks=) ->
            PromptSource (`step3_ppo.contracts.rollouts`), by the flags that ask for them; one at most in all plugins
        `learnt_beside`: the address of a function (PpoFlags, tokenizer, Ranks) -> LearntBeside: what the actor of step
            3 learns from beside its rollouts (`step3_ppo.contracts.records`), opened before models load; by the
            name of the flag that asks for it
        `evaluation_flags`: by flags that give evaluations figures of other data than the held-out rows, `eval/NAME`:
            advice that names the flag, for who has no such rows
        `stored_forms`: addresses of `StoredForm` classes (`loading.weight_files`), by the field of configurations that
            says that a model's files hold its weights in such a form
        `packed_layers`: addresses of functions (model on meta, facts) -> None, by the kind of a `PackedLinear`
            (`models.weights`): makes the layers that its `described` wrote into a checkpoint's facts
        `adapters`: AdapterEntry, by the name of the file that a folder with such adapters holds
        `critics`: addresses of functions (actor's model without adapters, critic's ModelSettings, pad token's id,
            longest sequence, `media`) -> model: the critic on the actor's trunk; by the flags of step 3 that ask for it
        `backends`: the address of a function (settings, torch.device, began_with) -> Backend (`engine.ranks.devices`):
            settings of PyTorch's own that hold while a run trains; by the flag that decides them; one at most in all
            plugins
        `whole_run_switches`: by flags of every step that are true or false, and that the file of `threestep all` has at
            its top, by default true: a line on each for `--help`
        `row_forms`: RowFormEntry, by the names of the columns of cached rows that hold their numbers
        `run_courses`: addresses of functions (settings) -> RunCourse | None (`contracts.run`), by their names:
            who has a say in when a run saves and ends; settings by the flags' names
        `corrections`: the address of a function (PpoFlags) -> Correction (`step3_ppo.contracts.records`), of
            rollouts that another policy drew; by the name of the flag that says how; one at most in all plugins
        `engine_configs`: the address of a function (value) -> OwnConfig (`engine.config.arguments`): a DeepSpeed
            configuration of the user's own; by the name of the flag that gives it
        `conversions`: `universal`: the address of a function (CheckpointParts, checkpoint, folder to use meanwhile,
            saved_ranks=, seed=) -> None, which loads a checkpoint of other ranks or ZeRO stages
        `row_sharing`: the address of a function (AddedFlags) -> RowSharing (`models.row_sharing`), the ranks that
            share each row; by the name of the flag that says how many; one at most in all plugins
    """

    name: str
    does: str
    needs: tuple[str, ...] = ()
    commands: Mapping[str, Command] = MappingProxyType({})
    flags: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    topics: Mapping[str, str] = MappingProxyType({})
    tables: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    hooks: Hooks = Hooks()
    program_hooks: ProgramHooks = ProgramHooks()
    other_names: OtherNames = OtherNames()
