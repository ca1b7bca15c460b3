"""A step is replayed to the bit on real ranks, and a bit that flips is found on its rank, in its tensor."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.pretraining import TINY, on_rank
from train import loop
from train.run import exit_status
from train.watching.replay import ReplayError, replaying, verdict

FLIPPED = "layers.1.mlp.up.weight"


def flipping(call: int) -> None:
    """Flip the lowest bit of one gradient on this rank, once, in that step of those to come."""
    plain, calls = loop.finish_step, [0]

    def finish(runner: Any, *args: Any) -> tuple[float, float]:
        found = plain(runner, *args)
        calls[0] += 1
        if calls[0] == call:
            runner.parameters()[FLIPPED].grad.to_local().view(torch.int32).view(-1)[3] ^= 1
        return found

    loop.finish_step = finish


def _replayed(rank: int, size: int, flags: list[str]) -> tuple[str, str, int]:
    on_rank(rank, size, [*flags, "--train-iters", "4", "--save-interval", "2"])
    flags, known = [*flags, "--train-iters", "4", "--replay-step", "4", "--exit-duration-in-mins", "1e-9"], []

    class Knowing(loop.Health):
        def __init__(self, *args: Any) -> None:
            known.append(len(args[-1]))
            super().__init__(*args)

    loop.Health = Knowing  # type: ignore[misc]
    same = on_rank(rank, size, flags)
    assert known == ([2, 2] if rank == 0 else [0, 0]), "good steps before the checkpoint, that spikes are judged by"
    if rank == 1:
        flipping(3)
    with pytest.raises(ReplayError) as caught:
        on_rank(rank, size, flags)

    def again(_: list[str]) -> None:
        raise caught.value

    return same, str(caught.value), exit_status(again, [], 0.0)


def test_a_step_is_the_same_twice_and_a_flipped_bit_is_named(default_data: Path, tmp_path: Path) -> None:
    data = ["--data-path", str(default_data), "--tokenizer-model", f"{default_data}.model"]
    flags = [*TINY, *data, "--save", str(tmp_path), "--load", str(tmp_path), "--eval-iters", "0", "--keep-last", "2"]
    (same, wrong, status), other = run_ranks(_replayed, 2, flags)
    assert "iteration 4 is the same twice, to the bit, on all 2 ranks and as the run recorded it" in same
    named = f"differs first, rank 1 on {socket.gethostname()} in the gradient of {FLIPPED}; test that device"
    assert wrong.startswith(f"iteration 4 is not the same twice: in iteration 3, where it {named}")
    assert (wrong, status) == (other[1], 3)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002", "iter_0000004"]


def test_the_first_difference_counts() -> None:
    late, early = [(3, 0, ""), (3, 2, "a")], [(2, 1, "a"), (2, 2, "a")]
    assert verdict([("n1", []), ("n2", [])]) == ""
    assert "in iteration 2, where it differs first, rank 1 on n2 in the gradient of a;" in verdict(
        [("n1", late), ("n2", early)]
    )
    assert "rank 0 on n1 in its share of the loss;" in verdict([("n1", late), ("n2", [(3, 1, "a")])])


def test_a_step_before_every_checkpoint(tmp_path: Path) -> None:
    from train.config.language import parse_args

    config = parse_args([*TINY, "--load", str(tmp_path), "--replay-step", "3"])
    with pytest.raises(UserError, match=r"replay_step is 3, load is .* with checkpoints of none"):
        replaying(config)
