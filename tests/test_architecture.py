"""What the design promises about the sources themselves: who imports whom, what is installed, sizes, start-up."""

import ast
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.starts import PATIENCE

ROOT = Path(__file__).resolve().parents[1]

# A package may import what stands here, and itself; None is everything of ours but the tests.
BELOW = {"model", "data", "checkpoint", "parallel", "kernels", "runtime"}
MAY_IMPORT: dict[str, set[str] | None] = {
    "runtime": set(),
    "kernels": {"runtime"},
    "model": {"kernels", "runtime"},
    "parallel": {"kernels", "runtime"},
    "checkpoint": {"runtime"},
    "data": {"runtime"},
    "train": BELOW,
    "planner": BELOW | {"train"},
    "entry": BELOW | {"planner", "train"},
    "tools": None,
    "papers": None,
    "parity": None,
    "testing": None,
    "bench": None,
}
PACKAGES = set(MAY_IMPORT) - {"entry"}
FOLDERS = PACKAGES | {"configs", "slurm", "tests", "docs"}
LONGEST_FILE = 350
MOST_LINES_OF_RESULTS = 1500
LAZY = [
    "PIL",
    "datasets",
    "diffusers",
    "matplotlib",
    "megatron",
    "sentencepiece",
    "sklearn",
    "tensorboard",
    "tokenizers",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "transformers",
    "wandb",
]


def sources(root: Path) -> Iterator[Path]:
    """The Python files of the checkout, without environments and runs."""
    yield from root.glob("*.py")
    for folder in sorted(FOLDERS):
        yield from (root / folder).rglob("*.py")


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, inside functions too; a relative import stays in its package."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wrong_imports(root: Path) -> list[str]:
    wrong = []
    for path in sources(root):
        relative = path.relative_to(root)
        owner = relative.parts[0] if len(relative.parts) > 1 else "entry"
        if owner not in MAY_IMPORT:
            continue
        allowed = MAY_IMPORT[owner]
        allowed = PACKAGES if allowed is None else allowed | {owner}
        tops = {name.split(".")[0] for name in imports(path)} & (PACKAGES | {"tests"})
        wrong += [f"{relative} imports {top}" for top in sorted(tops - allowed)]
        if owner == "model":
            names = {name for name in imports(path) if name == "os" or name.startswith(("os.", "torch.distributed"))}
            wrong += [
                f"{relative} imports {name}, but a model knows no rank and no environment" for name in sorted(names)
            ]
    return wrong


def joins(root: Path) -> list[str]:
    """Files with a call of init_process_group, under whatever name of its module."""
    found = []
    for path in sources(root):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
        names += [name.rsplit(".", 1)[-1] for name in imports(path)]
        found += [str(path.relative_to(root))] if "init_process_group" in names else []
    return found


def claims(search_path: list[str]) -> list[str]:
    """Installed distributions that put one of our folders' names into site-packages."""
    claimed = []
    for distribution in importlib.metadata.distributions(path=search_path):
        tops = set((distribution.read_text("top_level.txt") or "").split())
        tops |= {file.parts[0].removesuffix(".py") for file in distribution.files or ()}
        claimed += [f"{distribution.metadata['Name']} installs {top}" for top in sorted(tops & FOLDERS)]
    return claimed


def too_long(root: Path) -> list[str]:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(root)}
    return [f"{path.relative_to(root)}: {length}" for path, length in lengths.items() if length > LONGEST_FILE]


def tracked_results(root: Path) -> dict[str, int]:
    """Lines of every text file of results; what git ignores is left out."""
    return {
        str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted(root.glob("*/results/*"))
        if path.suffix in (".json", ".jsonl", ".md", ".csv") and not path.name.endswith(".curves.jsonl")
    }


def loaded_by(statements: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has loaded after `statements`, and those in LAZY."""
    code = f"import sys\ntry:\n    {statements}\nexcept (SystemExit, ValueError): pass\nprint('LOADED', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    modules = done.stdout.rsplit("LOADED", 1)[1].split()
    return {name.split(".")[0] for name in modules} | (set(modules) & set(LAZY))


def plant(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_dependencies_point_one_way():
    assert len(list(sources(ROOT))) > 20
    assert wrong_imports(ROOT) == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("kernels/a.py", "import model.llama", "kernels/a.py imports model"),
        ("model/a.py", "from parallel.context import api", "model/a.py imports parallel"),
        ("model/a.py", "import torch.distributed as dist", "torch.distributed"),
        ("model/a.py", "from torch import distributed", "torch.distributed"),
        ("model/a.py", "import os", "model/a.py imports os"),
        (
            "parallel/context/a.py",
            "def f():\n    from train.config.language import Config",
            "parallel/context/a.py imports train",
        ),
        ("parallel/a.py", "from data import loader", "parallel/a.py imports data"),
        ("data/a.py", "import model", "data/a.py imports model"),
        ("train/a.py", "import tools.plot", "train/a.py imports tools"),
        ("pretrain.py", "from bench import attention", "pretrain.py imports bench"),
        ("tools/a.py", "from tests.pretraining import train", "tools/a.py imports tests"),
    ],
)
def test_a_wrong_import_is_seen(tmp_path, name, text, found):
    plant(tmp_path, name, text)
    wrong = wrong_imports(tmp_path)
    assert len(wrong) == 1
    assert found in wrong[0]


def test_right_imports_pass(tmp_path):
    plant(
        tmp_path, "parallel/context/a.py", "import os\nimport torch\nfrom . import plan\nfrom ..mesh import MeshConfig"
    )
    plant(tmp_path, "tools/a.py", "from bench import attention\nimport train.config.language\nimport papers")
    plant(tmp_path, "pretrain.py", "from train.config.language import parse_args\nfrom model.llama import Llama")
    plant(tmp_path, "model/a.py", "import torch\nfrom kernels.attention import block_forward\nfrom model import layers")
    assert wrong_imports(tmp_path) == []


def test_processes_join_in_one_place(tmp_path):
    """Any other group would have two of gloo's workers, and no end that waits for them."""
    assert joins(ROOT) == ["runtime/processes.py"]
    plant(tmp_path, "tools/a.py", "import torch.distributed as d\nd.init_process_group('gloo')")
    plant(tmp_path, "bench/a.py", "from torch.distributed import init_process_group as start")
    assert joins(tmp_path) == ["bench/a.py", "tools/a.py"]


def test_no_installed_distribution_claims_our_folders():
    assert len(list(importlib.metadata.distributions())) > 20
    assert claims([entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]) == []


def test_a_claim_is_seen(tmp_path):
    plant(tmp_path, "kernels-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: kernels\nVersion: 0.1\n")
    plant(tmp_path, "kernels-0.1.dist-info/RECORD", "kernels/__init__.py,,\n")
    plant(tmp_path, "other-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: other\nVersion: 0.1\n")
    plant(tmp_path, "other-0.1.dist-info/top_level.txt", "other\ntests\n")
    assert sorted(claims([str(tmp_path)])) == ["kernels installs kernels", "other installs tests"]


def test_files_are_short():
    assert too_long(ROOT) == []


def test_a_long_file_is_seen(tmp_path):
    plant(tmp_path, "train/a.py", "x = 1\n" * (LONGEST_FILE + 1))
    plant(tmp_path, "train/b.py", "x = 1\n" * LONGEST_FILE)
    assert too_long(tmp_path) == [f"train/a.py: {LONGEST_FILE + 1}"]


def test_results_are_tables_and_lines_and_no_curves():
    """A line for each run, in JSON lines alone, whose curves lie outside the tree."""
    lines = tracked_results(ROOT)
    assert len(lines) > 5
    assert sum(lines.values()) < MOST_LINES_OF_RESULTS, lines
    assert [name for name in lines if name.endswith(".json")] == []
    longest = max(len(line) for name in lines if name.endswith(".jsonl") for line in (ROOT / name).open())
    assert longest < 1000


def test_a_command_line_is_read_before_anything_heavy_is_loaded():
    """--help of both entries, and a flag that is refused, which a person waits for; and so the entries' own imports."""
    commands = [("pretrain_gpt.py", "--help"), ("pretrain_dit.py", "--help"), ("pretrain_gpt.py", "--no-such-flag")]
    for entry, flag in commands:
        loaded = loaded_by(
            f"import runpy; sys.argv = ['{entry}', '{flag}']; runpy.run_path('{entry}')['main'](['{flag}'])"
        )
        assert "train" in loaded
        assert not loaded & set(LAZY)


def test_a_heavy_import_is_seen():
    assert {"train", "sentencepiece"} <= loaded_by("import train.config.flags, sentencepiece")
