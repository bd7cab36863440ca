"""The house rules: what a module looks like, the list of all rules, and where unit tests belong.

A rule is a function from a module's name and source (or from the sources of all modules) to one sentence for each place
that breaks it. Nothing is imported to be checked. tests/test_house.py applies the rules to the package, and shows each
of them a violation that it must find. Who may import whom: tests.support.rooms.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.support import boundary, rooms
from tests.support.imports import imports, plain_name
from tests.support.rooms import distinct, is_program_file
from tests.support.sources import (
    classes,
    declared_flags,
    fields_of_records,
    functions,
    is_docstring,
    parameters,
    positional,
    statements,
    tree,
)

ModuleRule = Callable[[str, str], list[str]]
PackageRule = Callable[[Mapping[str, str]], list[str]]

MOST_STATEMENTS = 40
MOST_PARAMETERS = 8
MOST_POSITIONAL = 4
MOST_FIELDS = 10
# Records of more fields from before the rule. A name goes when its record shrinks; none is added.
LARGE_RECORDS = (
    "PhaseAccount",  # its fields are keys of what `threestep inspect --json` prints
    "RewardEvaluation",  # and of reward_report.json
)

BAG_NAMES = ("utils", "util", "helpers", "helper", "misc", "common", "tools")
# Small programs print, those directly in training/ and these.
MAY_PRINT = (
    "training.utils.run.program",
    "training.utils.run.launch",
    "threestep.plugins.inspect.cache",  # threestep inspect cache
)
# Functions that a library calls, and those they share their parameters with: it hands them over by their place.
CALLED_BY_LIBRARIES = (
    "training.utils.data.data_utils get_raw_dataset_split_index",  # DeepSpeed-Chat's
    "threestep.plugins.plan.dry_run.activations _counted_attention.attention",
    "threestep.plugins.environments.driven.harness ThreestepHarness.launch",
    "threestep.plugins.vllm.draft expand_batch_to_tokens",
    "training.utils.models.document_attention _sdpa_that_shares_keys",
    "training.utils.models.document_attention attention_by_document",
    "training.utils.models.document_attention _of_few_tokens",
    "threestep.plugins.kernels.flex FlexAttention.__call__",
    "threestep.plugins.kernels.flex _attend",
    "threestep.plugins.kernels.flex _attend.capped",
    "threestep.plugins.kernels.varlen VarlenAttention.__call__",
    "threestep.plugins.long_rows.attention SlicedAttention.__call__",
    "threestep.plugins.kernels.calls _noted.noting",
    "training.utils.models.token_model _TargetLogprobs.forward",
    "threestep.plugins.distillation.head_loss _HeadDivergence.forward",
)
QUESTIONS = ("What", "How", "Who", "Whether", "Of", "Which", "Where")
UNSAFE = ("eval", "exec", "yaml.load", "yaml.unsafe_load", "os.chmod", "os.system")
MAY_BE_UNSAFE = ("threestep.own_package",)  # it runs the user's own program
PICKLES = ("pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")


def no_pickles(module: str, source: str) -> list[str]:
    """Nothing is pickled or run as code, by torch.load, np.load or a hub neither; no file is opened to everybody."""
    problems = [
        f"{module}:{found.line} imports {found.module}; nothing is pickled here"
        for found in imports(module, source)
        if found.module.split(".")[0] in PICKLES
    ]
    for call in _calls(source):
        name = _dotted(call.func)
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if name == "torch.load" and not _is_constant(keywords.get("weights_only"), True):
            problems.append(f"{module}:{call.lineno} calls torch.load without weights_only=True")
        if "allow_pickle" in keywords and not _is_constant(keywords["allow_pickle"], False):
            problems.append(f"{module}:{call.lineno} allows pickles")
        if _is_constant(keywords.get("trust_remote_code"), True) or (name in UNSAFE and module not in MAY_BE_UNSAFE):
            problems.append(f"{module}:{call.lineno} calls {name}, which trusts what it is given")
    return distinct(problems)


# --- how a module looks


def no_bags(module: str, source: str) -> list[str]:
    """No module is a bag of loose functions. The folder `utils` holds rooms, and is empty itself."""
    name = plain_name(module)
    if name == "training.utils":
        body = [node for node in tree(source).body if not is_docstring(node)]
        return [f"{module} holds code; the rooms below it do"] if body else []
    return [f"{module} is a bag by its name"] if name.split(".")[-1] in BAG_NAMES else []


def opens_with_a_docstring(module: str, source: str) -> list[str]:
    """A module says what it is."""
    return [] if ast.get_docstring(tree(source)) else [f"{module} does not open with a docstring"]


def docstrings_say_what(module: str, source: str) -> list[str]:
    """A docstring is a noun or an imperative: what is returned or done, not a question."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(tree(source)):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        opening = re.match(r"\w*", text or "")
        if opening and opening.group() in QUESTIONS:
            found.append(f"{module}:{getattr(node, 'lineno', 1)} has a docstring that opens with {opening.group()}")
    return found


def no_prints(module: str, source: str) -> list[str]:
    """Only small programs print."""
    if is_program_file(module) or module in MAY_PRINT or boundary.is_plugin_program(module, source):
        return []
    return [f"{module}:{call.lineno} prints" for call in _calls(source) if _dotted(call.func) == "print"]


def no_bare_except(module: str, source: str) -> list[str]:
    """`except:` catches Ctrl-C and our own mistakes; an except names what it expects."""
    return [
        f"{module}:{node.lineno} has a bare except"
        for node in ast.walk(tree(source))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


def functions_stay_short(module: str, source: str) -> list[str]:
    """God functions are not born, they grow: this is the fence. It counts statements: joining lines gains nothing."""
    counts = [(node.lineno, name, statements(node)) for name, node, _ in functions(source)]
    return [
        f"{module}:{line} {name} has {count} statements, at most {MOST_STATEMENTS}"
        for line, name, count in counts
        if count > MOST_STATEMENTS
    ]


def functions_take_few_parameters(module: str, source: str) -> list[str]:
    """What belongs together is passed together, as a record. self and cls are not counted."""
    counts = [(node.lineno, name, parameters(node, is_method)) for name, node, is_method in functions(source)]
    return [
        f"{module}:{line} {name} takes {count} parameters, at most {MOST_PARAMETERS}"
        for line, name, count in counts
        if count > MOST_PARAMETERS and f"{module} {name}" not in CALLED_BY_LIBRARIES
    ]


def few_parameters_go_by_place(module: str, source: str) -> list[str]:
    """What comes after the fourth parameter is passed by its name. self and cls are not counted."""
    counts = [(node.lineno, name, positional(node, is_method)) for name, node, is_method in functions(source)]
    return [
        f"{module}:{line} {name} takes {count} parameters by place, at most {MOST_POSITIONAL}; put * before others"
        for line, name, count in counts
        if count > MOST_POSITIONAL and f"{module} {name}" not in CALLED_BY_LIBRARIES
    ]


def masks_come_from_lengths(module: str, source: str) -> list[str]:
    """`ids != pad` is no mask: pad is often eos, and eos counts."""
    problems = []
    for node in ast.walk(tree(source)):
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            continue
        names = [_last_name(side) for side in (node.left, node.comparators[0])]
        pads = [name for name in names if re.search(r"pad(_token)?(_id)?$", name)]
        ids = [name for name in names if re.search(r"(ids|tokens|sequences?|seqs?|labels)(_[A-Z]+)?$", name)]
        if pads and ids:
            what = f"{ids[0]} with {pads[0]}"
            problems.append(f"{module}:{node.lineno} compares {what}; masks come from lengths")
    return problems


def class_names_are_used_once(sources: Mapping[str, str]) -> list[str]:
    """One name, one class: nobody has to ask which Piece is meant."""
    places = defaultdict(list)
    for module, source in sources.items():
        for node in ast.walk(tree(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    return [f"{name} is a class of {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def flags_are_declared_once(sources: Mapping[str, str]) -> list[str]:
    """A flag's default, text and range stand in one dataclass; others include it by `flag_of` or `flags_of`."""
    declared = declared_flags(sources)
    return [f"--{name} is declared in {', '.join(found)}" for name, found in declared.items() if len(found) > 1]


def records_stay_small(sources: Mapping[str, str]) -> list[str]:
    """What belongs together is a record of its own: fields of frozen dataclasses and NamedTuples, those of bases too.

    Flags and settings apart, which are as many as the program has. LARGE_RECORDS may only shrink.
    """
    large = {
        record: count
        for record, count in fields_of_records(sources).items()
        if count > MOST_FIELDS and not record.endswith(("Arguments", "Flags", "Settings"))
    }
    problems = [
        f"{record} has {count} fields, at most {MOST_FIELDS}"
        for record, count in large.items()
        if record not in LARGE_RECORDS
    ]
    known = {node.name for source in sources.values() for node in classes(source)}
    return problems + [
        f"{record} has at most {MOST_FIELDS} fields; take it out of LARGE_RECORDS"
        for record in LARGE_RECORDS
        if record in known and record not in large
    ]


MODULE_RULES: tuple[ModuleRule, ...] = (
    rooms.rooms_look_down,
    rooms.steps_keep_apart,
    rooms.step_parts_look_down,
    rooms.nobody_imports_a_program,
    rooms.nothing_imports_the_front,
    boundary.core_imports_no_plugin,
    rooms.programs_import_no_step,
    rooms.third_parties_stay_home,
    rooms.maths_needs_torch_alone,
    no_pickles,
    no_bags,
    opens_with_a_docstring,
    docstrings_say_what,
    no_prints,
    no_bare_except,
    functions_stay_short,
    functions_take_few_parameters,
    few_parameters_go_by_place,
    masks_come_from_lengths,
)
PACKAGE_RULES: tuple[PackageRule, ...] = (
    rooms.no_import_circles,
    rooms.imports_find_what_they_name,
    rooms.rooms_have_floors,
    rooms.rooms_close_no_circle,
    rooms.rooms_stay_small,
    rooms.contracts_load_little,
    rooms.images_stay_home,
    rooms.every_file_serves_somebody,
    boundary.plugins_import_what_is_public,
    boundary.plugins_import_what_they_need,
    boundary.plugins_close_no_circle,
    boundary.core_keeps_its_budget,
    boundary.core_names_no_plugin,
    class_names_are_used_once,
    flags_are_declared_once,
    records_stay_small,
)


# --- the tree


def unmirrored(unit_tests: Path, package: Path) -> list[str]:
    """Return the tests that name no module or room of their place or below, and the rooms without any test.

    training/utils/data/cache/cache.py is tested by test_cache.py or test_cache_damage.py, in the folder of its room or
    of a room above: tests/unit/utils/data/, tests/unit/utils/. A room's test counts for the rooms in it.
    """
    problems = []
    tested: set[Path] = set()
    for test in sorted(unit_tests.rglob("test_*.py")):
        folder = test.parent.relative_to(unit_tests)
        if folder.parts[:1] in (("end_to_end",), ("distributed",), ("vllm",)):  # of a plugin: they test no module
            continue
        # tests/unit/examples stands for examples/, beside the package, and tests/unit/families for tests/families/
        places = [package / folder, package.parent / folder, unit_tests.parent / folder]
        place = next((found for found in places if found.is_dir()), places[1])
        name = test.stem.removeprefix("test_") + "_"
        named = [path for path in _modules_and_rooms(place) if name.startswith(f"{path.stem}_")]
        if not named and not (place == package and name.startswith("scripts_")):
            room = place.relative_to(package.parent)
            problems.append(f"{test.relative_to(unit_tests)} tests no module of {room}")
        rooms_named = {path for path in named if path.is_dir()} - {package}
        tested |= {place, *(path.parent for path in named)}
        tested |= {room for named in rooms_named for room in _modules_and_rooms(named) if room.is_dir()}
    for room in sorted({path.parent for path in package.rglob("*.py") if path.name != "__init__.py"}):
        if room.is_relative_to(unit_tests):  # the tests of a plugin lie in it
            continue
        if not any(place.is_relative_to(room) for place in tested):
            problems.append(f"{room.relative_to(package.parent)} has no test in tests/unit")
    return problems


@cache
def _modules_and_rooms(folder: Path) -> list[Path]:
    below = [path for path in folder.rglob("*") if path.is_dir() or path.suffix == ".py"]
    return [folder, *(path for path in below if "tests" not in path.relative_to(folder).parts)]


def _calls(source: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree(source)) if isinstance(node, ast.Call))


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _last_name(node: ast.AST) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return _dotted(node).split(".")[-1]


def _is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
