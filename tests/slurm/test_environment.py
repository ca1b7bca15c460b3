"""The environment of a job: its PyTorch must be built for the GPUs that the job asks for."""

import re
import sys

from slurm import submit
from slurm.environment import TORCH
from tests.endings import end
from tests.slurm.test_submit import CLUSTERS, RUN
from tests.starts import ROOT


def python_with(folder, version, cuda):
    """An interpreter whose torch has this version file; of a torch of None, none."""
    folder.mkdir()
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} -S "$@"\n')
    program.chmod(0o755)
    if version is not None:
        (folder / "torch").mkdir()
        (folder / "torch" / "__init__.py").write_text(
            "raise ImportError('no driver on this login node')\n"
        )
        (folder / "torch" / "version.py").write_text(
            f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = None\n"
        )
    return str(program)


def test_a_job_on_gpus_with_a_torch_for_cpus_is_refused_before_it_waits_in_a_queue(
    tmp_path, monkeypatch, capsys
):
    job = ["--cluster", str(CLUSTERS / "h100_pod.toml"), "--nodes", "1"]
    for name, version, words in (
        (
            "small",
            "2.13.0+cpu",
            r"small/python has torch 2\.13\.0\+cpu, which is built for CPUs \(torch\.version",
        ),
        ("none", None, "none/python has no torch"),
    ):
        monkeypatch.setenv("PYTHON", python_with(tmp_path / name, version, None))
        ending = end(submit.main, [*job, *RUN])
        assert ending.status == 1
        assert re.search(f"^error: {tmp_path}/{words}.*make venv TORCH=torch==", ending.stderr), (
            ending.stderr
        )
        assert submit.main([*job, "--dry-run", *RUN]) == 0
        out, err = capsys.readouterr()
        assert f"export PYTHON={tmp_path}/{name}/python\n" in out, (
            "the script names whom it was asked of"
        )
        assert "note: as it is, the job would be refused: " in err
        for way_out in (["--container", "i.sqsh", *RUN], [*RUN, "--device", "cpu"]):
            with monkeypatch.context() as patch:
                patch.setattr("shutil.which", lambda name: None)
                assert "there is no sbatch here" in end(submit.main, [*job, *way_out]).stderr


def test_a_login_node_without_a_gpu_submits_with_a_torch_for_gpus(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHON", python_with(tmp_path / "large", "2.13.0+cu130", "13.0"))
    assert submit.main(["--cluster", "h100", "--nodes", "1", "--dry-run", *RUN]) == 0
    assert "refused" not in capsys.readouterr().err


def test_a_run_that_names_its_device_gets_no_other_and_idle_gpus_are_told(capsys):
    job = ["--cluster", "h100", "--nodes", "1", "--dry-run"]
    assert submit.main([*job, *RUN, "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "--device cuda" not in out
    assert "note: device is cpu, so the job's 8 GPUs a node will be idle" in err
    submit.main([*job, "--array", "--lr 1e-3", "--device cpu", "--", *RUN])
    assert (
        '"$SLURM_ARRAY_TASK_ID" pretrain_gpt.py --device cuda --config' in capsys.readouterr().out
    )


def test_the_torch_that_is_advised_is_the_one_that_make_installs():
    assert f"torch=={TORCH})" in (ROOT / "Makefile").read_text()
