"""Mixed documents over the link: groups have every token once, and what crosses is planned."""

import numpy as np
import pytest

from bench.link import documents
from bench.link.documents import assigned, crossing, one_group_plan, plan_of, shape_of
from bench.link.network import Network
from tests.bench.link.test_link import permitted
from tools.common.report import read_records

SIZES = {"seq_length": 2048, "num_heads": 4, "head_dim": 16}
NETWORK = Network(rails=False, ranks_per_node=2)  # not entered


@pytest.mark.parametrize("longest", documents.LONGEST)
def test_groups_have_every_token_once(longest):
    work = shape_of(longest, 4, **SIZES)
    turns = assigned(work, 4)
    spans = sorted(span for part in turns for span in part.spans)
    assert spans[0][0] == 0
    assert spans[-1][1] == work.cu_seqlens[-1] == 2048
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
    assert max(part.turn.size for part in turns) == longest
    for part in turns:
        assert plan_of(part.turn).seq_len == sum(end - start for start, end in part.spans)


def test_a_group_inside_a_node_crosses_no_link():
    work = shape_of(2, 4, **SIZES)
    crossed = [crossing(plan_of(t.turn), work, t.turn.first, 2) for t in assigned(work, 4)]
    assert np.sum(crossed) == 0
    long = shape_of(2, 4, **SIZES | {"seq_length": 16384})
    assert crossing(one_group_plan(long, NETWORK), long, 0, 2).max() > 0
    whole = shape_of(4, 4, **SIZES)
    crossed = [crossing(plan_of(t.turn), whole, t.turn.first, 2) for t in assigned(whole, 4)]
    assert np.sum(crossed) > 0


@pytest.mark.slow
@permitted
def test_every_way_computes_the_same_and_crosses_what_is_planned(tmp_path, capsys):
    flags = ["--seq-length", "1024", "--head-dim", "16", "--longest", "1", "4", "--repeats", "1"]
    flags += ["--rate", "400mbit", "--results", str(tmp_path)]
    assert documents.main(flags) == 0, capsys.readouterr().err
    (path,) = tmp_path.glob("link-documents-*.jsonl")
    for row in read_records(path)["ways"]:
        assert row["attention_by_plan"] <= row["crossed"]
        assert row["crossed"] <= 1.1 * row["attention_by_plan"] + (1 << 15)
