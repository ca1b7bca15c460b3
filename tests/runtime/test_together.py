import pytest
import torch.distributed as dist

from runtime.ranks import run_ranks
from runtime.together import from_first, gather_results, on_all_ranks, raise_together


class DomainError(ValueError):
    pass


class Awkward(ValueError):
    """Cannot be unpickled: its constructor takes more than a message."""

    def __init__(self, message, more):
        super().__init__(message)


ERRORS = {
    "domain": lambda: DomainError("train.toml: lr is -1"),
    "disk": lambda: OSError(28, "No space left on device", "/data/x"),
    "awkward": lambda: Awkward("odd", 1),
    "defect": lambda: ZeroDivisionError("division by zero"),
}


def _failing(rank, size, kinds, as_block):
    def body():
        if rank in kinds:
            raise ERRORS[kinds[rank]]()

    try:
        if as_block:
            with raise_together():
                body()
        else:
            gather_results(body)
    except Exception as error:
        caught = (type(error).__name__ if on_all_ranks(error) else "of one rank", str(error))
    else:
        caught = ("none", "")
    # The ranks are still in step: a later exchange works.
    return *caught, sum(gather_results(lambda: rank))


@pytest.mark.parametrize("as_block", [True, False])
def test_every_rank_raises_the_error_of_the_lowest_failing_rank(as_block):
    answers = run_ranks(_failing, 4, {3: "disk", 1: "domain"}, as_block)
    assert answers == [("DomainError", "train.toml: lr is -1", 6)] * 4


def test_types_are_kept_where_a_user_can_cause_them():
    assert {answer[:2] for answer in run_ranks(_failing, 2, {1: "disk"}, True)} == {
        ("OSError", "[Errno 28] No space left on device: '/data/x'")
    }
    other, own = run_ranks(_failing, 2, {1: "defect"}, True)
    assert own[:2] == ("ZeroDivisionError", "division by zero")
    assert other[0] == "RuntimeError"
    assert "rank 1" in other[1]
    assert "in body" in other[1], "the other ranks get the traceback"
    other, own = run_ranks(_failing, 2, {1: "awkward"}, True)
    assert (own[0], other[0]) == ("Awkward", "RuntimeError")
    assert "odd" in other[1]


def test_an_error_of_one_rank_alone_is_not_of_all():
    assert not any(on_all_ranks(error()) for error in ERRORS.values())


def _values(rank, size):
    pair = dist.new_group([1, 2])
    of_group = gather_results(lambda: rank, pair) if rank > 0 else []
    return gather_results(lambda: rank * rank), from_first(lambda: 10 + rank), of_group


def test_values_are_shared_by_all_ranks_or_a_group():
    assert run_ranks(_values, 3) == [([0, 1, 4], 10, of_group) for of_group in ([], [1, 2], [1, 2])]


def test_without_a_process_group_the_body_runs_alone():
    assert gather_results(lambda: 5) == [5]
    assert from_first(lambda: 6) == 6
    with pytest.raises(DomainError, match="lr"), raise_together():
        raise ERRORS["domain"]()
