"""The account of memory is right to the byte, and the policies come out in their order."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import memory
from bench.errors import MeasureError
from bench.memory import Shape, cases, main, measure
from tools.report import read_records

SHAPE = Shape(seq_length=256, num_layers=3, hidden_size=64, vocab_size=1024, chunk_size=32, device="cpu")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")


def test_allocations_are_counted_to_the_byte() -> None:
    held: list[Tensor] = []
    with memory._watch_cpu() as found:
        found["after"](lambda: held.append(torch.empty(1 << 20)))
        assert (found["now"], found["peak"]) == (4 << 20, 4 << 20)
        found["after"](lambda: torch.empty(1 << 19).sum().item())
        assert found["now"] == 4 << 20
        assert 6 << 20 <= found["peak"] < (6 << 20) + 256  # the sum's result too
        found["after"](held.clear)
        assert found["now"] == 0


def test_policies_keep_and_need_less_and_less() -> None:
    found = {name: measure(SHAPE, chosen) for name, chosen in cases(SHAPE).items()}
    kept = {name: numbers["kept"] for name, numbers in found.items()}
    one = SHAPE.seq_length * SHAPE.hidden_size * 4
    outside = 6 * one  # of the layers: the last norm, the hidden states and their gradient, rotary angles
    outside += (head := SHAPE.vocab_size * SHAPE.hidden_size * 4)  # gradient of the head
    assert SHAPE.num_layers * one <= kept["full, loss and FFN in chunks"] < SHAPE.num_layers * one + outside
    out_and_lse = SHAPE.num_layers * SHAPE.seq_length * (SHAPE.hidden_size + 1) * 4  # one head
    assert abs(kept["attention_boundary, loss in chunks"] - kept["full, loss in chunks"] - out_and_lse) < 4096
    assert kept["none"] - kept["none, loss in chunks"] >= SHAPE.seq_length * SHAPE.vocab_size * 4 - head - one
    peaks = [found[name]["peak"] for name in ("none", "none, loss in chunks", "attention_boundary, loss in chunks")]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3
    forwards = {name.split(",")[0]: numbers["attention_forwards"] for name, numbers in found.items()}
    assert forwards == {"none": 1, "selective": 2, "attention_boundary": 1, "full": 2}
    losses = [numbers["loss"] for numbers in found.values()]
    assert max(losses) - min(losses) < 1e-5


def test_what_a_step_leaves_behind_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Tensor] = []
    step = memory._step

    def leaking(*args: object) -> object:
        forward, backward = step(*args)  # type: ignore[arg-type]
        return lambda: (left.append(torch.empty(10)), forward()), backward

    monkeypatch.setattr(memory, "_step", leaking)
    with pytest.raises(MeasureError, match="40 bytes were left"):
        measure(SHAPE, cases(SHAPE)["none"])


@pytest.mark.slow
def test_the_command_measures_in_fresh_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    whole = cases(SHAPE)
    monkeypatch.setattr(memory, "cases", lambda shape: {"none": whole["full, loss in chunks"]})
    sizes = ["--seq-length", "128", "--num-layers", "2", "--hidden-size", "64", "--vocab-size", "128"]
    assert main([*sizes, "--json", str(tmp_path / "x.jsonl")]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert out.splitlines()[2].startswith("none ")
    result = read_records(tmp_path / "x.jsonl")
    assert result["cases"]["none"]["attention_forwards"] == 2
    assert result["cases"]["none"]["peak"] > result["cases"]["none"]["kept"] > 128 * 64 * 4 * 2
    assert result["shape"]["num_layers"] == 2


@without_gpu
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture) -> None:
    assert main(["--device", "cuda"]) == 1
    with pytest.raises(SystemExit):
        main(["--seq-length", "0"])
    device, length = capsys.readouterr().err.splitlines()
    assert device == "error: this needs a CUDA GPU, and torch sees none here; nothing was written"
    assert length.startswith("error: argument --seq-length: '0'")
