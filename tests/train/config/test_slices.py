"""Settings that layers in slices exclude are refused with the fix."""

import pytest

from tests.train.config.test_language import DATA, contradiction
from train.config.language import parse_args, validate

SLICES = "--device cpu --recompute-granularity full --layer-chunk-size"
ROWS = """
1 16 --context-parallel-method none | context_parallel_method is none, and torch's SDPA | \
any runs on one process
2 16 --context-parallel-size 2 | context_parallel_method is striped, which would send | ulysses (
2 16 --context-parallel-size 2 --context-parallel-method allgather | is allgather, which would | \
allgather_q
2 15 --context-parallel-size 2 --context-parallel-method allgather_q | \
multiple of 2, since two chunks of each rank in the zigzag layout share | nearest that works: 16
2 16 --context-parallel-size 2 --context-parallel-method allgather_q \
--context-parallel-layout striped | context_parallel_layout is striped | leave out
2 16 --model-type qwen3_5 --context-parallel-size 2 --context-parallel-method allgather_q \
--context-parallel-layout zigzag | context_parallel_layout is zigzag, which slices of | leave out
4 16 --context-parallel-size 4 --context-parallel-method allgather_q --ulysses-degree 4 \
--context-parallel-layout zigzag | context_parallel_layout is zigzag, which slices of | leave out
2 16 --context-parallel-size 2 --context-parallel-method ulysses --ulysses-head-chunks 2 | \
ulysses_head_chunks is 2 | leave out one
1 16 --context-parallel-method ulysses --context-parallel-layout zigzag | \
context_parallel_layout is zigzag, which slices of method ulysses | leave out
16 16 --context-parallel-size 16 --context-parallel-method ulysses | ulysses_degree is 16 with 8
1 16 --model-type transnormer | model_type transnormer has linear attention | leave out
1 16 --compile | compile is set, and a compiled layer cannot end early | leave out one
1 18 --micro-batch-size 4 --global-batch-size 4 | \
multiple of 4, since the 4 sequences of a micro-batch share | nearest that works: 16
2 17 --tensor-model-parallel-size 2 | multiple of 2, since 2 tensor-parallel ranks share | \
nearest that works: 16
2 16 --model-type qwen3_5 --context-parallel-size 2 --context-parallel-method ulysses \
--delta-rule-schedule chain | delta_rule_schedule is chain, and ranks | leave out --delta-rule
8 16 --model-type qwen3_5 --context-parallel-size 8 --context-parallel-method ulysses \
--linear-num-key-heads 3 --linear-num-value-heads 3 | layer_chunk_size is 16, with which | 3 key
"""


ACCEPTED = """
2 16 --context-parallel-size 2 --context-parallel-method auto
16 16 --context-parallel-size 16 --context-parallel-method allgather_q
2 15 --context-parallel-size 2 --context-parallel-method allgather_q \
--context-parallel-layout contiguous
4 15 --context-parallel-size 4 --context-parallel-method allgather_q --ulysses-degree 2
2 16 --context-parallel-size 2 --context-parallel-method allgather_q \
--context-parallel-layout zigzag
1 15 --context-parallel-method allgather_q
2 15 --model-type qwen3_5 --context-parallel-size 2 --context-parallel-method allgather_q
"""


@pytest.mark.parametrize("row", ACCEPTED.strip().splitlines())
def test_ranks_that_keep_their_keys_are_accepted(row):
    processes, *flags = row.split()
    config = parse_args([*DATA, *SLICES.split(), *flags])
    validate(config, int(processes))
    if config.delta:
        assert config.layout_of_slices == "contiguous"


@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_contradictions_are_refused_with_the_fix(row):
    flags, *words = row.split(" | ")
    processes, *flags = flags.split()
    message = contradiction(int(processes), *SLICES.split(), *flags)
    assert all(word in message for word in words), message
