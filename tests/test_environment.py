"""What `make` installs: packages of training alone, extras where a target needs them, every one of them pinned."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.starts import PATIENCE

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("data", "digits", "images", "logging", "dev")


def requirements(name: str) -> dict[str, str]:
    """Package and version of each line of a requirements file, those that it includes left out."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if match := re.match(r"([A-Za-z][\w.-]*)\s*([=<>][^;]*)", line):
            found[match[1].lower().replace("_", "-")] = match[2].strip()
    return found


def names(lines: list[str]) -> set[str]:
    return {re.split(r"[<>=\[]", line)[0].lower() for line in lines}


def planned(target: str, folder: Path, *variables: str) -> str:
    """The commands that make would run for a target, with a fresh environment in ``folder``."""
    # A `make test` that this may run under hands its own variables on.
    own = ("MAKE", "MFLAGS", "PY", "VENV", "RUN", "CONFIG", "NPROC", "ARGS", "EXTRAS", "TORCH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = ["make", "--dry-run", target, f"VENV={folder}", *variables]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    return done.stdout


def test_training_installs_nothing_that_training_does_without() -> None:
    heavy = {"wandb", "tensorboard", "transformers", "diffusers", "datasets", "pandas", "scikit-learn", "pytest"}
    assert not heavy & set(requirements("requirements.txt"))
    assert heavy - {"pandas"} <= {name for extra in EXTRAS for name in requirements(f"requirements-{extra}.txt")}


def test_the_project_names_what_the_files_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert names(project["dependencies"]) - {"torch"} == set(requirements("requirements.txt"))
    assert set(project["optional-dependencies"]) == set(EXTRAS)
    for extra in EXTRAS:
        listed = names(project["optional-dependencies"][extra]) - {"longmesh"}
        assert listed == set(requirements(f"requirements-{extra}.txt")), extra


@pytest.mark.parametrize("name", ["requirements.txt", *(f"requirements-{extra}.txt" for extra in EXTRAS)])
def test_every_requirement_is_locked(name: str) -> None:
    locked = requirements("requirements-lock.txt")
    for package, version in requirements(name).items():
        if package != "triton":  # comes with torch, as the lock's head says
            assert version == f"=={locked[package].removeprefix('==')}", package


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("venv", set()),
        ("pretrain", set()),
        ("dit", {"digits"}),
        ("check", {"dev"}),
        ("test", {"dev"}),
        ("lock", {"dev"}),
    ],
)
def test_a_target_installs_what_it_needs(target: str, extras: set[str], tmp_path: Path) -> None:
    commands = planned(target, tmp_path)
    assert "-r requirements.txt" in commands
    assert set(re.findall(r"-r requirements-(\w+)\.txt", commands)) == extras


def test_extras_can_be_asked_for_and_an_environment_of_ones_own_is_left_alone(tmp_path: Path) -> None:
    commands = planned("venv", tmp_path, "EXTRAS=images logging")
    assert set(re.findall(r"-r requirements-(\w+)\.txt", commands)) == {"images", "logging"}
    assert "pip install" not in planned("test", tmp_path, "PY=python3")
