"""The attention as a package of another project.

It is alone, on two ranks, and beside this checkout in one process.
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from parallel.context import context_parallel
from runtime import __version__
from tests.starts import PATIENCE, ended, free_port
from tools import vendor
from tools.common import renaming
from tools.vendor import TESTS

PROJECT = """
import os
import sys
from pathlib import Path

import data, kernels, train  # the project's own
import torch.distributed.tensor

rank = int(not os.fork())  # each would import torch
os.environ["RANK"] = str(rank)
from longmesh_attention import METHODS, context_parallel, make_plan, process_group

def same(a, b):
    return bool(torch.allclose(a, b, rtol=0, atol=1e-12))

def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 16, 4, 8, dtype=torch.float64, generator=generator)

whole = [drawn(seed) for seed in range(4)]
alone = [x.clone().requires_grad_() for x in whole[:3]]
expected = context_parallel("striped", seq_len=16).attend(*alone)
expected.backward(whole[3])
heads_first = (x.transpose(1, 2) for x in whole[:3])
naive = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
with process_group() as group:
    assert group.size() == 2 and "striped" in METHODS
    assert make_plan("striped", seq_len=16, size=2).size == 2
    for method, degree in (("striped", 1), ("ulysses", 2)):
        cp = context_parallel(method, seq_len=16, group=group, ulysses_degree=degree)
        mine = [cp.shard(x, 1).requires_grad_() for x in whole[:3]]
        out = cp.attend(*mine)
        out.backward(cp.shard(whole[3], 1))
        found = [cp.unshard(x, 1) for x in (out, *(x.grad for x in mine))]
        assert all(same(a, b) for a, b in zip(found, (expected, *(x.grad for x in alone))))
        assert same(found[0], naive.transpose(1, 2))
        assert not same(found[0], naive.transpose(1, 2) + 1e-9)
root, here = Path(sys.argv[1]), Path(__file__).parent
names = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
files = [Path(name) for name in names if name]
inside = [f for f in files if f.is_relative_to(root)]
ours = [str(f) for f in inside if f.relative_to(root).parts[0] in sys.argv[2:]]
own = all(Path(module.__file__).parents[1] == here for module in (data, kernels, train))
os.write(1, f"RANK {rank} OURS {ours} OWN {own}\\n".encode())
sys.exit(0 if rank else os.waitstatus_to_exitcode(os.wait()[1]))
"""
BESIDE = """
import torch
from parallel.context import context_parallel
cp = context_parallel("ring", seq_len=8)
import longmesh_attention
x = torch.randn(1, 8, 2, 4)
cp.attend(x, x, x)
"""

NESTED = {"__init__.py": b"", "part/a.py": b""}
NESTED[vendor.ORIGIN] = json.dumps(
    {"files": dict.fromkeys(NESTED, hashlib.sha256().hexdigest())}
).encode()


def started(script, folder, *arguments, **environment):
    (folder / "main.py").write_text(script)
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, "main.py", *arguments],
        cwd=folder,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_project_with_folders_of_our_names_attends_on_two_ranks(tmp_path):
    """Outputs and gradients equal one process, and nothing of this checkout is imported."""
    assert vendor.main([str(tmp_path)]) == 0
    for name in ("data", "train", "kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWN = True\n")
    ours = sorted(
        path.name for path in vendor.ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))
    )
    assert {"parallel", "kernels", "runtime", "data", "train"} <= set(ours)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = started(PROJECT, tmp_path, str(vendor.ROOT), *ours, WORLD_SIZE="2", **address)
    output, _ = ranks.communicate(timeout=PATIENCE)
    assert ranks.returncode == 0, output
    for rank in range(2):
        assert f"RANK {rank} OURS [] OWN True\n" in output


@pytest.mark.slow
def test_package_and_checkout_share_a_process(tmp_path, monkeypatch):
    """Each has its own operators.

    Under one name, the later would silently take the place of the earlier.
    """
    vendor.write(tmp_path / "same", vendor.package(namespace=renaming.NAMESPACE))
    broken = started(BESIDE, tmp_path / "same", PYTHONPATH=str(vendor.ROOT))
    vendor.write(tmp_path, vendor.package())
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = [context_parallel("ring", seq_len=length) for length in (8, 16)]
    package = importlib.import_module(vendor.PACKAGE)
    theirs = [package.context_parallel("ring", seq_len=length) for length in (24, 8)]
    for cp in (*mine, *theirs):
        x = torch.randn(1, cp.plan.seq_len, 2, 4, requires_grad=True)
        out = cp.attend(x, x, x)
        out.sum().backward()
        assert out.shape == x.shape
    assert package.ContextError is not importlib.import_module("parallel.context").ContextError
    output, _ = broken.communicate(timeout=PATIENCE)
    assert broken.returncode != 0
    assert "longmesh_attention" in output  # a call of the checkout's operator ended in the package


def test_the_package_says_where_it_is_from_and_comes_out_the_same(tmp_path):
    first, again = vendor.package(), vendor.package()
    assert first == again
    origin = json.loads(first[vendor.ORIGIN])
    assert origin["version"] == __version__
    assert origin["commit"].encode() in first["__init__.py"]
    assert first["LICENSE"] == (vendor.ROOT / "LICENSE").read_bytes()
    assert not any(
        b"torch.ops.longmesh." in content or b'"longmesh::' in content for content in first.values()
    )
    plain = tmp_path / "plain"
    plain.mkdir()
    assert vendor.commit_of(plain).startswith("unknown")


def link(target, name=""):
    """Put a link in the place of what is moved out of the package, or of all of it."""
    (target / name).rename(target.parent / "kept")
    (target / name).symlink_to(target.parent / "kept")


def contents(folder):
    return {
        path: path.is_symlink() or path.is_dir() or path.read_bytes() for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda target: (target / "own.py").write_text("mine = 1"),
            r"own\.py was added since the package was written; move it away",
        ),
        (lambda target: (target / "part/own").mkdir(), "part/own was added since"),
        (lambda target: (target / "part/own").symlink_to("nowhere"), "part/own was added since"),
        (
            lambda target: (target / "part/own").symlink_to(target / "part"),
            "part/own was added since",
        ),
        (
            lambda target: (target / "__init__.py").write_text("mine = 1"),
            r"__init__\.py was changed since",
        ),
        (lambda target: (target / "part/a.py").unlink(), r"part/a\.py was removed since"),
        (lambda target: link(target, "part"), "part was changed since"),
        (lambda target: link(target, "__init__.py"), r"__init__\.py was changed since"),
        (lambda target: link(target, vendor.ORIGIN), r"ORIGIN\.json was changed since"),
        (link, "longmesh_attention is a symlink, .*; move it away"),
        (lambda target: (target / vendor.ORIGIN).unlink(), "was not written by this command"),
        *(
            (
                lambda target, text=text: (target / vendor.ORIGIN).write_text(text),
                "was not written by this command",
            )
            for text in ("", "[]", '{"files": 5}', '{"files": ["__init__.py"]}')
        ),
    ],
)
def test_only_what_it_wrote_is_written_over(spoil, message, tmp_path):
    target = vendor.write(tmp_path, NESTED)
    (target / "__pycache__").mkdir()
    (target / "__pycache__" / "a.pyc").write_bytes(b"")
    assert vendor.write(tmp_path, NESTED) == target
    assert [path.name for path in tmp_path.iterdir()] == [vendor.PACKAGE]
    assert sorted(path.name for path in target.iterdir()) == ["ORIGIN.json", "__init__.py", "part"]
    spoil(target)
    before = contents(tmp_path)
    with pytest.raises(vendor.UserError, match=message):
        vendor.write(tmp_path, NESTED)
    assert contents(tmp_path) == before


def test_a_destination_that_takes_no_files_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "lost").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    messages = {
        tmp_path / "file": "is a file; give a folder",
        tmp_path / "file" / "a": "file is a file; give a folder",
        tmp_path / "lost": "is a symlink that leads nowhere; give a folder",
        tmp_path / "loop": "is a symlink that leads nowhere; give a folder",
        Path("/proc"): r"which cannot be written to \(.*\); name another folder",
    }
    for destination, message in messages.items():
        with pytest.raises(vendor.UserError, match=rf"^DEST is {destination}, .*{message}$"):
            vendor.write(destination, NESTED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop", "lost"]


def test_a_package_is_on_disk_before_the_old_one_leaves_its_place(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, Path.rename
    vendor.write(tmp_path, NESTED)
    monkeypatch.setattr(
        os,
        "fsync",
        lambda handle: (events.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle)),
    )
    monkeypatch.setattr(Path, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    vendor.write(tmp_path, NESTED)
    assert events[-3:] == ["rename", "rename", str(tmp_path)]
    names = {Path(event).name for event in events[:-3]}
    assert names >= {"__init__.py", "a.py", "part", vendor.ORIGIN}
    assert [path.name for path in tmp_path.iterdir()] == [vendor.PACKAGE]


def test_nothing_stays_of_a_package_that_cannot_be_written(tmp_path):
    before = vendor.write(tmp_path, NESTED)
    with pytest.raises(OSError, match=r"Is a directory|Not a directory|File exists"):
        vendor.write(tmp_path, {"a": b"", "a/b.py": b""})
    assert sorted(path.name for path in tmp_path.iterdir()) == [vendor.PACKAGE]
    assert (before / "__init__.py").read_bytes() == b""


def test_names_are_changed_and_nothing_else():
    source = '''"""Of kernels.merge and longmesh::op; é"""
from kernels import reference
import parallel.context.plan as plan, os
from numba import runtime, kernels; from kernels import kernels
import os, runtime.errors as e, kernels_of as runtime
from runtime.files import owned as é; é(torch.ops.longmesh.op, "longmesh::op")
'''
    expected = '''"""Of kernels.merge and longmesh::op; é"""
from longmesh_attention.kernels import reference
import longmesh_attention.context.plan as plan, os
from numba import runtime, kernels; from longmesh_attention.kernels import kernels
import os, longmesh_attention.runtime.errors as e, kernels_of as runtime
from longmesh_attention.runtime.files import owned as é; \
é(torch.ops.longmesh_attention.op, "longmesh_attention::op")
'''
    assert vendor.renamed(source.encode(), Path("a.py")).decode() == expected
    with pytest.raises(vendor.UserError, match=r"a\.py:1 imports kernels\.merge without an alias"):
        vendor.renamed(b"import kernels.merge", Path("a.py"))
    for line, module in (
        ("from . import plan", r"\."),
        ("def f():\n    from ..mesh import x", r"\.\.mesh"),
    ):
        with pytest.raises(
            vendor.UserError, match=rf"a\.py:\d imports {module} relative to its folder; use"
        ):
            vendor.renamed(line.encode(), Path("a.py"))


@pytest.mark.parametrize(
    "line",
    [
        "from model import llama",
        "import train.trainer",
        "from parallel import mesh",
        "from kernels.lost import x",
    ],
)
def test_an_import_of_what_stays_behind_is_refused(line):
    files = {
        "kernels/__init__.py": b"",
        "kernels/a.py": vendor.renamed(line.encode(), Path("kernels/a.py")),
    }
    with pytest.raises(vendor.UserError, match=r"kernels/a\.py of the package imports"):
        vendor._check_imports(files, {"model", "train", "parallel", "kernels"})


NAME = "exact_context"
ALONE = f"""
import sys
import {NAME}
from {NAME}.transformers import shard
from {NAME}.diffusers import noise_like, shard
tops = {{name.split(".")[0] for name in sys.modules}}
print("TAKEN", sorted(tops & set(sys.argv[1:])))
"""


def test_a_wheel_that_git_sees_in_the_checkout_is_told(tmp_path, monkeypatch, capsys):
    commit = lambda *_: "abc with changes" if (tmp_path / "seen").exists() else "abc"  # noqa: E731
    monkeypatch.setattr(vendor, "commit_of", commit)
    assert vendor.main([str(tmp_path / "seen")]) == 0
    assert (
        "seen lies in this checkout, where git sees it, so results from now on"
        in capsys.readouterr().out
    )
    assert vendor.main([str(tmp_path / "seen")]) == 0
    assert "git sees it" not in capsys.readouterr().out, "it was so before"


@pytest.mark.needs("git")
@pytest.mark.skipif(not (vendor.ROOT / ".git").exists(), reason="no checkout of git")
@pytest.mark.parametrize("folder", ["wheels", vendor.PACKAGE])
def test_what_the_pages_commands_write_is_none_of_gits(folder):
    done = ended(["git", "-C", str(vendor.ROOT), "check-ignore", f"{folder}/file"])
    assert done.returncode == 0, done.stderr


def check_operators(contents):
    """Operators and imports of the package have its name alone."""
    sources = list(contents)
    assert any(f"torch.ops.{NAME}.".encode() in source for source in sources)
    assert not any(
        b"torch.ops.longmesh" in source or b'"longmesh::' in source for source in sources
    )
    assert not any(b"from longmesh_attention" in source for source in sources)


@pytest.mark.slow
def test_the_wheel_has_one_module_stands_alone_and_passes_its_tests(tmp_path):
    assert vendor.main([str(tmp_path), "--package", NAME]) == 0
    (built,) = tmp_path.glob("*.whl")
    assert built.name == f"{NAME}-{vendor.__version__}-py3-none-any.whl"
    assert built.stat().st_size < 350_000
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path / "site")
    about = tmp_path / "site" / f"{NAME}-{vendor.__version__}.dist-info"
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == [NAME, about.name]
    metadata = (about / "METADATA").read_text()
    needs = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist")
    ]
    assert [line for line in needs if "extra" not in line] == ["torch>=2.11", "numpy>=1.26"]
    assert "License-Expression: Apache-2.0" in metadata
    assert f"# {NAME}" in metadata  # its README
    assert (about / "licenses" / "LICENSE").exists()
    assert (tmp_path / "site" / NAME / "ORIGIN.json").exists()

    check_operators(path.read_bytes() for path in (tmp_path / "site").rglob("*.py"))

    (tmp_path / NAME / "tests").rename(tmp_path / "tests")
    ours = sorted(
        path.name for path in vendor.ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))
    )
    alone = {"cwd": tmp_path, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    done = ended([sys.executable, "-c", ALONE, *ours, "transformers", "diffusers"], **alone)
    assert done.stdout.endswith("TAKEN []\n"), done.stdout + done.stderr
    names = ("test_over.py", "test_batch.py", "diffusers/test_refusals.py")
    quick = [f"tests/{path}" for path in TESTS if path.endswith(names)]
    done = ended(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", *quick],
        **alone,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(quick) == 3


def test_a_project_is_the_package_its_tests_and_what_pip_reads():
    files = vendor.project(NAME, vendor.package(NAME), "abc")
    assert f"src/{NAME}/__init__.py" in files
    assert {f"tests/{path}" for path in TESTS} < files.keys()
    assert f'name = "{NAME}"'.encode() in files["pyproject.toml"]
    check_operators(content for path, content in files.items() if path.endswith(".py"))


@pytest.mark.parametrize("name", ["no-module", "class", "json", "torch", "kernels"])
def test_a_name_that_is_taken_or_is_none_is_refused(name, tmp_path, capsys):
    assert vendor.main([str(tmp_path), "--package", name]) == 1
    assert f"--package is {name!r}; give a valid Python module name" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
