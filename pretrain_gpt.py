"""Pretrain a language model on long sequences, shared over processes by context parallelism.

torchrun --standalone --nproc-per-node 4 pretrain_gpt.py --config configs/llama_tiny.toml
"""

import sys

import torch
import torch.distributed as dist

from data.megatron import build_datasets
from data.tokenizer import load_tokenizer
from model.attention import Attend, LinearAttend
from model.base import LanguageModel, initial_weight
from model.config import architecture_of
from model.registry import TITLES, build_model, flops_per_token, num_parameters
from parallel.agree import agreed, is_first
from parallel.data import fill, shard_model, sharding_mesh
from parallel.mesh import Mesh, joined, launched_world_size
from parallel.recompute import recompute_layers
from parallel.stages import stage_layers
from parallel.tensor import split_model
from train.config import Config, parse_args, validate
from train.language import NextToken, build_runner, context_of, corpus_entropy, with_vocabulary
from train.loop import Trainer
from train.optim import build_optimizer
from train.planner import resolved
from train.run import claim_folder, exit_status, open_log, resume


def main(arguments: list[str]) -> None:
    """Configuration, processes, data, model, training: the run from its command line to its last checkpoint."""
    config = parse_args(arguments)
    validate(config, launched_world_size())
    with joined(config.mesh) as mesh:
        prepared(config, mesh).run()


def prepared(config: Config, mesh: Mesh) -> Trainer:
    """Everything built and loaded, ready to train; collective."""
    claim_folder(config)
    with agreed():
        tokenizer = load_tokenizer(str(config.data.tokenizer_model))
        config = with_vocabulary(config, tokenizer.vocab_size)
    config = resolved(config, dist.get_world_size())
    with agreed():
        cp, attend = context_of(config, mesh.cp.get_group())
    train_data, valid_data, _ = build_datasets(config.data, config.train.seq_length, config.train.seed, tokenizer)

    parts = model_parts(config, mesh, attend)
    optimizer = build_optimizer(config.optimizer, *parts)
    architecture = architecture_of(config.model)
    progress = resume(config, parts, optimizer, architecture)
    objective = NextToken(cp, mesh.device, config.recompute.loss_chunk_size)
    if is_first():
        print(summary(config, mesh), flush=True)
    return Trainer(
        config=config,
        mesh=mesh,
        runner=build_runner(config, mesh, parts, objective),
        optimizer=optimizer,
        objective=objective,
        train_data=train_data,
        valid_data=valid_data if config.train.eval_iters else None,
        architecture=architecture,
        flops_per_token=flops_per_token(config.model, config.train.seq_length),
        log=open_log(config, progress),
        validation_constants=corpus_entropy(config.data) if is_first() else {},
        progress=progress,
    )


def model_parts(config: Config, mesh: Mesh, attend: Attend | LinearAttend) -> list[LanguageModel]:
    """This rank's part of the model for each of its pipeline stages, with its weights; the whole one is one stage."""
    model, strategy = config.model, config.data_parallel.strategy
    sharding = sharding_mesh(mesh.both, config.data_parallel)
    layers = stage_layers(config.pipeline, model.num_layers, mesh.pp.size())
    parts = []
    for stage in config.pipeline.own(mesh.pp.get_local_rank(), mesh.pp.size()):
        with torch.device("meta"):
            part = build_model(model, attend)
        # In this order: each takes what the one before left of the model.
        part.keep(layers[stage])
        split_model(part, mesh.tp, head_dim=model.head_dim, kv_heads=model.query_groups)
        recompute_layers(part.layers, config.recompute)
        shard_model(part, part.layers, sharding, bf16=config.train.bf16, strategy=strategy)
        fill(part, mesh.device, lambda name, shape: initial_weight(model, name, shape, config.train.seed))
        parts.append(part)
    return parts


def summary(config: Config, mesh: Mesh) -> str:
    """One line on what is about to be trained, where, and how."""
    model, context = config.model, config.context
    alone = model.linear_attention and mesh.cp.size() == 1
    method = "linear attention" if alone else context.title
    pipeline = f"pipeline parallel {mesh.pp.size()} x " if mesh.pp.size() > 1 else ""
    tensor = f" x tensor parallel {mesh.tp.size()}" if mesh.tp.size() > 1 else ""
    return (
        f"{TITLES[model.model_type]} of {num_parameters(model):,} parameters ({model.num_layers} layers of "
        f"{model.hidden_size}) on {dist.get_world_size()} {mesh.device.type} processes: {pipeline}data parallel "
        f"{mesh.dp.size()} x context parallel {mesh.cp.size()} ({method}){tensor}, "
        f"sequences of {config.train.seq_length} tokens"
    )


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv[1:]))
