"""TRL's DPO, KTO, GRPO and RLOO trainers over ranks against TRL's own in one process.

All numbers that TRL logs are compared: losses, rewards, margins, norms of gradients, counts.
"""

import pytest
import torch

from parallel.transformers import ContextParallelPreferenceTrainer, ContextParallelTrainer
from runtime.errors import UserError
from runtime.ranks import run_ranks

pytest.importorskip("trl", reason="the extra dev has it")
pytest.importorskip("peft", reason="the extra dev has it")

from tests.parallel.transformers.mistakes import MISTAKES
from tests.parallel.transformers.preferences import Run, at_border, errors, prepared, trained
from tests.parallel.transformers.test_trainer import fsdp_on_cpus

FLOAT32 = torch.float32
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-6}
MESHES = {"cp 2 x dp 2": (4, 2), "cp 3": (3, 1)}
"""Numbers of ranks and of groups."""
PAIRED = {"num_generations": 2}
WITH_KL = {**PAIRED, "beta": 0.1}
LOSS_TYPES = (
    "hinge",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
)
"""DPO's loss types besides sigmoid and ipo."""


def compared(world_size, groups, folder, runs):
    """Histories over ranks and in one process, and the batches of each rank, for each run."""
    one_process = [each._replace(mistake=None) for each in runs]
    expected = run_ranks(trained, 1, f"{folder}/one", groups, one_process)[0]
    by_rank = run_ranks(trained, world_size, f"{folder}/ranks", groups, runs)
    results = []
    for index, each in enumerate(runs):
        histories = [rank[index][0] for rank in by_rank]
        if each.mistake is None:
            assert all(other == histories[0] for other in histories)
        batches = [rank[index][1] for rank in by_rank]
        results.append((histories[0], expected[index][0], batches))
    return results


def check(world_size, groups, folder, runs):
    """Assert that every logged number is that of one process; return the ranks' batches."""
    results = compared(world_size, groups, folder, runs)
    for each, (mine, expected, _) in zip(runs, results, strict=True):
        assert sum("loss" in entry for entry in mine) == each.steps
        wrong = {}
        for name, error in errors(mine, expected).items():
            if not error < BOUNDS[each.dtype]:
                wrong[name] = error
        assert wrong == {}, each
    return [batches for _, _, batches in results]


def test_two_ranks_have_the_numbers_of_one_process(tmp_path):
    runs = [
        Run("dpo", reference="model", data=at_border, samples=1, method="ring"),
        Run("kto", reference="model"),
        Run("grpo", reference="lora", arguments=WITH_KL),
        Run("dpo", FLOAT32, reference="lora", arguments={"gradient_checkpointing": True}),
    ]
    border, *_ = check(2, 1, str(tmp_path), runs)
    assert all(ends for _, ends in border[0])  # the chosen answer ends where the ranks are cut
    assert {labelled for labelled, _ in border[0]} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_ten_steps_have_the_numbers_of_one_process(mesh, tmp_path):
    runs = []
    for dtype in BOUNDS:
        for loss_type in ("sigmoid", "ipo"):
            for reference in ("model", "lora"):
                arguments = {"loss_type": [loss_type]}
                runs.append(Run("dpo", dtype, 10, reference, arguments=arguments))
        arguments = {"loss_type": ["sigmoid"], "precompute_ref_log_probs": True}
        runs.append(Run("dpo", dtype, 10, "model", arguments=arguments))
        runs.append(Run("kto", dtype, 10, "model"))
        runs.append(Run("kto", dtype, 10, "lora"))
        runs.append(Run("grpo", dtype, 10, arguments={**PAIRED, "beta": 0.0}))
    check(*MESHES[mesh], str(tmp_path), runs)


@pytest.mark.slow
def test_a_rank_without_completion_tokens_has_the_numbers_of_one_process(tmp_path):
    arguments = {"loss_type": ["ipo"], "learning_rate": 1e-3}  # a high rate amplifies roundings
    runs = []
    for dtype in BOUNDS:
        runs.append(Run("dpo", dtype, 10, "model", at_border, 1, "ring", arguments=arguments))
    for batches in check(3, 1, str(tmp_path), runs):
        counts = [[labelled for labelled, _ in rank] for rank in batches]
        assert set(counts[0]) == {0}
        assert set(counts[2]) == {2}


@pytest.mark.slow
def test_every_loss_type_and_option_has_the_numbers_of_one_process(tmp_path):
    runs = []
    for loss_type in LOSS_TYPES:
        smoothing = 0.1 if loss_type in ("exo_pair", "robust") else 0.0
        arguments = {"loss_type": [loss_type], "label_smoothing": smoothing}
        runs.append(Run("dpo", reference="model", arguments=arguments))
    for arguments in (
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        {"use_weighting": True, "ld_alpha": 0.5},
        {"f_divergence_type": "js_divergence", "gradient_accumulation_steps": 2},
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "padding_free": True},
    ):
        runs.append(Run("dpo", reference="model", arguments=arguments))
    runs.append(Run("kto", reference="path", arguments={"loss_type": "apo_zero_unpaired"}))
    runs.append(Run("kto", arguments={"precompute_ref_log_probs": True}))
    check(3, 1, str(tmp_path), runs)


@pytest.mark.slow
def test_completions_that_are_given_have_the_numbers_of_one_process(tmp_path):
    """Also those of one prompt on two groups, and numbers that TRL takes over all processes."""
    normalized = {"num_generations": 4, "normalize_advantages": True}
    by_batch = {"scale_rewards": "batch", "top_entropy_quantile": 0.5, "num_iterations": 2}
    runs = [
        Run("grpo", steps=4, reference="lora", arguments={"num_generations": 4, **by_batch}),
        Run("grpo", reference="path", arguments={**WITH_KL, "loss_type": "grpo"}),
        Run("grpo", FLOAT32, reference="lora", arguments=WITH_KL),
        Run("rloo", reference="lora", arguments=WITH_KL),
        Run("rloo", reference="path", arguments=normalized),
        Run("rloo", FLOAT32, reference="lora", arguments=WITH_KL),
    ]
    check(4, 2, str(tmp_path), runs)


def with_fsdp(rank, world_size, folder, groups, runs):
    """The histories of runs under FSDP2, which accelerate leaves out on a CPU."""
    fsdp_on_cpus()
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
    sharded = [each._replace(arguments={**dict(each.arguments), **fsdp}) for each in runs]
    return trained(rank, world_size, folder, groups, sharded)


@pytest.mark.slow
def test_fsdp_has_the_numbers_of_one_process(tmp_path):
    runs = [
        Run("dpo", FLOAT32, 3, "model"),
        Run("dpo", FLOAT32, 3, "lora"),
        Run("kto", FLOAT32, 3, "model"),
    ]
    expected = run_ranks(trained, 1, f"{tmp_path}/one", 1, runs)[0]
    mine = run_ranks(with_fsdp, 2, f"{tmp_path}/ranks", 1, runs)[0]
    for each, (history, _), (truth, _) in zip(runs, mine, expected, strict=True):
        assert max(errors(history, truth).values()) < BOUNDS[FLOAT32], each


@pytest.mark.slow
def test_evaluations_have_the_numbers_of_one_process(tmp_path):
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    runs = [Run(kind, reference="lora", arguments=arguments) for kind in ("dpo", "kto")]
    for mine, expected, _ in compared(2, 1, str(tmp_path), runs):
        assert max(errors(mine, expected).values()) < 1e-10
        assert sum("eval_loss" in entry for entry in mine) == 3


@pytest.mark.slow
def test_completions_that_are_generated_have_the_numbers_of_one_process(tmp_path):
    """Every rank generates by itself, with the random numbers of one process."""
    arguments = {**WITH_KL, "max_completion_length": 6}
    runs = [
        Run("grpo", FLOAT32, 3, "lora", generates=True, arguments=arguments),
        Run("rloo", FLOAT32, 3, "lora", generates=True, arguments=arguments),
    ]
    check(2, 1, str(tmp_path), runs)


def refused(rank, world_size, folder):
    """The message about completions that differ between the ranks of a group."""
    runs = [Run("grpo", FLOAT32, 1, differs=True, arguments=PAIRED)]
    with pytest.raises(UserError) as error:
        trained(rank, world_size, folder, 1, runs)
    return str(error.value)


def test_completions_that_differ_between_ranks_are_refused(tmp_path):
    messages = run_ranks(refused, 2, str(tmp_path))
    assert messages[0] == messages[1]
    assert messages[0].startswith("input_ids, labels differ between the group's rank 0 and its")


@pytest.mark.parametrize(
    ("kind", "message", "arguments"),
    [
        ("dpo", "use_liger_kernel is True", {"use_liger_kernel": True}),
        ("dpo", "context_parallel_size is 2; give a divisor", {"context_parallel_size": 2}),
        ("kto", "compute_metrics is <.*>, but a rank has only", {"compute_metrics": print}),
        ("grpo", "use_vllm is True, but every rank would get", {"use_vllm": True}),
        ("grpo", "num_generations is 2, but the groups generate 3", {"generation_batch_size": 3}),
    ],
)
def test_settings_that_ranks_cannot_have_are_refused(kind, message, arguments, tmp_path):
    with pytest.raises(UserError, match=f"^{message}"):
        prepared(kind, str(tmp_path), arguments)


def test_a_router_whose_loss_needs_all_tokens_is_refused(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_experts=2, num_attention_heads=2
    )
    with pytest.raises(UserError, match=r"^aux_loss_enabled is True, .* set router_aux_loss_coef"):
        prepared("dpo", str(tmp_path), {"model": Qwen3MoeForCausalLM(config)})


def test_each_mixin_names_the_other():
    from trl import DPOTrainer, SFTTrainer

    class WrongSFT(ContextParallelPreferenceTrainer, SFTTrainer):
        pass

    class WrongDPO(ContextParallelTrainer, DPOTrainer):
        pass

    with pytest.raises(UserError, match=r"WrongSFT is none of .*; list ContextParallelTrainer"):
        WrongSFT()
    with pytest.raises(UserError, match=r"needs .* list ContextParallelPreferenceTrainer"):
        WrongDPO()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_mistakes_are_seen(ranks, tmp_path):
    arguments = {"beta": 0.5, "learning_rate": 5e-2}
    runs = []
    for mistake in MISTAKES:
        runs.append(Run("dpo", reference="model", mistake=mistake, arguments=arguments))
    for each, (mine, expected, _) in zip(
        runs, compared(ranks, 1, str(tmp_path), runs), strict=True
    ):
        wrong = errors(mine, expected)
        assert wrong["loss"] > 1e-3, each.mistake
        assert wrong["grad_norm"] > 1e-3, each.mistake
