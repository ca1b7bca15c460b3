"""UPipe's record: which lengths fit, and what stages of heads save of it."""

from papers import records
from papers.ring import step_of


def test_every_length_is_predicted_to_fit():
    found = records.supported()
    assert all(row.analytic["supported"] == row.published["supported"] == "yes" for row in found)
    assert float(found[-1].analytic["ulysses_gb"] or 0) < 0.95 * records.CLUSTER.memory_gb
    assert found[-1].job is not None
    assert found[-1].job.hardware == "8 H100 of 80 GB, 8 in a node"


def test_stages_save_more_where_a_rank_has_more_kv_heads():
    work, tokens = step_of("llama3_8b"), 5 << 20
    saved = [records.gb(work, gpus, tokens, 1) - records.gb(work, gpus, tokens, 4) for gpus in (8, 4, 2)]
    assert saved[0] < 0 < saved[2]
    assert saved[0] < saved[1] < saved[2]
