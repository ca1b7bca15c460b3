"""Sizes that do not fit or that no machine can hold, and files that are no configuration.

Each is refused in one line, before any work.
"""

import pytest

from runtime.errors import UserError
from train.config import diffusion as dit_config
from train.config import language as config
from train.config.language import load_config, parse_args, validate

DATA = ["--data-path", "x", "--tokenizer-model", "x.model"]


def refused(module, line):
    with pytest.raises(UserError) as caught:
        module.validate(module.parse_args(line.split()), 1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SIZES = """
    num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels
    vocab-size seq-length
    micro-batch-size global-batch-size num-workers context-parallel-size tensor-model-parallel-size
    pipeline-model-parallel-size num-virtual-stages-per-pipeline-rank
    num-distributed-optimizer-instances
    context-parallel-team-size context-parallel-ranks-per-node ulysses-degree ulysses-head-chunks
    loss-chunk-size
    ffn-chunk-size pipeline-layers
""".split()


@pytest.mark.parametrize("value", ["1000000000", "1000000000000000000000"])
@pytest.mark.parametrize("size", SIZES)
def test_a_size_beyond_any_machine_is_refused_by_its_name(size, value):
    names = (
        size.replace("-", "_"),
        "num_attention_heads",
        "pipeline_schedule",
        f"argument --{size}: ",
    )
    line = refused(config, f"{' '.join(DATA)} --{size} {value}")
    assert any(name in line for name in names)


def test_counts_of_time_have_no_such_bound_and_a_diffusion_transformers_sizes_do():
    line = (
        "--train-iters 2000000000 --seed 5000000000 --eval-interval 3000000000 --log-interval "
        "1000000000"
    )
    config.validate(config.parse_args([*DATA, *line.split()]), 1)
    for size in (
        "num-layers",
        "hidden-size",
        "latent-shape 4 8",
        "num-classes",
        "micro-batch-size",
        "num-workers",
    ):
        refused(dit_config, f"--{size} 1000000000")


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbf[train]\nseed = 7\n", b"[train]\r\nseed = 7\r\n"]
)
def test_what_editors_on_windows_write_is_read_and_what_is_no_file_refused(content, tmp_path):
    """Other files that are no configuration are in ``tests/test_settings.py``."""
    (tmp_path / "run.toml").write_bytes(content)
    assert load_config(tmp_path / "run.toml").train.seed == 7
    for path, kind in ((tmp_path, "a folder"), ("/dev/zero", "a socket or device")):
        with pytest.raises(UserError, match=f"^{path}: this is {kind}"):
            load_config(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--num-layers 100000 --hidden-size 1000000", "state of the model"),
        ("--vocab-size 999999999 --hidden-size 1000000 --num-layers 1", "state of the model"),
        ("--seq-length 900000000 --micro-batch-size 900000000", "hidden states of one layer"),
        ("--num-workers 5000", "num_workers (processes that read ahead for each rank) is 5000"),
    ],
)
def test_sizes_that_are_too_much_together_are_refused(line, words):
    assert words in refused(config, f"{' '.join(DATA)} {line}")


def test_learned_sinks_are_for_backwards_in_one_part_alone():
    """The refusal of the one that they are not for is in ``test_language.py``."""
    flags = (
        "--data-path x --tokenizer-model x --pipeline-model-parallel-size 2 --global-batch-size 4"
    )
    parts = "--pipeline-schedule InterleavedZeroBubble --data-parallel-sharding-strategy zero1"
    for more in (
        f"{parts} --softmax-type off-by-one",
        "--softmax-type learnable --pipeline-schedule Interleaved1F1B",
    ):
        validate(parse_args([*flags.split(), *more.split()]), 2)
