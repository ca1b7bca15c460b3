"""UPipe's record: which lengths fit, and what stages of heads save of it."""

from papers import records


def test_5m_tokens_are_the_one_length_that_is_not_predicted_to_fit() -> None:
    found = records.supported()
    assert [row.of["ktokens"] for row in found if row.analytic["supported"] == "no"] == [5 * 1024]
    assert all(row.published["supported"] == "yes" for row in found)
    assert found[-1].job is not None
    assert found[-1].job.hardware == "8 H100 of 80 GB, 8 in a node"


def test_stages_save_more_where_a_rank_has_more_kv_heads() -> None:
    work, tokens = records.model("llama3_8b"), 5 << 20
    saved = [records.gb(work, gpus, tokens, 1) - records.gb(work, gpus, tokens, 4) for gpus in (8, 4, 2)]
    assert 0 < saved[0] * 2 < saved[1] < saved[2]
    assert records.projections_gb(work, 8, tokens) > 5 * saved[0]
