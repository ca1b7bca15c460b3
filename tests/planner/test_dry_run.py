"""`--dry-run` as it is called: every configuration, its report, its commands, its refusals."""

import re
import shlex
import time
import tomllib
from pathlib import Path

import pytest

import pretrain_dit
import pretrain_gpt
from model.families import DEFAULT, FAMILIES
from planner.cluster import CLUSTERS
from runtime import progress
from runtime.errors import UserError
from slurm import submit
from tests.starts import ROOT
from train.config.flags import ConfigError
from train.config.language import parse_args
from train.run import exit_status

H100 = ("--cluster", str(CLUSTERS / "h100_pod.toml"))
MOVED = ("--recompute-granularity", "full", "--recompute-offload", "--loss-chunk-size", "64")
TINY = ROOT / "configs" / "models" / "llama_tiny.toml"
SHAPES_ALONE = ("llama3_8b", "transnormer_7b", "gemma3_27b", "olmo3_32b", "qwen3_5_27b")
FILES = [path for path in sorted((ROOT / "configs").rglob("*.toml")) if path.parent != CLUSTERS]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)  # where no data are
    monkeypatch.setattr(progress, "FIRST_LOG_SECONDS", progress.LOG_SECONDS)


def run(path, *flags):
    """Dry-run a configuration by the entry that takes it.

    One without a vocabulary has one of 1,000 entries.
    """
    text = path.read_text()
    entry = pretrain_dit if "latent_shape" in text or "digits" in text else pretrain_gpt
    vocabulary = () if entry is pretrain_dit or "vocab_size" in text else ("--vocab-size", "1000")
    entry.main(["--config", str(path), "--dry-run", *vocabulary, *flags])


def test_a_line_has_what_the_optimizer_sends(capsys):
    run(
        TINY,
        "--world-size",
        "16",
        "--context-parallel-size",
        "8",
        "--bf16",
        "--optimizer",
        "muon",
        *H100,
    )
    lines = capsys.readouterr().out.splitlines()
    pattern = r"optimizer: in its step rank 0 sends \d+\.\d{3} GB between nodes"
    assert sum(bool(re.fullmatch(pattern, line)) for line in lines) == 1
    assert any(re.search(r"^time: .* optimizer [\d.]+ .?s[,;]", line) for line in lines)


def test_the_report_and_the_commands(capsys):
    run(TINY, "--world-size", "8", "--context-parallel-size", "4", "--bf16", *H100)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("dry run of 8 processes on H100 80GB pod")
    row = next(line for line in lines if line.startswith("| 0 | 0 |"))
    figures = [float(cell) for cell in row.strip("| ").split(" | ")]
    assert figures[10] == pytest.approx(sum(figures[2:10]), abs=5e-3)
    assert not any(line.startswith("optimizer: ") for line in lines)
    assert sum("is not on this machine" in line for line in lines) == 2
    command = f"pretrain_gpt.py --config {TINY} --vocab-size 1000 --context-parallel-size 4 --bf16"
    assert lines[-2] == f"start: torchrun --standalone --nproc-per-node 8 {command}"
    assert lines[-1] == f"or: python -m slurm.submit --cluster {H100[1]} --nodes 1 {command}"


def test_it_says_which_rank_it_runs_and_what_is_not_here(capsys, monkeypatch):
    flags = "--num-layers 2 --pipeline-model-parallel-size 2 --vocab-size 64 --global-batch-size 2"
    for seconds in ("FIRST_LOG_SECONDS", "LOG_SECONDS"):
        monkeypatch.setattr(progress, seconds, -1.0)  # every look is told
    pretrain_gpt.main(["--dry-run", *flags.split()])
    captured = capsys.readouterr()
    assert "running rank 1 of 2 without memory (2 of 2): the optimizer's step, " in captured.err
    assert captured.out.startswith("dry run of 2 processes on a CPU: ")
    assert (
        "note: data_path is not set; give --data-path PREFIX; python -m tools.prepare_data "
        "writes one"
    ) in captured.out
    assert (
        "note: predicted for a CPU, this machine's device; --cluster FILE (such as "
        "configs/clusters/h100_pod.toml) predicts for other machines"
    ) in captured.out
    (start,) = (line for line in captured.out.splitlines() if line.startswith("start: "))
    config = parse_args(shlex.split(start.partition("pretrain_gpt.py")[2]))
    assert (config.data.data_path, config.data.tokenizer_model) == (("PREFIX",), "FILE")
    assert (config.checkpoint.save, config.dry.dry_run) == ("runs/NAME", False)
    with pytest.raises(
        ConfigError, match=r"tokenizer_model runs/data/stdlib\.model is not on this machine"
    ):
        pretrain_gpt.main(["--config", str(TINY), "--dry-run"])


def test_the_commands_name_the_cluster_that_auto_chooses_for_and_submit_takes_them(capsys):
    size = [
        "--world-size",
        "8",
        "--context-parallel-size",
        "4",
        "--bf16",
        "--global-batch-size",
        "64",
    ]
    run(TINY, *size, "--context-parallel-method", "auto", "--save", "none", *H100)
    start, by_slurm = (shlex.split(line) for line in capsys.readouterr().out.splitlines()[-2:])
    entry = start[start.index("pretrain_gpt.py") :]
    assert entry[-2:] == list(H100)
    assert by_slurm[by_slurm.index("pretrain_gpt.py") :] == [*entry, "--save", "runs/NAME"]
    assert submit.main(["--dry-run", *by_slurm[4:]]) == 0


def test_what_does_not_fit_ends_with_a_status_of_its_own(capsys, tmp_path):
    """After the whole report; what fits has its verdict there."""
    flags = [
        "--dry-run",
        "--config",
        str(TINY),
        "--vocab-size",
        "64",
        "--context-parallel-size",
        "1",
        "--bf16",
    ]

    def verdict(**limits):
        text = Path(H100[1]).read_text()
        for name, value in limits.items():
            text = re.sub(rf"^{name} = \S+", f"{name} = {value}", text, flags=re.M)
        (tmp_path / "c.toml").write_text(text)
        status = exit_status(
            pretrain_gpt.main, [*flags, *MOVED, "--cluster", str(tmp_path / "c.toml")]
        )
        return status, *capsys.readouterr()

    status, out, err = verdict()
    assert (status, err) == (0, "")
    (heads,) = (line.split(" | ") for line in out.splitlines() if line.startswith("| stage"))
    (cells,) = (line.split(" | ") for line in out.splitlines() if line.startswith("| 0 "))
    assert float(cells[heads.index("GB of host memory")]) > 0
    assert re.search(r"\nfits in 81\.9 GB: a process takes at most [\d.]+ MB\n", out)
    for limits, message in (
        ({"memory_gb": 0.01}, "does not fit in 0.01 GB: a process takes "),
        ({"host_memory_gb": 0.001}, "does not fit in 0.001 GB of host memory: a process moves "),
    ):
        status, out, err = verdict(**limits)
        assert status == 3
        assert "\nstart: torchrun " in out
        assert err.startswith(f"error: {message}")
        assert err.endswith(
            "; python -m tools.plan --fits with the same flags says what to change\n"
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--world-size 6 --context-parallel-size 4", "context_parallel_size is 4"),
        ("--world-size 0", "world_size is 0"),
        (" ".join(H100), "on cuda takes bfloat16 or float16, but got torch.float32"),
        ("--device cuda", "no file in configs/clusters describes this machine, on which"),
        ("--cluster none.toml", "none.toml: cannot be read"),
    ],
)
def test_what_a_run_would_be_refused_for(flags, message, monkeypatch):
    with pytest.raises(UserError, match=message):
        run(TINY, *flags.split())
    with pytest.raises(ConfigError, match="world_size is 8, but dry_run is not set"):
        pretrain_gpt.main(["--world-size", "8"])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="dry_run needs only one process, but RANK is set"):
        pretrain_gpt.main(["--dry-run"])


def at_size(path):
    return () if "tiny" in path.stem else ("--bf16", *H100)


QUICK = (None, "llama", "transnormer", "olmo3")
"""Kinds of models of ``make test``.

None is a diffusion transformer's, and a llama's that a file leaves out.
"""


def one_of_a_kind():
    """Return the settings of the first configuration of each kind of model, by its path."""
    kinds = {}
    for path in FILES:
        settings = {
            name: value
            for section in tomllib.loads(path.read_text()).values()
            for name, value in section.items()
        }
        kinds.setdefault((settings.get("model_type"), "latent_shape" in settings), (path, settings))
    return kinds.values()


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        pytest.param(
            *kind,
            id=kind[0].stem,
            marks=() if kind[1].get("model_type") in QUICK else pytest.mark.slow,
        )
        for kind in one_of_a_kind()
    ],
)
def test_every_kind_of_model_on_its_mesh(path, settings, capsys):
    """With a layer a stage, and sequences of 4,096 tokens at most."""
    layers = max(settings.get("pipeline_model_parallel_size", 1), settings.get("softmax_every", 1))
    layers = max(layers, FAMILIES[settings.get("model_type", DEFAULT)].config.delta_rule * 4 or 1)
    shorter = ("--seq-length", "4096") if settings.get("seq_length", 0) > 4096 else ()
    run(path, *at_size(path), "--num-layers", str(layers), *shorter)
    assert "an optimizer step ran" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_configuration_at_its_size(path, capsys, tmp_path):
    """SHAPES_ALONE give no recomputation, without which no 80 GB hold them."""
    large = tmp_path / "large.toml"
    large.write_text(Path(H100[1]).read_text().replace("\nmemory_gb = 81.9", "\nmemory_gb = 1000"))
    run(path, *at_size(path), *(("--cluster", str(large)) if path.stem in SHAPES_ALONE else ()))
    assert "an optimizer step ran" in capsys.readouterr().out


@pytest.mark.slow
def test_70b_on_512_gpus_takes_less_than_a_minute(capsys):
    began = time.process_time()  # of this process, whatever else the machine does
    run(ROOT / "configs" / "models" / "llama2_70b.toml", "--world-size", "512", *H100)
    seconds = time.process_time() - began
    print(capsys.readouterr().out, f"{seconds:.1f} s")
    assert seconds < 60
