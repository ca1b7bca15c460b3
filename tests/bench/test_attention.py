"""The attention bench through its command line at a tiny size.

Its processes are real, and its figures agree with each other.
"""

from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from statistics import median

import pytest
import torch

from bench import attention
from bench.attention import MASKED_METHODS, compare, judge, slowest_pairs, summary
from bench.harness import MeasureError, check_same
from bench.processes import ONE_PROCESS, Contestants
from bench.shapes import LENGTHS, MaskedShape, documents_of
from runtime.machine import usable_cores
from tools.common.report import read_records

needs_two_cores = pytest.mark.skipif(len(usable_cores()) < 2, reason="two ranks need a core each")


def test_the_limit_counts_the_slowest_rank_of_each_round_and_of_an_exchange_the_busiest():
    work = MaskedShape(seq_length=64)
    assert slowest_pairs("ring", work, 2) == 32 * 33 / 2 + 32 * 32
    assert slowest_pairs("striped", work, 2) == 2 * 32 * 33 / 2
    assert slowest_pairs("zigzag", work, 2) == slowest_pairs("allgather", work, 2) == 64 * 65 / 4
    # in a ring of 4 the first round is all ranks', and in each other one the last rank has a whole
    # square
    assert slowest_pairs("ring", work, 4) == 16 * 17 / 2 + 3 * 16 * 16
    packed = MaskedShape(seq_length=4096, documents="lognormal")
    by_rank = packed.plan("exchange", 4).work().pairs
    assert slowest_pairs("exchange", packed, 4) == by_rank.sum(0).max() < by_rank.max(1).sum()
    assert by_rank.sum() == packed.pairs
    assert slowest_pairs("exchange", packed, 4) <= 1.02 * packed.pairs / 4


@pytest.mark.parametrize(
    ("documents", "window"), [(None, None), (None, 24), ("lognormal", None), ("lognormal", 24)]
)
def test_pairs_are_those_of_the_mask_and_torch_computes_the_same(documents, window):
    work = MaskedShape(
        seq_length=200, num_heads=2, kv_heads=1, head_dim=4, documents=documents, window=window
    )
    bounds = work.cu_seqlens
    document_ids = torch.bucketize(torch.arange(200), torch.tensor(bounds[1:]), right=True)
    distance = torch.arange(200)[:, None] - torch.arange(200)
    visible = (
        (document_ids[:, None] == document_ids) & (distance >= 0) & (distance < (window or 200))
    )
    assert work.pairs == visible.sum()
    assert len(bounds) == (2 if documents is None else 5)
    q, k, v, _ = (x.double().transpose(1, 2) for x in work.tensors())
    truth = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, enable_gqa=True
    )
    assert torch.allclose(
        work.attend(*work.tensors()[:3]).double(), truth.transpose(1, 2), atol=1e-5
    )


def test_a_step_lasts_as_long_as_its_slowest_rank_and_targets_are_judged():
    work = MaskedShape(seq_length=64)
    ring = summary([[1.0, 3.0], [4.0, 1.0]], work, 1552)
    fast = summary([[2.0, 2.0]] * 2, work, 1056)
    assert (ring["seconds"], ring["median"]) == ([3.0, 4.0], 3.5)
    compared = compare({"ring": ring, "striped": fast, ONE_PROCESS: fast}, 2, work)
    assert compared["ratios"]["ring/striped"]["ratio"] == 1.75
    assert [target["met"] for target in compared["targets"]] == [True, True]
    slow = compare({"striped": ring, ONE_PROCESS: fast}, 2, work)
    assert [target["met"] for target in slow["targets"]] == [False]
    windowed = replace(work, window=8)
    rows = (
        ("zigzag", 3.0, 1500),
        ("striped", 2.5, 1010),
        ("exchange", 2.2, 1000),
        (ONE_PROCESS, 2.5, 1010),
    )
    summaries = {name: summary([[seconds]] * 2, windowed, pairs) for name, seconds, pairs in rows}
    compared = compare(summaries, 2, windowed)
    assert compared["ratios"]["zigzag/exchange"]["gain_reached"] == pytest.approx(
        (3.0 / 2.2 - 1) / 0.5
    )
    assert compared["ratios"]["striped/exchange"]["gain_reached"] is None  # pairs promise 1 %
    met = {target["name"]: target["met"] for target in compared["targets"]}
    assert met == {"zigzag/exchange gain_reached": False, "striped/exchange": True}


@needs_two_cores
def test_contestants_sit_where_they_should_and_end_and_a_failing_rank_is_told():
    with Contestants(MaskedShape(seq_length=32), ("striped",), usable_cores()[:2]) as contestants:
        truth = contestants.fingerprint(ONE_PROCESS)
        check_same("striped", contestants.fingerprint("striped"), truth, "float32")
        assert len(contestants.step("striped")) == 2
        assert len(contestants.step(ONE_PROCESS)) == 1
        processes = [rank.process for rank in (*contestants._ranks, contestants._single)]
        files = [Path(f"/proc/{process.pid}/status") for process in processes]
        if all(path.exists() for path in files):
            allowed = [path.read_text().split("Cpus_allowed_list:")[1].split()[0] for path in files]
            assert [cores.isdigit() for cores in allowed] == [True, True, False]
            assert allowed[0] != allowed[1]
        with pytest.raises(
            MeasureError, match=r"zigzag at step: rank \d failed: KeyError: 'zigzag'; .* is in "
        ) as error:
            contestants.step("zigzag")
    assert not any(process.is_alive() for process in processes)
    assert "\n" not in str(error.value)
    log = Path(str(error.value).rpartition(" is in ")[2])
    assert "Traceback" in log.read_text()
    log.unlink()


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_something_else_is_not_timed(wrong):
    with pytest.raises(MeasureError, match="does not compute the same"):
        check_same("striped", [1.0, wrong], [1.0, 1.0], "float32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-heads", "6", "--kv-heads", "4"], "kv_heads is 4"),
        (["--context-parallel-size", "4096"], "4096 ranks need a core each"),
        (["--window", "1"], "window is 1"),
        (["--alone", "8192"], "--alone is 8192"),
        (["--methods", "rings"], "context_parallel_method 'rings'"),
    ],
)
def test_bad_arguments_are_said_once(capsys, arguments, message):
    assert attention.main(arguments) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_targets_are_judged_by_the_faster_dense_attention():
    work = MaskedShape(seq_length=2048)
    masks = {
        "dense": work,
        "short": replace(work, documents="short"),
        "window": replace(work, window=256),
    }
    dense = 1e-6 * work.pairs
    seconds = {"dense": [dense], "short": [1.5e-6 * masks["short"].pairs], "window": [dense / 3.5]}
    rate, gain = judge({**masks, ONE_PROCESS: work}, seconds | {ONE_PROCESS: [0.8 * dense]})[
        "alone_targets"
    ]
    assert (rate["ratio"], rate["met"]) == (pytest.approx(0.8 / 1.5), False)
    assert (gain["ratio"], gain["met"]) == (pytest.approx(3.5), True)


@needs_two_cores
def test_a_run_writes_both_parts_whose_figures_agree_with_each_other(tmp_path, capsys):
    path = tmp_path / "packed.jsonl"
    shape = (
        "--seq-length 300 --num-heads 2 --head-dim 8 --alone 32 --repeats 3 --documents lognormal"
    )
    assert attention.main([*shape.split(), "--json", str(path)]) == 0, capsys.readouterr().err
    result, printed = read_records(path), capsys.readouterr().out
    assert list(result["contestants"]) == [*MASKED_METHODS, ONE_PROCESS]
    work = MaskedShape(seq_length=300, num_heads=2, kv_heads=2, head_dim=8, documents="lognormal")
    for name, figures in result["contestants"].items():
        assert figures["slowest_pairs"] == (
            work.pairs / 2 if name == ONE_PROCESS else slowest_pairs(name, work, 2)
        )
        assert figures["tflops"] == pytest.approx(
            14 * work.pairs * 2 * 8 / figures["median"] / 1e12
        )
        assert figures["median"] == median(figures["seconds"]) > 0
        assert f"{figures['median']:.3f}" in next(
            line for line in printed.splitlines() if line.startswith(name)
        )
    pairs = {
        f"{above}/{below}": (above, below)
        for above, below in permutations(result["contestants"], 2)
    }
    for name, ratio in result["ratios"].items():
        above, below = (result["contestants"][other] for other in pairs[name])
        assert ratio["ratio"] == pytest.approx(above["median"] / below["median"])
        assert ratio["limit"] == pytest.approx(above["slowest_pairs"] / below["slowest_pairs"])
    assert list(result["alone"]) == ["dense", "short", "window", ONE_PROCESS]
    assert all(len(row["seconds"]) == 3 for row in result["alone"].values())
    assert result["alone"]["window"]["pairs"] == 32 * 33 / 2 + (300 - 32) * 32


@pytest.mark.parametrize("name", LENGTHS)
def test_documents_fill_the_sequence_and_are_the_same_in_every_process(name):
    cu_seqlens = documents_of(name, 16384)
    assert cu_seqlens == documents_of(name, 16384) != documents_of(name, 16384, seed=4)
    lengths = [b - a for a, b in pairwise(cu_seqlens)]
    assert sum(lengths) == 16384
    shortest, longest = {"lognormal": (64, 4096), "short": (100, 1500), "chat": (32, 8192)}[name]
    assert min(lengths[:-1]) >= shortest
    assert max(lengths) <= longest
