"""LASP's tables: what is out of memory, memory above the floor, longest sequences, counted bytes."""

from papers import lasp
from runtime.ranks import run_ranks


def above_floor(found, backend):
    """Return the rows of a backend that hold more than the least that the paper has for as many GPUs."""
    own = [row for row in found if row.of["backend"] == backend and row.difference]
    held = {row.of["gpus"]: row.published["gb"] for row in reversed(own)}  # the shortest is the first
    return [row for row in own if row.published["gb"] != held[row.of["gpus"]]]


def test_out_of_memory_and_memory_above_the_floor_are_predicted():
    rows = list(lasp.scalability())
    for backend in ("DDP", "FSDP"):
        own = [row for row in rows if row.of["backend"] == backend]
        assert len(own) == 48
        assert sum((row.published["gb"] == "OOM") == (row.analytic["gb"] == "OOM") for row in own) == 48
        above = above_floor(rows, backend)
        assert len(above) == {"DDP": 16, "FSDP": 17}[backend]
        assert max(abs(row.difference["gb"]) for row in above) < 0.15
    assert lasp.memory_gb(1 << 19, "DDP", 16) > lasp.MEMORY_GB > lasp.memory_gb(1 << 19, "FSDP", 16)


def test_longest_sequences_hold_where_the_paper_agrees_with_itself():
    off = {str(row.of["method"]): abs(row.difference["ktokens"]) for row in lasp.ablation()}
    assert [name for name, size in off.items() if size > 0.25] == ["DDP", "DDP+LASP", "FSDP", "FSDP+LASP"]
    assert max(size for name, size in off.items() if "AC" in name) < 0.1


def test_real_ranks_send_a_state_and_ulysses_its_tokens():
    found = run_ranks(lasp.count, lasp.RANKS, [("lasp", {}, True), ("ulysses", {}, True)])[1]
    small, tokens = lasp.HEADS * lasp.WIDTH, lasp.TOKENS
    assert sum(found[0]) == 4 * small**2 // lasp.HEADS
    assert sum(found[1]) == 2 * 4 * tokens * small // lasp.RANKS * (lasp.RANKS - 1) // lasp.RANKS
    assert [row.difference["elements"] for row in [*lasp.volumes()][:2]] == [0.0, -1 / 16]


def test_the_losses_are_the_papers_and_those_kept():
    rows = list(lasp.trained())
    assert len(rows) == 12
    assert rows[0].published == {"without": 3.719, "lasp": 3.715}
    assert all(row.measured for row in rows)
    assert [*lasp.TABLES] == ["volumes", "scalability", "ablation", "convergence"]
