"""Documents of mixed lengths: drawn, scheduled and predicted, by hand and by the planner."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import log
from statistics import NormalDist

import numpy as np
import pytest

from bench.documents import cost
from bench.documents.__main__ import (
    group_parts,
    link_of,
    machine_of,
    main,
    one_group,
    outcomes,
    rows_of,
)
from bench.documents.groups import (
    ScheduleError,
    Turn,
    fixed,
    group_size,
    longest_first,
    megatron,
    run,
)
from bench.documents.lengths import load_kinds, log_normal, micro_batches
from bench.documents.report import gain, settings
from planner.layers.attention_cost import AttentionCost
from planner.layers.memory import rank_sizes
from tests.starts import ROOT

KINDS = load_kinds()
SMALL = replace(KINDS["chats"], tokens=1 << 18, max_length=16384)
"""A step small enough for a test."""
RESULT = ROOT / "bench" / "results" / "documents.md"


def drawn(kind, tokens, seed=0):
    return kind.documents(np.random.default_rng(seed), tokens)


def as_squares(turn):
    return sum(length**2 for length in turn.lengths) / turn.size


def turns_of(waves):
    return [turn for turns in waves for turn in turns]


@pytest.mark.parametrize("name", KINDS)
def test_a_step_has_its_tokens_and_no_document_is_too_long(name):
    kind = KINDS[name]
    tokens = kind.step_tokens(8)
    lengths = drawn(kind, tokens)
    assert lengths.sum() == tokens
    assert lengths.min() > 0
    assert lengths.max() <= kind.max_length
    assert sum(part.share for part in kind.parts) == pytest.approx(1)
    assert kind.source.strip()
    assert list(lengths) == list(drawn(kind, tokens)) != list(drawn(kind, tokens, seed=1))


def test_the_fitted_log_normals_have_the_published_figures():
    mean, deviation = log_normal([[12600, 50.0], [36000, 10.0]])
    assert mean == pytest.approx(log(12600))
    assert NormalDist(mean, deviation).cdf(log(36000)) == pytest.approx(0.9)
    mean, deviation = KINDS["repositories"].parts[0].normal
    by_tokens = NormalDist(mean + deviation**2, deviation)  # a log-normal weighted by its value
    assert 1 - by_tokens.cdf(log(65536)) == pytest.approx(98.8 / (689 / 4), abs=0.002)
    assert NormalDist(mean, deviation).cdf(log(4096)) == pytest.approx(0.82, abs=0.005)
    mean, deviation = KINDS["megatron"].parts[0].normal
    assert mean + deviation**2 / 2 == pytest.approx(log(1024), abs=1e-3)


def test_a_histogram_is_drawn_as_it_is():
    (part,) = KINDS["chats"].parts
    lengths = part.draw(np.random.default_rng(0), 100_000)
    edges = part.first / 2 * 2.0 ** np.arange(len(part.counts) + 1)
    counts, _ = np.histogram(lengths, edges)
    assert counts.sum() == len(lengths)
    assert counts / 1e5 == pytest.approx(np.array(part.counts) / sum(part.counts), abs=0.005)


def test_micro_batches_have_all_tokens_and_only_short_documents_are_cut():
    lengths = drawn(SMALL, 1 << 18)
    batches = micro_batches(lengths, 1 << 16)
    assert [int(batch.sum()) for batch in batches] == [1 << 16] * 4
    before, after = Counter(lengths.tolist()), Counter(np.concatenate(batches).tolist())
    assert all(length < 1024 for length in before - after)


@pytest.mark.parametrize("ranks", [8, 32])
@pytest.mark.parametrize("name", ["chats", "prolong_64k", "megatron"])
def test_every_document_is_in_one_group_whose_ranks_have_room(name, ranks):
    lengths = drawn(KINDS[name], 1 << 20).tolist()
    capacity = 16384 if ranks == 8 else 8192
    size = group_size(max(lengths), capacity, ranks)
    for waves in (
        longest_first(lengths, ranks, capacity, as_squares),
        fixed(lengths, ranks, capacity, size),
    ):
        turns = turns_of(waves)
        assert Counter(length for turn in turns for length in turn.lengths) == Counter(lengths)
        assert max(turn.tokens for turn in turns) <= capacity
        for turn in turns:
            assert turn.size & (turn.size - 1) == 0
            assert turn.first % turn.size == 0
            assert turn.ranks.stop <= ranks
    by_length = turns_of(longest_first(lengths, ranks, capacity, as_squares))
    for turn in by_length:
        assert {group_size(length, capacity, ranks) for length in turn.lengths} == {turn.size}


@pytest.mark.slow
def test_megatrons_scheduler_has_every_document_once():
    lengths = drawn(SMALL, 1 << 18).tolist()
    waves = megatron(lengths, 8, 4096)
    turns = turns_of(waves)
    assert Counter(length for turn in turns for length in turn.lengths) == Counter(lengths)
    for wave in waves:
        assert sorted(rank for turn in wave for rank in turn.ranks) == list(range(8))
    assert max(max(turn.lengths) / turn.size for turn in turns) <= 4096


def test_a_document_that_fits_on_no_ranks_is_refused():
    with pytest.raises(ScheduleError, match="has 4097 tokens, but 4 ranks hold 4096"):
        longest_first([4097], 4, 1024, as_squares)


def test_ranks_wait_for_their_group_and_for_a_wave():
    turns = [Turn(0, 1, (3,)), Turn(0, 2, (2,)), Turn(2, 1, (4,))]
    free = run([turns], 4, lambda turn: float(sum(turn.lengths)))
    assert (free.end, free.busy.tolist()) == (5.0, [5.0, 2.0, 4.0, 0.0])
    waves = run([turns[:1], turns[1:]], 4, lambda turn: float(sum(turn.lengths)))
    assert (waves.end, waves.busy.tolist()) == (7.0, [5.0, 2.0, 4.0, 0.0])


def test_longest_first_is_nearly_balanced_and_better_than_a_fixed_size():
    lengths = drawn(SMALL, 1 << 18).tolist()

    def end(waves):
        return run(waves, 8, as_squares).end

    best = end(longest_first(lengths, 8, 4096, as_squares))
    assert best < 1.05 * sum(length**2 for length in lengths) / 8
    assert end(fixed(lengths, 8, 4096, 4)) > best


@pytest.fixture(scope="module")
def machine():
    return machine_of("h100_pod", 8)


def test_a_turn_takes_what_the_planner_predicts_for_the_same_ring(machine):
    """Forward, where both send the same; with links so slow that they decide, and without."""
    for gb_per_s, share in ((360.0, 0.02), (1.0, 0.02)):
        cluster = replace(machine.cluster, inside_gb_per_s=gb_per_s, launch_us=0.0)
        same = replace(machine, cluster=cluster)
        plan = cost.ring_plan(8192, 4)
        planned = AttentionCost(plan, rank_sizes(same.work, plan, 1), cluster).forward()
        turn = Turn(0, 4, (4 * 8192,))
        linear, forward, backward = cost.computing_seconds(same, turn)
        transfer = 8192 * cost.row_bytes(same.work) / (gb_per_s * 1e9) + 5e-6
        layers = same.work.layers
        ring = forward / layers / 4 + 3 * max(forward / layers / 4, transfer)
        assert ring == pytest.approx(planned, rel=share)
        whole = cost.turn_seconds(same, turn)
        back = backward / 4 + 3 * max(backward / 4, 2 * layers * transfer)
        assert whole == pytest.approx(linear + layers * ring + back)


def test_all_ways_compute_the_same_pairs_and_tokens(machine):
    ours, lengths = one_group(machine, SMALL, 0)
    waves = longest_first(lengths, 8, 4096, as_squares)
    grouped = cost.grouped(machine, "groups", waves, 4096)
    assert grouped.computing == pytest.approx(ours.computing, rel=1e-3)
    assert sum(lengths) == 1 << 18
    assert ours.seconds > ours.computing
    assert grouped.seconds > grouped.computing


def test_a_group_in_a_node_sends_nothing_to_others_and_work_orders_its_batches():
    machine = machine_of("h100_pod", 16)
    _, lengths = one_group(machine, SMALL, 0)
    parts = group_parts(machine, lengths, 4096, 8, cost.METHODS[0])
    in_turn = cost.equal_groups(machine, "", parts, by_work=False)
    by_work = cost.equal_groups(machine, "", parts, by_work=True)
    assert in_turn.sent.between == by_work.sent.between == 0 < in_turn.sent.inside
    assert by_work.seconds <= in_turn.seconds
    assert by_work.computing == pytest.approx(in_turn.computing)
    assert group_parts(machine, [16384] * 16, 1024, 8, cost.METHODS[0]) == []


def test_a_method_that_splits_heads_computes_the_same_pairs_and_sends_less_in_the_ring(machine):
    """Every setting that counts as ours computes the same, and has its own traffic."""
    machine = replace(machine, ranks=16)
    _, lengths = one_group(machine, SMALL, 0)
    sent = set()
    for method in cost.METHODS:
        (part,) = cost.parts_of(machine, 16, method, [np.array(lengths)])
        exchange = cost.parts_of(machine, 16, cost.METHODS[0], [np.array(lengths)])[0]
        assert part.computing == pytest.approx(exchange.computing, rel=1e-3), method
        assert part.method == method.title
        sent.add(part.sent)
    assert len(sent) == len(cost.METHODS)


def test_a_rings_crossing_rank_gets_the_whole_link_of_its_node():
    """A shared link of 8 times the rate is no different from the crossing rank's own, times 8."""
    fast = machine_of("h100_pod", 32)
    shared = machine_of("h100_pod", 32, 10.0)
    assert shared.cluster.between_link == "node"
    turn = Turn(0, 16, (32768,))
    assert cost.crossing_rate(shared, turn) == 10e9
    private = replace(fast, cluster=replace(fast.cluster, between_gb_per_s=10.0))
    assert cost.turn_seconds(shared, turn) == cost.turn_seconds(private, turn)
    slow = replace(fast, cluster=replace(fast.cluster, between_gb_per_s=1.25))
    assert cost.turn_seconds(slow, turn) > 2 * cost.turn_seconds(shared, turn)
    # Nodes of 6: two rings of 8 meet on the second one, and halve its link.
    six = replace(shared, cluster=replace(shared.cluster, gpus_per_node=6))
    assert cost.crossing_rate(six, Turn(0, 8, (8192,))) == 5e9


def test_computing_hides_the_exchange_of_weights_but_for_a_share():
    machine = machine_of("h100_pod", 16)
    exchange = machine.exchange_seconds
    share = machine.cluster.exposed_share
    assert 0 < share < 1
    assert machine.exposed_seconds(0.0) == exchange
    assert machine.exposed_seconds(0.1 * exchange) == pytest.approx(0.9 * exchange)
    assert machine.exposed_seconds(10 * exchange) == pytest.approx(share * exchange)


def test_gradients_in_float32_make_a_ring_slower_only_if_links_decide():
    for between, slower in ((40.0, False), (0.1, True)):
        machine = machine_of("h100_pod", 16, between)
        float32_machine = replace(machine, ring_gradient_bytes=4)
        turn = Turn(0, 16, (1 << 20,))
        seconds = cost.turn_seconds(machine, turn)
        assert (cost.turn_seconds(float32_machine, turn) > seconds) is slower


def test_a_ring_over_nodes_sends_between_them():
    machine = machine_of("h100_pod", 16)
    row = 3 * machine.work.layers * cost.row_bytes(machine.work)
    for turn, crossing in ((Turn(0, 8, (8192,)), 0), (Turn(0, 16, (8192,)), 2)):
        sent = cost.grouped(machine, "", [[turn]], 1024).sent
        ring = row * (turn.size - 1) * turn.tokens / 16
        assert sent.between == pytest.approx(ring * crossing)
        assert sent.inside == pytest.approx(ring * (turn.size - crossing))


@pytest.mark.slow
def test_the_program_writes_a_row_for_each_way(tmp_path, capfd):
    flags = ["--kinds", "megatron", "prolong_512k", "--ranks", "16", "--results", str(tmp_path)]
    assert main(flags) == 0, capfd.readouterr().err
    text = (tmp_path / "documents.md").read_text()
    assert (
        "ProLong, 512K, 16 ranks: left out, a document has 524288 tokens" in capfd.readouterr().out
    )
    rows = [line for line in text.splitlines() if line.startswith("| Megatron's benchmark | 16 |")]
    assert len(rows) == 6  # two tables for each rate of the links
    assert main(["--ranks", "12"]) == 1
    assert "--ranks has 12" in capfd.readouterr().err


@pytest.mark.slow
def test_the_ways_of_a_small_step(machine):
    ways = outcomes(machine_of("h100_pod", 16), SMALL, 0)
    assert len(ways) == 7
    assert ways["groups"].seconds <= ways["groups, float32"].seconds
    assert ways["groups"].seconds <= ways["groups, Megatron"].seconds
    assert ways["equal groups, by work"].seconds <= ways["equal groups"].seconds


def test_a_gain_is_over_the_better_of_ours():
    ways = {"one group": 3.0, "equal groups": 2.0, "groups": 1.6}
    steps = [
        {"link": "1 GB/s", "kind": "chats", "ranks": 16, "way": way, "step": step}
        for way, step in ways.items()
    ]
    (setting,) = settings(steps)
    assert gain(setting, "groups") == pytest.approx(1.25)


@pytest.mark.slow
def test_the_result_has_what_the_program_predicts():
    """A row of the committed file, predicted again."""
    machine = machine_of("h100_pod", 64, 10.0)
    kind = KINDS["megatron"]
    steps = {row["way"]: row["step"] for row in rows_of(machine, kind, 1)}
    text = RESULT.read_text()
    section = text[text.index(f"{link_of(machine)} to other nodes") :]
    head, *rows = tables(section)[0]
    (row,) = [row for row in rows if row[0] == kind.title]
    for way, step in steps.items():
        assert float(row[head.index(way)]) == pytest.approx(step, rel=1e-3), way
    assert "groups" in steps


def test_groups_by_length_gain_less_than_the_pages_limit():
    """The page's decision: below 1.3 in every setting of the result."""
    gains = []
    for head, *rows in tables(RESULT.read_text()):
        if "ours / groups" in head:
            gains += [float(row[head.index("ours / groups")]) for row in rows]
    assert len(gains) == 3 * len(KINDS)
    assert max(gains) < 1.3


def tables(text):
    """The tables of a page: lists of rows of cells, without the line below the head."""
    blocks = [[]]
    for line, following in pairwise([*text.splitlines(), ""]):
        if line.startswith("|"):
            blocks[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        if not following.startswith("|") and blocks[-1]:
            blocks.append([])
    return [[block[0], *block[2:]] for block in blocks if block]
