"""One command for any number of GPUs. Devices are stubbed as far as configurations look at them."""

import pytest
import torch

from kernels.attention import select_backend
from tests.starts import ROOT, ended
from tools.fit import fit, main
from train.config.flags import ConfigError
from train.tasks.registry import ENTRIES

QUICK = {"pretrain_gpt.py": "llama_tiny", "pretrain_dit.py": "dit_tiny"}


def stub(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("gpus", "processes", "added"),
    [
        (0, 4, []),
        (1, 1, ["--bf16", "--context-parallel-size", "1"]),
        (2, 2, ["--bf16"]),
        (16, 8, ["--bf16", "--context-parallel-size", "4"]),
    ],
)
@pytest.mark.parametrize("entry", QUICK)
def test_the_quick_start_fits_any_machine(entry, gpus, processes, added, monkeypatch):
    stub(monkeypatch, gpus)
    flags = ["--config", QUICK[entry]]
    assert fit(entry, flags, None) == (processes, added)
    config = ENTRIES[entry].parse_args([*flags, *added])
    select_backend(
        "aten", config.mesh.device_type, torch.bfloat16 if config.train.bf16 else torch.float32
    )


def test_every_tiny_configuration_fits_any_number_of_gpus(monkeypatch):
    for path in sorted((ROOT / "configs" / "models").glob("*_tiny.toml")):
        entry = "pretrain_dit.py" if path.stem == "dit_tiny" else "pretrain_gpt.py"
        parse, validate = ENTRIES[entry].parse_args, ENTRIES[entry].validate
        for gpus in (0, 1, 2, 3, 4, 8, 16):
            stub(monkeypatch, gpus)
            processes, added = fit(entry, ["--config", str(path)], None)
            validate(parse(["--config", str(path), *added]), processes)


def test_what_is_asked_for_stays(monkeypatch):
    stub(monkeypatch, 1)
    flags = ["--config", "llama_tiny"]
    assert fit("pretrain_gpt.py", [*flags, "--device", "cpu"], 1) == (
        1,
        ["--context-parallel-size", "1"],
    )
    assert fit("pretrain_gpt.py", [*flags, "--context-parallel-size", "2"], 1) == (1, ["--bf16"])
    assert fit("pretrain_gpt.py", [*flags, "--attention-backend", "reference"], 2) == (2, [])
    stub(monkeypatch, 0)  # a process is started to say that there is no GPU
    assert fit("pretrain_gpt.py", [*flags, "--device", "cuda"], None)[0] == 1


@pytest.mark.parametrize("nproc", ["0", "two", "-1"])
def test_a_number_of_processes_that_is_none(nproc, monkeypatch):
    monkeypatch.setenv("NPROC", nproc)
    with pytest.raises(ConfigError, match=f"NPROC is '{nproc}'"):
        main(["pretrain_gpt.py"])


@pytest.mark.parametrize(("fails", "status"), [("", 0), ("tools.fit", 2)])
def test_make_starts_what_fits(fails, status, tmp_path):
    """With an interpreter that says what it is given instead of running it."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ -n "{fails}" ] && [ "$2" = "{fails}" ] && exit 3\n'
        'if [ "$2" = tools.fit ]; then echo "8 --bf16"; else echo "$@"; fi\n'
    )
    python.chmod(0o755)
    command = ["make", "pretrain", f"PY={python}", f"RUN={tmp_path / 'run'}", "ARGS=--lr 1e-3"]
    result = ended(command)
    assert result.returncode == status, result.stderr
    started = (
        "--nproc-per-node 8 pretrain_gpt.py --config configs/models/llama_tiny.toml --bf16 --save"
    )
    assert (started in result.stdout) == (status == 0)


def test_the_command_itself(monkeypatch, capsys):
    monkeypatch.delenv("NPROC", raising=False)
    main(["pretrain_gpt.py", "--config", "llama_tiny", "--device", "cpu"])
    assert capsys.readouterr() == ("4\n", "")
