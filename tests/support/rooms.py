"""Who may import whom: the floors of the package, as tables and rules. See tests.support.house, which lists the rules.

A room is a folder of modules. Rules read source text; nothing is imported to be checked.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping

from tests.support.imports import circles, closure, import_graph, imports, inside, plain_name
from tests.support.sources import tree

# The rooms of training/utils from the ground up, and the rooms that each of them needs.
_ROOMS = """
base:
contracts: base
data.files: plugins base
plugins: base
data.formats: data.files base
flags: plugins base
layout: contracts base
data.rows: layout flags plugins contracts base
data: data.rows flags data.formats plugins data.files contracts base
engine.config: layout flags plugins base
run: flags plugins contracts base
data.cache: run data.rows data.files contracts base
data.chat: data.rows flags data.formats data.files base
models: layout flags plugins contracts base
data.kinds: data.chat data.cache data data.rows data.formats contracts base
generation: engine.config data.rows flags plugins contracts base
generation.decoding: models plugins contracts base
data.build: data.kinds data.chat data.cache data data.rows flags data.formats data.files contracts base
engine.ranks: models run flags plugins base
loading: models plugins contracts base
engine: engine.ranks run engine.config models flags contracts base
checkpoints: engine engine.ranks loading run layout flags plugins models contracts base
rewards: engine.ranks run flags plugins contracts base
setup: checkpoints engine loading engine.ranks data.build models data.kinds data.chat data.cache run engine.config
    data data.rows layout flags data.formats plugins data.files contracts base
preference: setup engine loading engine.ranks data models run data.rows layout flags data.files contracts base
"""
ROOMS_BELOW: dict[str, tuple[str, ...]] = {
    room: tuple(below.split())
    for room, _, below in (line.partition(":") for line in _ROOMS.strip().replace("\n    ", " ").splitlines())
}

# Third parties that a few places alone import.
ONLY_IN = {
    "deepspeed": (
        "training.utils.engine",
        *(f"threestep.plugins.{name}" for name in ("deepspeed_json", "hybrid", "other_ranks")),
    ),
    "vllm": ("threestep.plugins.vllm",),
}
# The maths rooms import torch, the standard library and each other; and what is listed with each.
MATHS = {
    "training.step1_sft.loss": (),
    "training.step2_reward.loss": (),
    "training.step2_dpo.loss": (),
    "training.step3_ppo.losses": (),
    "training.step3_ppo.kl": (),
    "training.step3_ppo.contracts.measures": (),
    "training.step3_ppo.advantages": (),
    "training.utils.layout": ("numpy",),
    "training.utils.contracts": ("numpy",),
    "training.utils.base.transfer": (),
    "threestep.plugins.mtp.layout": (),
    "threestep.plugins.sft_losses.neftune": (),
    "threestep.plugins.sft_losses.z_loss": (),
    "threestep.plugins.distillation.divergence": (),
}
MATHS_MAY_IMPORT = (
    "training.utils.base.errors",
    "training.utils.base.user_files",
    "threestep.plugins.distillation.settings",
    "training.utils.flags.added",
    "training.utils.flags.flags",
    "training.utils.plugins.objectives",
    "training.utils.preference.arguments",
)
# What rooms hand to each other: the files that importing one of them may load, itself included.
CONTRACTS = ("training.utils.contracts",)
MOST_FILES_OF_A_CONTRACT = 5
# Words of images, the names of their flags aside: in the core they stand in modules of flags, and in no others (or any
# of a room) than these. Everybody else hands `media` on, which `setup.media` has from a plugin. The list may only
# shrink.
IMAGE_WORDS = re.compile(r"(?<![a-z])(image|picture|pixel|vision)|Image|Picture|Pixel|(?<![A-Z])(IMAGE|PICTURE|PIXEL)")
IMAGE_FLAGS = re.compile(r"freeze_vision_tower")
FLAG_MODULES = re.compile(r"\.flags(\.|$)|\.arguments$")
PLACES_WITH_IMAGES = frozenset(
    """
training.utils.contracts.rows training.utils.contracts.rollout_engine training.utils.data.kinds
training.utils.data.rows.media_store training.utils.data.file_dataset
training.utils.data.formats.media training.utils.data.formats.messages
training.utils.data.raw_dataset training.utils.models.families
""".split()
)
MOST_MODULES_OF_A_ROOM = 20
_PLUGIN = re.compile(r"threestep\.plugins\.\w+\.__init__")
SERVES = re.compile(r"\b[Ss]erves\b")


def room_of(module: str) -> str | None:
    """Return the key of ROOMS_BELOW that a module belongs to."""
    rooms = (room for room in ROOMS_BELOW if inside(module, f"training.utils.{room}"))
    return max(rooms, key=len, default=None)


def step_of(module: str) -> str | None:
    """Return the step that a module belongs to, e.g. `training.step1_sft`: every folder `training/step*` is one."""
    found = re.match(r"training\.step\w+", module)
    return found[0] if found else None


def is_program_file(module: str) -> bool:
    """A module directly in the package, such as training.__main__: it may look at everything but steps."""
    parts = plain_name(module).split(".")
    return len(parts) == 2 and parts[1] != "utils" and not step_of(module)


# --- rules on one module


def rooms_look_down(module: str, source: str) -> list[str]:
    """A room of utils imports the rooms that it needs, and nothing outside of utils."""
    if not module.startswith("training.utils"):
        return []
    room = room_of(module)
    problems = []
    for found in imports(module, source):
        if found.module.startswith("training.") and not inside(found.module, "training.utils"):
            problems.append(f"{module}:{found.line} imports {found.module}; utils imports nothing above it")
        other = room_of(found.module)
        if room is not None and other not in (None, room, *ROOMS_BELOW[room]):
            problems.append(f"{module}:{found.line} imports {found.module}; {room} may import {ROOMS_BELOW[room]}")
    return distinct(problems)


def steps_keep_apart(module: str, source: str) -> list[str]:
    """A step imports itself and utils, never another step."""
    step = step_of(module)
    if step is None:
        return []
    return distinct(
        f"{module}:{found.line} imports {found.module}; a step imports itself and utils"
        for found in imports(module, source)
        if found.module.startswith("training.")
        and not any(inside(found.module, place) for place in (step, "training.utils", "training.__version__"))
    )


def step_parts_look_down(module: str, source: str) -> list[str]:
    """Inside a step: nobody imports main, and only main or the run that it starts imports the trainer."""
    step = step_of(module)
    if step is None:
        return []
    problems = []
    for found in imports(module, source):
        for upper, allowed in (("main", ()), ("run", ("main",)), ("trainer", ("main", "run"))):
            above = f"{step}.{upper}"
            importer = plain_name(module).removeprefix(step + ".")
            if inside(found.module, above) and not inside(module, above) and importer not in allowed:
                problems.append(f"{module}:{found.line} imports {above}; imports go down only")
    return distinct(problems)


def nobody_imports_a_program(module: str, source: str) -> list[str]:
    """The small programs are the top floor: nothing in the package imports them."""
    return distinct(
        f"{module}:{found.line} imports the program {found.module}; imports go down only"
        for found in imports(module, source)
        if found.module.startswith("training.")
        and is_program_file(found.module)
        and found.module not in ("training.__version__", plain_name(module))
    )


def nothing_imports_the_front(module: str, source: str) -> list[str]:
    """`threestep`, the command and what Python imports, stands above the package."""
    if inside(module, "threestep"):
        return []
    return distinct(
        f"{module}:{found.line} imports {found.module}; the front imports the package, not the other way round"
        for found in imports(module, source)
        if inside(found.module, "threestep")
    )


def programs_import_no_step(module: str, source: str) -> list[str]:
    """Programs outside of the steps find steps by `known_steps()`, and import none; plugins import what is public."""
    if step_of(module) or inside(module, "training.utils") or inside(module, "threestep.plugins"):
        return []
    return distinct(
        f"{module}:{found.line} imports {found.module}; programs import no step"
        for found in imports(module, source)
        if step_of(found.module)
    )


def third_parties_stay_home(module: str, source: str) -> list[str]:
    """Only the rooms around them know deepspeed and vllm."""
    problems = []
    for found in imports(module, source):
        homes = ONLY_IN.get(found.module.split(".")[0])
        if homes is not None and not any(inside(module, home) for home in homes):
            problems.append(f"{module}:{found.line} imports {found.module}; only {' and '.join(homes)} may")
    return distinct(problems)


def _names(source: str) -> list[tuple[str, int]]:
    """Return every name in `source`, imported modules too, with its line."""
    fields = {
        ast.Name: "id",
        ast.Attribute: "attr",
        ast.FunctionDef: "name",
        ast.ClassDef: "name",
        ast.arg: "arg",
        ast.keyword: "arg",
        ast.alias: "name",
        ast.ImportFrom: "module",
    }
    found = [(node, getattr(node, fields[type(node)])) for node in ast.walk(tree(source)) if type(node) in fields]
    return [(name, getattr(node, "lineno", 0)) for node, name in found if name is not None]


def maths_needs_torch_alone(module: str, source: str) -> list[str]:
    """The maths rooms import torch, the standard library and each other; other types they know by name alone."""
    place = next((place for place in MATHS if inside(plain_name(module), place)), None)
    if place is None:
        return []
    problems = []
    for found in imports(module, source):
        top = found.module.split(".")[0]
        is_ours = top in ("training", "threestep")
        if found.typing and not is_ours:
            continue
        if is_ours:
            among_maths = any(inside(found.module, other) for other in MATHS)
            allowed = among_maths or any(inside(found.module, other) for other in MATHS_MAY_IMPORT)
            # `from training.utils import layout` counts as training.utils too
            allowed = allowed or any(inside(other, found.module) for other in MATHS)
        else:
            allowed = top in ("torch", "__future__", *MATHS[place]) or top in sys.stdlib_module_names
        if not allowed:
            problems.append(f"{module}:{found.line} imports {found.module}; maths rooms import torch alone")
    return distinct(problems)


# --- rules on the package


def no_import_circles(sources: Mapping[str, str]) -> list[str]:
    """No module imports itself by way of others, also not inside functions or for type checking."""
    return [" -> ".join(circle) for circle in circles(import_graph(sources))]


def imports_find_what_they_name(sources: Mapping[str, str]) -> list[str]:
    """An import of this project's finds its module and its name there, also inside functions, which no program may have
    run. `sources` are all that import each other."""
    defined = {module: {name for name, _ in _names(source)} for module, source in sources.items()}
    packages = {module.split(".")[0] for module in sources}
    problems = []
    for module, source in sources.items():
        for found in imports(module, source):
            if found.module.split(".")[0] not in packages:
                continue
            place, _, name = found.module.rpartition(".")
            files = [one for one in (place, f"{place}.__init__") if one in defined]
            is_module = found.module in defined or f"{found.module}.__init__" in defined
            if not (is_module or any(name in defined[file] for file in files) or _is_folder(found.module, sources)):
                problems.append(f"{module}:{found.line} imports {found.module}, which is not there")
    return problems


def _is_folder(name: str, sources: Mapping[str, str]) -> bool:
    return any(module.startswith(f"{name}.") for module in sources)


def rooms_close_no_circle(sources: Mapping[str, str]) -> list[str]:
    """Rooms have floors, those of a step too: none imports itself by way of others."""
    rooms: dict[str, set[str]] = {}
    for module, targets in import_graph(sources).items():
        if _PLUGIN.fullmatch(module):  # it names its modules, and imports none
            continue
        room = module.rpartition(".")[0]
        rooms.setdefault(room, set()).update(target.rpartition(".")[0] for target in targets)
        rooms[room].discard(room)
    for targets in rooms.values():
        targets &= rooms.keys()
    # A step's own folder has its table of contents and its main: the lowest and the highest of its modules.
    # So has a plugin's.
    above = {room for room in rooms if step_of(f"{room}.x") == room or _PLUGIN.fullmatch(f"{room}.__init__")}
    above |= {"training", "training.utils"}
    return [" -> ".join(circle) for circle in circles({room: found - above for room, found in rooms.items()})]


def rooms_stay_small(sources: Mapping[str, str]) -> list[str]:
    """A room can be read at a glance: a feature that does not fit in wants a room."""
    sizes = Counter(module.rpartition(".")[0] for module in sources if module == plain_name(module))
    return [
        f"{room} has {size} modules, at most {MOST_MODULES_OF_A_ROOM}"
        for room, size in sorted(sizes.items())
        if size > MOST_MODULES_OF_A_ROOM
    ]


def contracts_load_little(sources: Mapping[str, str]) -> list[str]:
    """Whoever needs a contract loads that, and hardly more."""
    graph = import_graph(sources, eager_alone=True)
    sizes = {
        module: len(closure(graph, module)) for module in graph if any(inside(module, place) for place in CONTRACTS)
    }
    return [
        f"{module} loads {size} files, at most {MOST_FILES_OF_A_CONTRACT}"
        for module, size in sizes.items()
        if size > MOST_FILES_OF_A_CONTRACT
    ]


def images_stay_home(sources: Mapping[str, str]) -> list[str]:
    """Words of images stand in flags of the core, and in the places listed, each of which does have some."""
    problems, used = [], set[str]()
    for module, source in sources.items():
        name = plain_name(module)
        if FLAG_MODULES.search(name) or not inside(name, "training"):
            continue
        if word := IMAGE_WORDS.search(IMAGE_FLAGS.sub("", source)):
            listed = {module, module.rpartition(".")[0]} & PLACES_WITH_IMAGES
            used |= listed
            if not listed:
                problems.append(f"{module} has the word {word[0]!r}; in the core it is `media`")
    unused = PLACES_WITH_IMAGES - used if "training.utils.setup.media" in sources else ()
    return [*problems, *(f"{place} is in PLACES_WITH_IMAGES and has none" for place in sorted(unused))]


def rooms_have_floors(sources: Mapping[str, str]) -> list[str]:
    """Every folder of utils is a room with a floor, and a room's list names the rooms that it does import."""
    problems = [f"{room} imports itself: {ROOMS_BELOW}" for room in _rooms_in_a_circle()]
    needed: dict[str, set[str | None]] = {}
    for module, targets in import_graph(sources).items():
        folder = module.rpartition(".")[0]
        if folder.startswith("training.utils.") and folder.removeprefix("training.utils.") not in ROOMS_BELOW:
            problems.append(f"{folder} is not in ROOMS_BELOW")
        if room := room_of(module):
            needed.setdefault(room, set()).update(map(room_of, targets))
    for room, found in needed.items():
        unused = [other for other in ROOMS_BELOW[room] if other not in found]
        problems += [f"{room} may import {other} and does not" for other in unused]
    return distinct(problems)


def every_file_serves_somebody(sources: Mapping[str, str]) -> list[str]:
    """Every file is reached from a program (also from benchmarks and examples), or says whom it serves.

    A program's docstring has its command, `python -m NAME`. Others use the word `serves`, in their own docstring or,
    for all files of a room, in the package's. `sources` are those of the package and of what else uses it.
    """
    graph = import_graph(sources)
    programs = {module for module, source in sources.items() if runs_by_itself(source)}
    ours = [name for name in sources if inside(name, "training") or inside(name, "threestep.plugins")]
    plugins = {name for name in ours if _PLUGIN.fullmatch(name)}
    reached = {name for name in sources if name in programs | plugins or name not in ours or _says(name, sources)}
    waiting = list(reached)
    while waiting:
        name = waiting.pop()
        above = {f"{name[: dot.start()]}.__init__" for dot in re.finditer(r"\.", name)} & sources.keys()
        new = (graph[name] | above) - reached
        reached |= new
        waiting += new
    problems = [f"{name}: no program uses it; say whom it serves, or remove it" for name in sources.keys() - reached]
    for name in programs:
        in_core = inside(name, "training")
        command = f"python -m {name.removesuffix('.__main__')}" if in_core else "threestep "
        if name in ours and command not in (ast.get_docstring(tree(sources[name])) or ""):
            problems.append(f"{name}: the program's docstring lacks `{command}`")
    return sorted(problems)


def _says(module: str, sources: Mapping[str, str]) -> bool:
    package = sources.get(f"{module.rpartition('.')[0]}.__init__", "")
    return any(SERVES.search(ast.get_docstring(tree(source)) or "") for source in (sources[module], package))


def runs_by_itself(source: str) -> bool:
    """Whether `python -m` runs more than definitions: the top level has a block for `__main__`, or makes something that
    is told `__name__` (`main = one_model_program(__name__, ...)`)."""
    calls = (
        node.value for node in tree(source).body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    )
    told = any(isinstance(word, ast.Name) and word.id == "__name__" for call in calls for word in call.args)
    return told or any(isinstance(node, ast.If) and "__main__" in ast.dump(node.test) for node in tree(source).body)


def _rooms_in_a_circle() -> list[str]:
    return [circle[0] for circle in circles({room: set(below) for room, below in ROOMS_BELOW.items()})]


def distinct(sentences: Iterable[str]) -> list[str]:
    """Drop the second of two sentences about one line: `from a import b` counts as `a` and as `a.b`."""
    by_line: dict[str, str] = {}
    for sentence in sentences:
        by_line.setdefault(sentence.split(" ", 1)[0] if ":" in sentence else sentence, sentence)
    return list(by_line.values())
