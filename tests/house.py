"""The house rules, each a function from a module's name and source to the sentences of what breaks it.

Nothing is imported here to be checked: the rules read source text alone. tests/test_house.py applies them to
the package, and shows each of them a violation that it must find.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

Rule = Callable[[str, str], list[str]]

STEPS = ("training.step1_sft", "training.step2_reward", "training.step2_dpo", "training.step3_ppo")
ROOMS = ("run", "layout", "models", "engine", "data")
LONGEST_FUNCTION_LINES = 80

# Rooms look down only. A look sideways needs a line here, with its reason.
ROOMS_BELOW = {
    "run": (),
    "layout": ("run",),
    "models": ("layout", "run"),
    "engine": ("layout", "run"),
    "data": ("layout", "run"),
}
SIDEWAYS: dict[tuple[str, str], str] = {
    ("engine", "models"): "reading a sharded model's weights out needs both: the engine gathers, LoRA merges",
}

# Third parties that live in a few places only.
ONLY_IN = {
    "deepspeed": ("training.utils.engine", "training.step3_ppo.rollout.hybrid"),
    "vllm": ("training.step3_ppo.rollout.vllm",),
}
# The maths rooms: torch, the standard library and each other; what else a room may use stands beside it.
MATHS = {
    "training.step1_sft.loss": (),
    "training.step1_sft.neftune": (),
    "training.step2_reward.loss": (),
    "training.step2_dpo.loss": (),
    "training.step3_ppo.losses": (),
    "training.step3_ppo.kl": (),
    "training.step3_ppo.mismatch": (),
    "training.step3_ppo.reward_shaping": (),
    "training.step3_ppo.advantages": (),
    "training.utils.layout": ("numpy",),
}
MATHS_MAY_IMPORT = ("training.utils.run.errors",)

BAG_NAMES = ("utils", "util", "helpers", "helper", "misc", "common", "tools")
# A small program talks on standard output; beside those at the package's top, these do.
MAY_PRINT = (
    "training.utils.run.program",
    "training.utils.run.launch",
    "training.utils.data.cache_program",  # python -m training.utils.data.cache list | verify | prune
)
PICKLES = ("pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")


class Import(NamedTuple):
    """One imported module, and where. `eager` is True where importing the importer runs it."""

    module: str
    line: int
    eager: bool


def imports(module: str, source: str) -> list[Import]:
    """Return every import in `source`; `from a import b` counts as `a` and as `a.b`."""
    found: list[Import] = []
    is_package = source_is_package(module)

    def visit(node: ast.AST, eager: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            eager = False
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                visit(child, False)
            for child in node.orelse:
                visit(child, eager)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(name.name, node.lineno, eager) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *filter(None, [node.module])])
            found.append(Import(base, node.lineno, eager))
            found.extend(Import(f"{base}.{name.name}", node.lineno, eager) for name in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, eager)

    visit(ast.parse(source), True)
    return found


def source_is_package(module: str) -> bool:
    return module.endswith(".__init__")


def plain_name(module: str) -> str:
    return module.removesuffix(".__init__")


def inside(module: str, place: str) -> bool:
    """True for `place` itself and everything below it."""
    return module == place or module.startswith(place + ".")


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[:2] == ["training", "utils"] else None


def step_of(module: str) -> str | None:
    return next((step for step in STEPS if inside(module, step)), None)


def is_small_program(module: str) -> bool:
    """A module directly in the package, such as training.preview: it may look at everything below."""
    parts = plain_name(module).split(".")
    return len(parts) == 2 and parts[1] not in ("utils", *(step.split(".")[1] for step in STEPS))


# --- who may import whom


def rooms_look_down(module: str, source: str) -> list[str]:
    """utils never imports a step; a room imports the rooms below it."""
    room = room_of(module)
    if not module.startswith("training.utils"):
        return []
    problems = []
    for found in imports(module, source):
        if step_of(found.module):
            problems.append(f"{module}:{found.line} imports {found.module}; utils never imports a step")
        other = room_of(found.module)
        if room is None or other is None or other == room or other not in ROOMS:
            continue
        below = ROOMS_BELOW.get(room, ROOMS)
        if other not in below and (room, other) not in SIDEWAYS:
            problems.append(f"{module}:{found.line} imports {found.module}; {room} may import {below}")
    return _distinct(problems)


def steps_keep_apart(module: str, source: str) -> list[str]:
    """Steps never import each other."""
    step = step_of(module)
    if step is None:
        return []
    return _distinct(
        f"{module}:{found.line} imports {step_of(found.module)}; steps never import each other"
        for found in imports(module, source)
        if step_of(found.module) not in (None, step)
    )


def step_parts_look_down(module: str, source: str) -> list[str]:
    """Inside a step: nobody imports main, and only main imports the trainer."""
    step = step_of(module)
    if step is None:
        return []
    problems = []
    for found in imports(module, source):
        for upper, allowed in (("main", ()), ("trainer", ("main",))):
            above = f"{step}.{upper}"
            importer = plain_name(module).removeprefix(step + ".")
            if inside(found.module, above) and not inside(module, above) and importer not in allowed:
                problems.append(f"{module}:{found.line} imports {above}; imports go down only")
    return _distinct(problems)


def nobody_imports_a_program(module: str, source: str) -> list[str]:
    """The small programs stand at the top: nothing in the package imports them."""
    return _distinct(
        f"{module}:{found.line} imports the program {found.module}; imports go down only"
        for found in imports(module, source)
        if found.module.startswith("training.")
        and found.module.count(".") == 1
        and is_small_program(found.module)
        and found.module not in ("training.__version__", plain_name(module))
    )


def third_parties_stay_home(module: str, source: str) -> list[str]:
    """deepspeed in utils/engine alone, vllm in its rollout file alone."""
    problems = []
    for found in imports(module, source):
        homes = ONLY_IN.get(found.module.split(".")[0])
        if homes is not None and not any(inside(module, home) for home in homes):
            problems.append(f"{module}:{found.line} imports {found.module}; only {' and '.join(homes)} may")
    return _distinct(problems)


def maths_needs_torch_alone(module: str, source: str) -> list[str]:
    """The maths rooms import torch, the standard library and each other."""
    place = next((place for place in MATHS if inside(plain_name(module), place)), None)
    if place is None:
        return []
    problems = []
    for found in imports(module, source):
        top = found.module.split(".")[0]
        if top == "training":
            among_maths = any(inside(found.module, other) for other in MATHS)
            allowed = among_maths or any(inside(found.module, other) for other in MATHS_MAY_IMPORT)
            # `from training.utils import layout` counts as training.utils too
            allowed = allowed or any(inside(other, found.module) for other in MATHS)
        else:
            allowed = top in ("torch", "__future__", *MATHS[place]) or top in sys.stdlib_module_names
        if not allowed:
            problems.append(f"{module}:{found.line} imports {found.module}; maths rooms import torch alone")
    return _distinct(problems)


def no_pickles(module: str, source: str) -> list[str]:
    """Nothing is pickled, and torch.load and np.load read no pickles."""
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
    return _distinct(problems)


# --- how a module looks


def no_bags(module: str, source: str) -> list[str]:
    """No module is a bag of loose functions. The folder `utils` holds rooms, and is empty itself."""
    name = plain_name(module)
    if name == "training.utils":
        body = [node for node in ast.parse(source).body if not _is_docstring(node)]
        return [f"{module} holds code; the rooms below it do"] if body else []
    return [f"{module} is a bag by its name"] if name.split(".")[-1] in BAG_NAMES else []


def opens_with_a_docstring(module: str, source: str) -> list[str]:
    """A module says what it is."""
    return [] if ast.get_docstring(ast.parse(source)) else [f"{module} does not open with a docstring"]


def no_prints(module: str, source: str) -> list[str]:
    """Only small programs print."""
    if is_small_program(module) or module in MAY_PRINT:
        return []
    return [f"{module}:{call.lineno} prints" for call in _calls(source) if _dotted(call.func) == "print"]


def no_bare_except(module: str, source: str) -> list[str]:
    """`except:` catches Ctrl-C and our own mistakes; an except names what it expects."""
    return [
        f"{module}:{node.lineno} has a bare except"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


def functions_stay_short(module: str, source: str) -> list[str]:
    """God functions are not born, they grow: this is the fence."""
    return [
        f"{module}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines;"
        f" {LONGEST_FUNCTION_LINES} are the most"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION_LINES
    ]


def masks_come_from_lengths(module: str, source: str) -> list[str]:
    """`ids != pad` is no mask: pad is often eos, and eos counts."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            continue
        names = [_last_name(side) for side in (node.left, node.comparators[0])]
        pads = [name for name in names if re.search(r"pad(_token)?(_id)?$", name)]
        ids = [name for name in names if re.search(r"(ids|tokens|sequences?|seqs?|labels)(_[A-Z]+)?$", name)]
        if pads and ids:
            what = f"{ids[0]} with {pads[0]}"
            problems.append(f"{module}:{node.lineno} compares {what}; masks come from lengths")
    return problems


RULES: tuple[Rule, ...] = (
    rooms_look_down,
    steps_keep_apart,
    step_parts_look_down,
    nobody_imports_a_program,
    third_parties_stay_home,
    maths_needs_torch_alone,
    no_pickles,
    no_bags,
    opens_with_a_docstring,
    no_prints,
    no_bare_except,
    functions_stay_short,
    masks_come_from_lengths,
)


# --- the tree


def modules(package: Path) -> dict[str, str]:
    """Return the source of every module below `package`, by dotted name (packages end in .__init__)."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


def unmirrored(unit_tests: Path, package: Path) -> list[str]:
    """Return the unit tests that stand where no module of theirs does, and the rooms without any test.

    tests/unit/utils/data/test_cache.py and test_cache_damage.py both test training/utils/data/cache.py.
    """
    problems = []
    for test in sorted(unit_tests.rglob("test_*.py")):
        folder = test.parent.relative_to(unit_tests)
        # tests/unit/examples stands for examples/, beside the package
        place = package / folder if (package / folder).is_dir() else package.parent / folder
        name = test.stem.removeprefix("test_")
        stems = [path.stem for path in place.glob("*.py")] + [path.name for path in place.glob("*/")]
        stems += [place.name] if place != package else ["scripts"]
        if not any(name == stem or name.startswith(stem + "_") for stem in stems):
            room = place.relative_to(package.parent)
            problems.append(f"{test.relative_to(unit_tests)} tests no module of {room}")
    for room in sorted({path.parent for path in package.rglob("*.py") if path.name != "__init__.py"}):
        if not list((unit_tests / room.relative_to(package)).glob("**/test_*.py")):
            problems.append(f"{room.relative_to(package.parent)} has no test in tests/unit")
    return problems


def _calls(source: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))


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


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _distinct(sentences) -> list[str]:
    """Drop the second of two sentences about one line: `from a import b` counts as `a` and as `a.b`."""
    by_line = {}
    for sentence in sentences:
        by_line.setdefault(sentence.split(" ", 1)[0], sentence)
    return list(by_line.values())
