"""Verdicts on stubbed runs; their cases are configurations that the entries take.

The runs themselves (`make cuda-stub`) need a CUDA build of torch, which CI has not, and are no test. What `make test`
has instead are fake tensors: a step of each kind of configuration (tests/planner/test_dry_run.py), and of every method
and model (tests/planner/test_waits.py).
"""

from bench.memory import command, lines_of
from tests.cuda_stub import check
from tests.cuda_stub.check import CASES, MODELS, line, main, verdict
from tools.fit import parsed

RIGHT = {"processes": 1, "bytes": 1000, "predicted_bytes": 1040, "launches": 7, "waits": 1, "copies": 2}


def test_an_error_and_a_wrong_prediction_are_told():
    assert verdict(RIGHT) == ""
    assert line("llama", RIGHT).endswith("launches 7, waits 1, copies 2")
    for predicted in (1060, 940):
        wrong = RIGHT | {"predicted_bytes": predicted}
        assert verdict(wrong) == f"the prediction is {predicted / 10 - 100:+.1f}% off"
        assert line("llama", wrong).endswith("off")
    failed = {"processes": 2, "failed": "RuntimeError: two"}
    assert line("llama", failed) == "llama: FAILED: RuntimeError: two"


def test_the_exit_status_is_1_where_one_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(check, "check_machine", lambda: None)
    monkeypatch.setattr(check, "measure", lambda processes, flags: RIGHT)
    assert main(["--only", "llama full"]) == 0
    monkeypatch.setattr(check, "measure", lambda processes, flags: RIGHT | {"bytes": 2000})
    assert main(["--only", "llama --compile"]) == 1
    assert "1 of 1 configurations are not as they must be: llama --compile" in capsys.readouterr().err
    assert main(["--only", "none of them"]) == 1


def test_every_case_is_a_configuration():
    for name in lines_of(CASES):
        processes, flags = command(name, MODELS)
        assert processes in (1, 2, 4)
        parsed(flags.split())
