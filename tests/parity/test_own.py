"""A user's run, shrunk, equals one process on its mesh.

Bugs planted there are found, and their module is named.
"""

from pathlib import Path
from time import monotonic

import pytest
import torch

from data.text.megatron import build_datasets
from data.tokenizer import load_tokenizer
from parallel.mesh import SIZES
from tests.parity import bugs
from tools.parity.__main__ import configured
from tools.parity.own import compared, report
from tools.parity.rank import samples_of
from tools.parity.shrink import shrunk

ROOT = Path(__file__).parents[2] / "configs" / "models"
RING = "llama_tiny --context-parallel-method ring --context-parallel-size 3 --global-batch-size 2"
LEGACY = "llama_tiny --data-parallel-sharding-strategy legacy_ddp"
LABEL = (bugs.label_lost, "llama_tiny --global-batch-size 2", "batch: labels")
BUGS = [
    (bugs.mask_shifted, "llama_tiny", "layers.0.attention.attend"),
    (bugs.no_sum_over_tp, "llama_tiny --tensor-model-parallel-size 2", "layers.0.attention"),
    (bugs.norm_counted_twice, LEGACY, "grad_norm of step 1"),
    (
        bugs.state_not_passed,
        "transnormer_tiny --context-parallel-size 2",
        "layers.0.attention.attend",
    ),
    (bugs.gradient_halved, RING, "gradient of layers.1.attention.wv"),
    (bugs.layer_not_reduced, LEGACY, "gradient of the parameter layers.1.mlp.down.weight"),
    (bugs.local_means, "llama_tiny", "lm_loss of step 1"),
    (bugs.samples_skipped, "llama_tiny", "data: 256 other tokens, 256 missing"),
    (bugs.noise_of_ranks, "dit_tiny", "batch: patches"),
]
"""Each with a run and the first thing that differs. Besides these ``LABEL``."""
EQUAL = (
    "llama2_70b",
    "gpt_tiny --pipeline-model-parallel-size 2",
    "transnormer_hybrid_tiny --context-parallel-size 4",
    "qwen3_5_9b --context-parallel-size 3 --context-parallel-method zigzag",
    "llama3_8b --window-size 1023,0 --window-attn-skip-freq 6 --softmax-type learnable "
    "--global-batch-size 64 "
    "--pipeline-model-parallel-size 4 --pipeline-layers 7 8 8 9 --recompute-granularity full "
    "--ffn-chunk-size 4096",
    "llama3_8b --tensor-model-parallel-size 16 --context-parallel-size 2 --seq-length 1000",
    "runs/finetune_llama3_8b_512k_4xh100_lora --reset-attention-mask --reset-position-ids "
    "--balance-over dp_cp "
    "--load x --context-parallel-method exchange",
    "wallfacer_dit_1b --pack-samples --context-parallel-method exchange "
    "--context-parallel-team-size 1 "
    "--micro-batch-size 4 --tensor-model-parallel-size 2",
)


def asked(words):
    name, *flags = words.split()
    return configured(ROOT / f"{name}.toml", flags)


def check(bug, words, first):
    started = monotonic()
    differences = compared(asked(words), sabotage=bug)
    assert report(differences).startswith(f"differs first: {first}, by ")
    assert monotonic() - started < 300


def test_a_lost_label_is_found():
    check(*LABEL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "words", "first"), BUGS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_planted_bug_is_found_and_named(bug, words, first):
    check(bug, words, first)


@pytest.mark.slow
@pytest.mark.parametrize("words", EQUAL)
def test_a_run_of_every_kind_equals_one_process(words):
    differences = compared(asked(words))
    assert report(differences).startswith("equal to one process"), report(differences)
    assert {"gradient of layers.0", "grad_norm of step 2", "validation_loss of step 2"} <= {
        difference.what for difference in differences
    }


def test_samples_are_the_own_ones_thinned(default_data):
    """Every fourth token, with its label and the beginnings of documents since the one before."""
    flags = (
        f"llama_tiny --data-path {default_data} --tokenizer-model {default_data}.model "
        f"--reset-position-ids"
    )
    whole = asked(flags + " --seq-length 512")
    small, _, _ = shrunk(whole)
    tokenizer = load_tokenizer(f"{default_data}.model")
    texts, _, _ = build_datasets(whole.data, 512, whole.train.seed, tokenizer)
    samples, source = samples_of(whole, small, 3)
    assert source == str(default_data)
    for number, sample in enumerate(samples):
        for name in ("tokens", "labels"):
            assert torch.equal(sample[name], texts[number][name][::4] % small.model.vocab_size)
        starts = texts[number]["starts"].view(128, 4).any(1)
        assert torch.equal(sample["starts"][1:], starts[1:])
        assert sample["place"].tolist() == list(range(128 * number, 128 * number + 128))
        assert 0 < sample["loss_mask"].sum() < 128
    assert (
        "made-up" in samples_of(asked("llama_tiny"), small, 1)[1]
        or Path("runs/data/stdlib.idx").exists()
    )


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.toml")), ids=lambda path: path.stem)
def test_every_configuration_is_shrunk_in_width_alone(path):
    whole = configured(path, [])
    small, alone, ranks = shrunk(whole)
    assert ranks <= 8
    assert small.model.hidden_size <= 256
    for name in SIZES:
        assert (getattr(whole.mesh, name) > 1) == (getattr(small.mesh, name) > 1)
        assert getattr(alone.mesh, name) == 1
    ratio = whole.model.num_attention_heads // whole.model.query_groups
    assert small.model.num_attention_heads // small.model.query_groups == ratio
    assert small.context.context_parallel_method == whole.context.context_parallel_method
    assert small.recompute.recompute_granularity == whole.recompute.recompute_granularity
    assert bool(small.recompute.loss_chunk_size) == bool(whole.recompute.loss_chunk_size)
