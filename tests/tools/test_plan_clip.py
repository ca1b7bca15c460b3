"""The command that plans clips: its table, its JSON, the largest clip, and what it refuses."""

import json
import re

import pytest

from tests.tools.plans import rows_of
from tools.plan_clip import main

WAN = "wan2.1_14b"
LARGE = ("--height", "720", "--width", "1280")


def test_the_fastest_that_fits_comes_first_with_its_call(capsys):
    assert main([WAN, *LARGE, "--top", "3"]) == 0
    out = capsys.readouterr().out
    first, second, *_ = out.splitlines()
    assert first == (
        "8 GPUs of H100 80GB pod, clips of 81 x 720 x 1280: 21 x 45 x 80 = 75,600 tokens, "
        "512 of text that every GPU has"
    )
    assert second == (
        f"{WAN}, WanTransformer3DModel: 14.29 B weights, all trained; 1.96e+16 FLOPs a clip, "
        "8 clips a step"
    )
    assert re.search(
        r"\d+ candidates, of which the best 3 are shown \(--top\); 0 refused, 1 too", out
    )
    assert "too large 1: memory is 81.9 GB, but these take 88.2 or more" in out
    rows = rows_of(out)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    for _, _, memory_by, ranks, seconds, tflops, share, *gigabytes, together in rows:
        assert memory_by == "sharded weights, checkpointing"
        assert ranks in ("2", "4")
        assert float(seconds.split()[0]) == pytest.approx(19_580 / float(tflops), rel=0.01)
        assert float(share.rstrip("%")) == pytest.approx(float(tflops) / 9.89, rel=0.01)
        assert sum(map(float, gigabytes)) == pytest.approx(float(together), abs=0.11)
    assert 'in the training script: cp = shard(transformer, group, method="exchange")' in out
    assert "row 1: attention " in out
    assert "  activations " in out


def test_adapters_pictures_and_one_gpu(capsys):
    assert (
        main(["flux_dev", *("--height", "1024", "--width", "1024"), "--lora", "16", "--ddp"]) == 0
    )
    out = capsys.readouterr().out
    assert "pictures of 1024 x 1024: 1 x 64 x 64 = 4,096 tokens, with 512 of text: 4,608" in out
    assert "18.7 M of them trained, in adapters of 16" in out
    assert rows_of(out)[0][1:3] == ["alone", "whole weights"]
    assert "cp = shard(transformer)\n" in out


def test_json_has_the_same(capsys):
    flags = ["--context", "4", "--method", "ulysses", "--checkpointing", "full", "--json"]
    assert main([WAN, *LARGE, *flags]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["run"]["context"] == 4
    assert row["run"]["recomputed"] == 40
    assert row["run"]["method"]["context_parallel_method"] == "ulysses"
    assert sum(row["predicted_seconds_by_part"].values()) == row["predicted_seconds"]
    assert sum(row["memory_bytes_by_part"].values()) == row["memory_bytes"]
    assert row["predicted_forward_seconds"] < row["predicted_seconds"] / 3
    rate = row["flops"] / row["predicted_seconds"] / 8 / 1e12
    assert row["tflops_per_gpu"] == pytest.approx(rate)


def test_fits_shows_lengths_and_sizes_by_ranks(capsys):
    flags = ["--gpus", "4", "--method", "ring", "--fits"]
    assert main([WAN, *flags]) == 0
    head, titles, *rows, last = capsys.readouterr().out.splitlines()
    assert head == (
        f"{WAN}, 4 GPUs of H100 80GB pod: all weights, sharded weights, checkpointing auto"
    )
    assert titles.split("  ")[0] == "GPUs a clip"
    assert last == "a tenth of the 81.9 GB is left to the allocator"
    lengths = []
    for row, ranks in zip(rows, (1, 2, 4), strict=True):
        ranks_of_row, frames, size = re.split(r"  +", row.strip())
        assert int(ranks_of_row) == ranks
        lengths.append(int(frames.split()[0].replace(",", "")))
        assert " x " in size
    assert lengths == sorted(lengths)
    assert all(length % 4 == 1 for length in lengths)

    assert main([WAN, *flags, "--json", "--context", "4"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["frames"] == lengths[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nothing"], "nothing: cannot be read"),
        (
            [WAN, "--frames", "80"],
            "frames is 80, but the autoencoder encodes the first frame alone",
        ),
        (
            [WAN, "--gpus", "1"],
            "1 tried takes 271.4; use more GPUs, --lora RANK or a smaller clip",
        ),
        (
            [WAN, "--context", "3"],
            "context is 3, which does not divide the 8 GPUs; use one of 1, 2",
        ),
        (
            [WAN, "--method", "zigzag"],
            "method is zigzag, which these models do not use; use auto or",
        ),
        (
            [WAN, "--ddp", "--checkpointing", "none"],
            "use more GPUs, --fsdp, --lora RANK, --checkpointing full or a smaller clip",
        ),
        ([WAN, "--gpus", "0"], "gpus is 0"),
        ([WAN, "--vae", "4", "0", "8"], "vae is 4 0 8; its factors must be 1 or more"),
        (["flux_dev", "--time-per-token"], "FluxTransformer2DModel has one timestep per sample"),
        (
            ["wan2.1_1.3b", "--context", "8", "--method", "ulysses"],
            "no method suits: ulysses_degree is 8 with 12 query and 12 key heads",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys, flags, message):
    assert main(flags) == 1
    assert message in capsys.readouterr().err
