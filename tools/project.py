"""The written attention as a project of its own: pyproject.toml, README, licence, tests, and the wheel of it."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from runtime import __version__
from runtime.errors import UserError
from runtime.machine import ROOT

Files = dict[str, bytes]
"""Contents by relative path."""
TESTS = (
    "parallel/context/test_over.py",
    "parallel/transformers/families.py",
    "parallel/transformers/test_batch.py",
    "parallel/transformers/test_probe.py",
    "parallel/transformers/test_shard.py",
    "parallel/transformers/test_training.py",
)
"""Tests of ours that need nothing but the package."""
NEEDS = ("torch>=2.11", "numpy>=1.26")
PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Exact attention over sequences that processes share, for your code and models of transformers"
readme = "README.md"
requires-python = ">=3.11"
license = "Apache-2.0"
license-files = ["LICENSE"]
dependencies = {needs}

[project.optional-dependencies]
transformers = ["transformers>=5.23"]

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
{name} = ["LICENSE", "ORIGIN.json"]

[tool.pytest.ini_options]
addopts = "-q -m 'not slow' --import-mode=importlib"
markers = ["slow: minutes long"]
"""
README = """# {name}

Exact attention over one sequence that several processes share: causal or full, packed documents, sliding windows,
sinks, grouped heads, and the gated delta rule; forward and backward, on GPUs and CPUs. It needs torch and NumPy alone.

```python
import torch
from {name} import context_parallel, process_group

with process_group() as group:  # started by torchrun
    cp = context_parallel("exchange", seq_len=4096, group=group, documents=(0, 1500, 4096))
    q, k, v = (cp.shard(x, dim=1) for x in torch.ones(3, 1, 4096, 8, 64))  # this rank's [B, n, heads, D]
    out = cp.attend(q, k, v, window=(1023, 0))  # differentiable
```

A model of transformers keeps its layers:

```python
from {name}.transformers import shard

cp = shard(model, group, method="exchange")  # refuses what it cannot do, by layer and reason
batch = cp.batch(input_ids, labels, documents=lengths)  # the whole batch in, this rank's part out
loss = cp.loss(model(**batch.inputs), batch)  # the same on every rank
print(cp.check(model, batch))  # losses and gradients beside one process, module by module
```

Tests: `pip install pytest`, then `python -m pytest tests`; those of models need transformers.

Written by `python -m tools.vendor DEST --package {name}` of Longmesh {version}, commit {commit}, where it is developed
and documented. Apache-2.0.
"""


def project(
    name: str, package: dict[str, bytes], commit: str, rename: Callable[[bytes, Path], bytes]
) -> dict[str, bytes]:
    """Return the project's files by relative path; ``rename`` gives a source's with our imports renamed."""
    values = {"name": name, "version": __version__, "commit": commit, "needs": str(list(NEEDS)).replace("'", '"')}
    files = {f"src/{name}/{path}": content for path, content in package.items()}
    files["pyproject.toml"] = PYPROJECT.format(**values).encode()
    files["README.md"] = README.format(**values).encode()
    files["LICENSE"] = package["LICENSE"]
    for path in TESTS:
        files[f"tests/{path}"] = rename((ROOT / "tests" / path).read_bytes(), Path("tests", path))
    folders = {parent for path in TESTS for parent in Path("tests", path).parents if parent.name}
    return files | {f"{folder.as_posix()}/__init__.py": b"" for folder in folders}


def wheel(destination: Path, files: Files) -> Path:
    """Build the project's wheel into a folder, with this environment's setuptools; return its path.

    Raises UserError: it cannot be built; the message quotes pip's last lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        for path, content in files.items():
            (Path(folder, "project") / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder, "project") / path).write_bytes(content)
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder]
        done = subprocess.run([*command, f"{folder}/project"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(
                "the wheel could not be built; install pip and setuptools 77 or later here, or leave --package out: "
                f"{' '.join(done.stderr.split()[-60:])}"
            )
        (built,) = Path(folder).glob("*.whl")
        target = destination / built.name
        target.write_bytes(built.read_bytes())
    return target
