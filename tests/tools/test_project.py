"""The project around the written attention: its wheel holds one module, stands alone, and passes its own tests."""

import sys
import zipfile

import pytest

from tests.starts import ended
from tools import vendor
from tools.vendor import TESTS

NAME = "exact_context"
ALONE = f"""
import sys
import {NAME}
from {NAME}.transformers import shard
tops = {{name.split(".")[0] for name in sys.modules}}
print("TAKEN", sorted(tops & set(sys.argv[1:])))
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder with the project and its wheel, unpacked beside a copy of the tests."""
    folder = tmp_path_factory.mktemp("wheels")
    assert vendor.main([str(folder), "--package", NAME]) == 0
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    (folder / NAME / "tests").rename(folder / "tests")
    return folder


def test_the_wheel_has_one_module_and_says_what_it_is(written):
    (built,) = written.glob("*.whl")
    assert built.name == f"{NAME}-{vendor.__version__}-py3-none-any.whl"
    assert built.stat().st_size < 300_000
    about = f"{NAME}-{vendor.__version__}.dist-info"
    assert sorted(path.name for path in (written / "site").iterdir()) == [NAME, about]
    metadata = (written / "site" / about / "METADATA").read_text()
    found = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert [line for line in found if "extra" not in line] == ["torch>=2.11", "numpy>=1.26"]
    assert "License-Expression: Apache-2.0" in metadata
    assert f"# {NAME}" in metadata  # its README
    assert (written / "site" / about / "licenses" / "LICENSE").exists()
    assert (written / "site" / NAME / "ORIGIN.json").exists()


def test_the_wheel_stands_alone_and_passes_its_tests(written):
    ours = sorted(path.name for path in vendor.ROOT.iterdir() if path.is_dir() and any(path.glob("*.py")))
    alone = {"cwd": written, "PYTHONPATH": str(written / "site"), "OMP_NUM_THREADS": "1"}
    done = ended([sys.executable, "-c", ALONE, *ours, "transformers"], **alone)
    assert done.stdout.endswith("TAKEN []\n"), done.stdout + done.stderr
    quick = [f"tests/{path}" for path in TESTS if path.endswith(("test_over.py", "test_batch.py"))]
    done = ended([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", *quick], **alone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(quick) == 2


def test_operators_of_the_package_have_its_name(written):
    sources = [path.read_bytes() for path in (written / "site").rglob("*.py")]
    assert any(f"torch.ops.{NAME}.".encode() in source for source in sources)
    assert not any(b"torch.ops.longmesh" in source or b'"longmesh::' in source for source in sources)
    assert not any(b"from longmesh_attention" in source for source in sources)


@pytest.mark.parametrize("name", ["no-module", "class", "json", "torch", "transformers", "kernels", "1st"])
def test_a_name_that_is_taken_or_is_none_is_refused(name, tmp_path, capsys):
    assert vendor.main([str(tmp_path), "--package", name]) == 1
    assert f"--package is {name!r}; give a name that an import can have" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
