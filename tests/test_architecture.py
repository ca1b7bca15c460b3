"""Promises of the design about the sources themselves: imports, names, sizes, first lines."""

import ast
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests import style
from tests.syntax import imports, nodes

ROOT = Path(__file__).resolve().parents[1]


LIBRARY = "model data parallel parallel/context kernels runtime"
BELOW = "tools/common tools/common/arguments tools/common/report"
RULER = "tools/ruler/examples tools/ruler/prompts tools/ruler/tasks tools/ruler/texts"
PROGRAMS = f"{LIBRARY} train train/checkpoint planner entry {BELOW}"
FOLDERS = {
    "entry": ("the two programs that train", f"{LIBRARY} train planner"),
    "runtime": ("what every folder may use: files, errors of all ranks, processes", ""),
    "kernels": ("attention of one process, each fast path with a naive twin", "runtime"),
    "model": ("plain single-device modules, which know no rank", "kernels runtime"),
    "data": ("text and latents, from files to each rank's batches", "runtime"),
    "parallel": (
        "the dimensions of the mesh",
        "parallel/collectives parallel/context kernels runtime",
    ),
    "parallel/context": ("attention over sequences that ranks share", "kernels runtime"),
    "parallel/collectives": ("sums with gradients, and tensors compared between ranks", ""),
    "parallel/comparison": ("a model over ranks compared with one process", "runtime"),
    "parallel/transformers": (
        "models of transformers over the ranks of a group",
        "parallel/collectives parallel/comparison parallel/context kernels runtime",
    ),
    "parallel/diffusers": (
        "diffusion transformers of diffusers over the ranks of a group",
        "parallel/collectives parallel/comparison parallel/context runtime",
    ),
    "train": ("the one loop that both entries share", f"{LIBRARY} train/checkpoint {RULER}"),
    "train/checkpoint": ("save and load: atomic, verified, on any mesh", "runtime"),
    "planner": ("which arrangement is fastest", f"{LIBRARY} train"),
    "tools": (
        "programs beside training: data, samples, plans, pictures",
        f"{PROGRAMS} tools/parity tools/ruler {RULER}",
    ),
    "tools/calibrate": (
        "a cluster file measured here",
        f"{LIBRARY} train planner tools/common {BELOW}",
    ),
    "tools/common/arguments": ("what every program's command line shares", "runtime"),
    "tools/common/report": ("tables and files of results", "runtime"),
    "tools/common": ("what programs share: cases, a run opened or measured", PROGRAMS),
    "tools/parity": ("every mesh equals one process", f"{PROGRAMS} tools"),
    "tools/ruler": ("RULER: scores by task and length", f"{PROGRAMS} {RULER}"),
    "tools/ruler/examples": (
        "RULER's examples for a tokenizer",
        "data runtime tools/ruler/prompts tools/ruler/tasks",
    ),
    "tools/ruler/prompts": ("RULER's prompts as tokens", "data tools/ruler/tasks"),
    "tools/ruler/tasks": ("RULER's tasks", "runtime tools/ruler/texts"),
    "tools/ruler/texts": ("RULER's texts and draws", "runtime"),
    "bench": ("benchmarks", f"{PROGRAMS} parallel/diffusers tools tools/calibrate"),
    "papers": ("papers' tables row by row", f"{PROGRAMS} tools bench"),
    "papers/trajectories": ("a small world in which attempts teach", f"{PROGRAMS} papers bench"),
    "slurm": ("jobs of a scheduler", f"{LIBRARY} train planner tools {BELOW}"),
}
"""Each folder has one purpose, which no other has, and the others that it stands on.

A row within a row is a part whose imports differ from the rest's.
"""
ENTRIES = {"pretrain_gpt", "pretrain_dit"}
PACKAGES = {name for name in FOLDERS if "/" not in name} - {"entry"}
NODES = {
    "entry": 340,
    "model": 45420,
    "kernels": 46925,
    "parallel": 98100,
    "data": 51920,
    "train": 72540,
    "planner": 63113,
    "runtime": 18100,
    "slurm": 4620,
    "tools": 67955,
    "papers": 21660,
    "bench": 32025,
    "docs": 3950,
    "tests": 470400,
}
"""Maximum syntax nodes per folder.

A number goes down with the code, and up only by what a new capability needs; the commit's message
gives the reason. Lines are not counted: a comment, a blank line or a longer name costs nothing.
"""
NO_SUBJECT = ("What", "That", "Whether", "Those", "How", "Where", "Of")
MAX_NODES_PER_LINE = 6.5
MAX_PER_THOUSAND_LINES = {"comprehensions": 20, "ternaries": 12, "tuple_assignments": 12}
DENSER = {
    "kernels": {"nodes": 7.5, "tuple_assignments": 22},  # Triton's kernels, aligned as formulas are
    "papers": {"comprehensions": 24},
    "bench": {"comprehensions": 24},
    "slurm": {"ternaries": 24},
    "docs": {"ternaries": 19},
    "tests": {"nodes": 7.2, "comprehensions": 46, "tuple_assignments": 26},
}
"""Folders above these limits, and how far: numbers go down only."""
MOST_FILES = 14
LONGEST_FILE = 400
MOST_LINES_OF_RESULTS = 1921


def row_of(names):
    """The row of FOLDERS with the longest path that a module's names start with.

    Its first name if there is none.
    """
    paths = ("/".join(names[:count]) for count in range(len(names), 0, -1))
    return (
        "entry"
        if names[0] in ENTRIES
        else next((path for path in paths if path in FOLDERS), names[0])
    )


def wrong_imports(root):
    wrong = []
    for path in style.sources(root):
        relative = path.relative_to(root)
        owner = row_of(relative.with_suffix("").parts) if len(relative.parts) > 1 else "entry"
        if owner not in FOLDERS:
            continue
        full = set(imports(path, root))
        # `from parallel.context import api` and `from parallel import context` name the part, and
        # nothing beside it.
        rows = {
            row_of(name.split(".")) for name in full - {name.rpartition(".")[0] for name in full}
        }
        strange = (rows & (set(FOLDERS) | {"tests"})) - {*FOLDERS[owner][1].split(), owner}
        wrong += [f"{relative} imports {row}" for row in sorted(strange)]
        if owner == "model":
            names = {
                name
                for name in full
                if name == "os" or name.startswith(("os.", "torch.distributed"))
            }
            wrong += [
                f"{relative} imports {name}, but a model knows no rank and no environment"
                for name in sorted(names)
            ]
    return wrong


def circles(root):
    """Files of ours that import each other, each circle once.

    Imports for types alone and inside functions count too.
    """
    files = {
        path.relative_to(root).as_posix(): path
        for path in style.sources(root)
        if "tests" not in path.parts
    }
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in files
    }
    below = {}
    for name, path in files.items():
        full = set(imports(path, root))
        by_package = defaultdict(set)
        for module in full:
            by_package[module.rpartition(".")[0]].add(module)
        # `from model.hf import llama` names a file of the package, and nothing of its __init__.
        full -= {
            package
            for package in full
            if by_package[package] and by_package[package] <= modules.keys()
        }
        below[name] = {modules[module] for module in full & modules.keys()} - {name}
    circles_found = []
    while True:
        try:
            TopologicalSorter(below).prepare()
        except CycleError as error:
            circle = error.args[1][::-1]  # graphlib tells it from what is imported to what imports
            circles_found.append(circle)
            below[circle[0]].discard(circle[1])
        else:
            return circles_found


def joins(root):
    """Files with a call of init_process_group, under whatever name of its module."""
    paths = []
    for path in style.sources(root):
        names = [node.attr for node in nodes(path) if isinstance(node, ast.Attribute)]
        names += [name.rsplit(".", 1)[-1] for name in imports(path, root)]
        paths += [str(path.relative_to(root))] if "init_process_group" in names else []
    return paths


def lines_of(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def too_long(root):
    return [
        f"{path.relative_to(root)}: {count}"
        for path in style.sources(root)
        if (count := lines_of(path)) > LONGEST_FILE
    ]


def over_budget(counts):
    """Folders that hold more syntax nodes than ``NODES`` allows."""
    offences = []
    for name, count in counts.items():
        limit = NODES.get(name, 0)
        if count.nodes > limit:
            offences.append(f"{name}: {count.nodes} nodes, where NODES above allows {limit}")
    return offences


def too_dense(counts):
    """Folders whose lines say more than the limits allow."""
    offences = []
    for folder, count in counts.items():
        limits = DENSER.get(folder, {})
        limit = limits.get("nodes", MAX_NODES_PER_LINE)
        if count.per_line() > limit:
            offences.append(f"{folder}: {count.per_line():.2f} nodes a line, limit {limit}")

        for name, general_limit in MAX_PER_THOUSAND_LINES.items():
            limit = limits.get(name, general_limit)
            rate = count.per_thousand(getattr(count, name))
            if rate > limit:
                words = name.replace("_", " ")
                offences.append(f"{folder}: {rate:.1f} {words} per 1,000 lines, limit {limit}")
    return offences


def relative_clauses(root):
    """Docstrings whose first word makes a reader wait for the subject."""
    offences = []
    for path in style.sources(root):
        for node in nodes(path):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    first = next(iter(text.split()), "").rstrip(",")
                    offences += [f"{path.relative_to(root)}:{node.lineno}: {first}"] * (
                        first in NO_SUBJECT
                    )
    return offences


def crowded(root):
    """Folders of more modules than one looks through.

    In tools/ a file is a command, which users know by its name.
    """
    modules = (path for path in style.sources(root) if path.name != "__init__.py")
    counts = Counter(path.parent.relative_to(root).as_posix() for path in modules)
    crowds = {name: count for name, count in counts.items() if count > MOST_FILES}
    return [
        f"{name}: {count} files"
        for name, count in crowds.items()
        if name != "tools" and "tests" not in name
    ]


def tracked_results(root):
    """Lines of every text file of results; what git ignores is left out."""
    return {
        str(path.relative_to(root)): lines_of(path)
        for path in sorted(root.glob("*/results/*"))
        if path.suffix in (".json", ".jsonl", ".md", ".csv")
    }


def plant(root, name, text):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_dependencies_point_one_way(tmp_path):
    assert len(list(style.sources(ROOT))) > 20
    assert wrong_imports(ROOT) == []
    plant(tmp_path, "tools/common/arguments.py", "from train import run")
    plant(
        tmp_path, "parallel/context/methods/a.py", "from ..plan import Plan\nfrom ...mesh import x"
    )
    plant(tmp_path, "model/a.py", "def f():\n    from torch import distributed")
    assert [line.split(",")[0] for line in wrong_imports(tmp_path)] == [
        "model/a.py imports torch.distributed",
        "parallel/context/methods/a.py imports parallel",
        "tools/common/arguments.py imports train",
    ]


def test_no_file_imports_itself_by_way_of_others(tmp_path):
    """A circle is also one that exists for types, and one that a function hides."""
    assert circles(ROOT) == []
    plant(tmp_path, "train/__init__.py", "from train import a")
    plant(tmp_path, "train/a.py", "import os\nfrom train import b")
    plant(
        tmp_path,
        "train/b.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from train.c import C",
    )
    plant(tmp_path, "train/c.py", "def f():\n    import train.a")
    (circle,) = circles(tmp_path)
    assert circle[0] == circle[-1]
    assert set(circle) == {"train/a.py", "train/b.py", "train/c.py"}


def test_every_folder_has_one_purpose_and_the_map_knows_it():
    folders = {path.parent.relative_to(ROOT).parts[0] for path in ROOT.glob("*/*.py")} - {"tests"}
    assert folders == PACKAGES
    assert {path.stem for path in ROOT.glob("*.py")} == ENTRIES
    assert len({purpose for purpose, _ in FOLDERS.values()}) == len(FOLDERS)
    code = (ROOT / "docs" / "concepts" / "code.md").read_text(encoding="utf-8")
    assert [
        name for name in sorted(PACKAGES) if f"`{name}/" not in code and f"## {name}/" not in code
    ] == []


def test_folders_are_few_files(tmp_path):
    assert crowded(ROOT) == []
    for number in range(MOST_FILES + 1):
        plant(tmp_path, f"train/a{number}.py", "")
    assert crowded(tmp_path) == [f"train: {MOST_FILES + 1} files"]


def test_processes_join_in_one_place(tmp_path):
    """Any other group would have two of gloo's workers, and no end that waits for them."""
    assert joins(ROOT) == ["runtime/processes.py"]
    plant(tmp_path, "bench/a.py", "from torch.distributed import init_process_group as start")
    assert joins(tmp_path) == ["bench/a.py"]


def test_files_are_short(tmp_path):
    assert too_long(ROOT) == []
    plant(tmp_path, "train/a.py", "x = 1\n" * (LONGEST_FILE + 1))
    assert too_long(tmp_path) == [f"train/a.py: {LONGEST_FILE + 1}"]


def test_folders_keep_their_budget(tmp_path, record_testsuite_property):
    counts = style.by_folder(ROOT)
    assert over_budget(counts) == []
    for name, count in counts.items():
        record_testsuite_property(f"nodes a line in {name}", round(count.per_line(), 2))

    plant(tmp_path, "docs/a.py", "x = 1\n" * NODES["docs"])
    (message,) = over_budget(style.by_folder(tmp_path))
    assert message.startswith(
        f"docs: {4 * NODES['docs'] + 1} nodes"
    )  # four an assignment, and the module


def test_lines_say_one_thing(tmp_path):
    """`python -m tests.style FILE` shows where."""
    assert too_dense(style.by_folder(ROOT)) == []
    plant(tmp_path, "data/a.py", "a, b = [x for x in y if x], 1 if x else (2, 3)")
    offences = too_dense(style.by_folder(tmp_path))
    assert [line.split(", ")[0].split(": ")[0] for line in offences] == ["data"] * 4


def test_names_are_nouns_and_lines_fit_100_columns(tmp_path):
    counts = style.by_folder(ROOT).values()
    assert [line for count in counts for line in count.empty_names] == []
    assert [line for count in counts for line in count.long_lines] == []
    plant(tmp_path, "data/a.py", f"found = 1  # {'x' * 100}")
    (count,) = style.by_folder(tmp_path).values()
    assert (len(count.empty_names), len(count.long_lines)) == (1, 1)


def test_first_lines_begin_with_their_subject(tmp_path):
    assert relative_clauses(ROOT) == []
    plant(
        tmp_path,
        "tests/a.py",
        'def test_a():\n    """Whether, if at all."""\n    """The second."""\n',
    )
    assert relative_clauses(tmp_path) == ["tests/a.py:2: Whether"]


def test_results_are_tables_and_lines_and_no_curves():
    """A line for each run or row, in JSON lines or CSV."""
    lines = tracked_results(ROOT)
    assert len(lines) > 5
    assert sum(lines.values()) < MOST_LINES_OF_RESULTS, lines
    assert [name for name in lines if name.endswith(".json")] == []
    longest = max(
        len(line) for name in lines if name.endswith(".jsonl") for line in (ROOT / name).open()
    )
    assert longest < 1100
