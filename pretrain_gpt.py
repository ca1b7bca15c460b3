"""Pretrain a language model on long sequences, shared over processes by context parallelism.

torchrun --standalone --nproc-per-node 4 pretrain_gpt.py --config configs/llama_tiny.toml
"""

if __name__ == "__main__":  # before torch, whose import takes seconds in which a launcher may be killed
    from runtime.signals import end_with_launcher

    end_with_launcher()

from collections.abc import Callable
from functools import partial

import torch

from data.text.megatron import build_datasets
from model.attention import Attend, HybridAttention, LinearAttend
from model.base import LanguageModel, initial_weight
from model.config import architecture_of
from model.registry import TITLES, attention_title, build_model, flops_per_token, num_parameters, num_trained
from parallel.mesh import Mesh, distributed_mesh
from planner.complete import as_asked, complete, tokenizer_of
from planner.dry_run import dry_run
from planner.resize import sized
from runtime.signals import listening
from runtime.together import from_first, is_first, raise_together
from train.assemble import build_parts, build_runner, summary
from train.attention import context_of, planning
from train.config.language import Config, parse_args, validate
from train.loop import Trainer
from train.objectives.language import NextToken, corpus_entropy
from train.optim import build_optimizer
from train.resume import resume
from train.run import open_log, owning, run_entry
from train.watching.replay import replay, replaying


def main(arguments: list[str], peak_flops: float | None = None) -> None:
    """Train from the command line to the last checkpoint: configuration, processes, data, model, training.

    Args:
        peak_flops: FLOP/s that MFU is measured against; by default what a process can reach.
    """
    config = replaying(parse_args(arguments))
    if config.dry.dry_run:
        dry_run(arguments, config, "pretrain_gpt.py", validate, computing)
        return
    with (
        listening() as notice,
        sized(config, validate) as (config, asked),
        distributed_mesh(config.mesh) as mesh,
        owning(config),
    ):
        trainer = build_trainer(config, mesh, peak_flops, asked)
        if config.health.replay_step is None:
            trainer.run(notice)
        else:
            replay(trainer)


def build_trainer(config: Config, mesh: Mesh, peak_flops: float | None = None, asked: Config | None = None) -> Trainer:
    """Build and load everything for training; collective. ``asked``: as ``planner.resize.sized`` yields it."""
    with raise_together():
        tokenizer = tokenizer_of(config)
    asked, config = asked or config, complete(config, tokenizer.vocab_size)
    objective, parts_of = computing(config, mesh)
    train_data, valid_data, _ = build_datasets(config.data, config.train.seq_length, config.train.seed, tokenizer)
    frequencies = corpus_entropy(config.data) if is_first() else {}

    parts = parts_of()
    optimizer = build_optimizer(config.optimizer, *parts)
    architecture = architecture_of(config.model)
    contents = from_first(config.contents)
    scheduled, progress = resume(config, parts, optimizer, architecture, contents)
    if is_first():
        print(described(config, mesh), flush=True)
    return Trainer(
        config=scheduled,
        mesh=mesh,
        runner=build_runner(config, mesh, parts, objective),
        optimizer=optimizer,
        objective=objective,
        train_data=train_data,
        valid_data=valid_data if config.train.eval_iters else None,
        architecture=architecture,
        flops_per_token=partial(flops_per_token, config.model),
        log=open_log(as_asked(config, asked), progress),
        validation_constants=frequencies,
        progress=progress,
        contents=contents,
        peak_flops=peak_flops,
    )


def computing(config: Config, mesh: Mesh) -> tuple[NextToken, Callable[[], list[LanguageModel]]]:
    """Return the objective, and what builds this rank's parts of the model; collective."""
    with raise_together():
        cp, attend = context_of(config, mesh.cp.get_group())
    objective = NextToken(
        cp,
        mesh.device,
        config.recompute.loss_chunk_size,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
        prepare=planning(config, attend),
    )
    return objective, partial(model_parts, config, mesh, attend)


def model_parts(config: Config, mesh: Mesh, attend: Attend | LinearAttend | HybridAttention) -> list[LanguageModel]:
    """Build this rank's part of the model, with weights, for each of its pipeline stages."""
    from parallel.tensor.split import split_model  # DTensor, which a refused command line need not wait for

    model = config.model

    def build() -> LanguageModel:
        part = build_model(model, attend)
        if model.lora_rank is not None and config.train.bf16:
            part.cast(torch.bfloat16, frozen=True)  # no step adds to them what 16 bits would lose
        return part

    return build_parts(
        config,
        mesh,
        build=build,
        split=lambda part: split_model(part, mesh.tp, head_dim=model.head_dim, kv_heads=model.query_groups),
        weight_of=lambda name, shape, part: initial_weight(model, name, shape, config.train.seed, part),
    )


def described(config: Config, mesh: Mesh) -> str:
    """Describe the run in one line: the model, the mesh and the data."""
    model = config.model
    alone = model.linear_attention and mesh.cp.size() == 1
    title = f"{TITLES[model.model_type]} of {num_parameters(model):,} parameters"
    if model.lora_rank is not None:
        title += f", of which {num_trained(model):,} in adapters of rank {model.lora_rank} are trained"
    if (attention := attention_title(model)) is not None:
        title += f", {attention}"
    method = "linear attention" if alone else config.context.title
    if model.softmax_every is not None and not alone:
        method += f", softmax layers by {config.hybrid.hybrid_softmax_method}, {config.hybrid.hybrid_softmax_layout}"
    drawn = "drawn " if config.data.mock_data else ""
    return summary(
        config, mesh, title, method, f"sequences of {config.train.seq_length} {drawn}tokens{config.data.packing}"
    )


if __name__ == "__main__":
    run_entry(main)
