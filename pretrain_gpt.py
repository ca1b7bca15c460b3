"""Pretrain a language model on long sequences, shared over processes by context parallelism.

torchrun --standalone --nproc-per-node 4 pretrain_gpt.py --config configs/models/llama_tiny.toml
"""

if __name__ == "__main__":  # before torch, whose import takes seconds in which a launcher may be killed
    from runtime.signals import end_with_launcher

    end_with_launcher()

from functools import partial

import torch

from data.text.megatron import build_datasets
from model.language import LanguageModel
from model.registry import (
    architecture_of,
    attention_title,
    build_model,
    flops_per_token,
    initial_weight,
    num_parameters,
    num_trained,
)
from parallel.mesh import Mesh, distributed_mesh
from planner.choice import fastest_method, fitted_to_world, with_layout_and_schedule
from planner.dry_run import dry_run
from runtime.signals import stop_requests
from runtime.together import from_first, is_first, raise_together
from train.assemble import Run
from train.attention import context_of, kernel_lines, plan_ahead
from train.config.derive import complete, config_to_save, tokenizer_of
from train.config.entries import Config
from train.config.language import parse_args, validate
from train.loop import Trainer
from train.objectives.language import NextToken, corpus_entropy
from train.resume import find_start
from train.run import open_log, reserve_run_folder, run_entry
from train.watching.validation import Curve


def main(arguments: list[str], peak_flops: float | None = None) -> None:
    """Train from the command line to the last checkpoint: configuration, processes, data, model, training.

    Args:
        peak_flops: FLOP/s that MFU is measured against; by default what a process can reach.
    """
    config = parse_args(arguments)
    if config.dry.dry_run:
        dry_run(arguments, config, "pretrain_gpt.py", validate, resolve)
        return
    with (
        stop_requests() as request,
        fitted_to_world(config, validate) as (config, asked),
        distributed_mesh(config.mesh) as mesh,
        reserve_run_folder(config),
    ):
        build_trainer(config, mesh, peak_flops, asked).train(request)


def build_trainer(config: Config, mesh: Mesh, peak_flops: float | None = None, asked: Config | None = None) -> Trainer:
    """Build and load everything for training; collective. ``asked`` is as ``fitted_to_world`` yields it."""
    asked = asked or config
    with raise_together():
        tokenizer = tokenizer_of(config)
    config = complete(config, tokenizer.vocab_size, fastest_method, with_layout_and_schedule)
    start = find_start(config, architecture_of(config.model), from_first(config.contents))
    run = resolve(start.config, mesh)
    data, train = run.config.data, run.config.train
    train_data, valid_data, _ = build_datasets(
        data, train.seq_length, train.seed, tokenizer, run.config.model.vocab_size
    )
    with raise_together():
        curve = Curve(run, tokenizer) if run.config.ruler.ruler_interval else None
    frequencies = corpus_entropy(data) if is_first() else {}

    start.load(run.parts, run.optimizer)
    if is_first():
        print(described(run, train_data.fill), *kernel_lines(run.config), sep="\n", flush=True)
    return Trainer(
        run=run,
        start=start,
        train_data=train_data,
        valid_data=valid_data if train.eval_iters else None,
        flops_per_token=partial(flops_per_token, run.config.model),
        log=open_log(config_to_save(config, asked), start.progress),
        validation_constants=frequencies,
        curve=curve,
        peak_flops=peak_flops or 0.0,
    )


def resolve(config: Config, mesh: Mesh) -> Run[Config]:
    """Resolve what a complete configuration computes, and how; collective."""
    from parallel.tensor.split import split_model  # DTensor, which a refused command line need not wait for

    model, data = config.model, config.data
    with raise_together():
        cp, attend = context_of(config, mesh.cp.get_group())
    objective = NextToken(
        cp,
        mesh.device,
        config.recompute.loss_chunk_size,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        prepare=partial(plan_ahead, config, attend),
    )

    def build() -> LanguageModel:
        part = build_model(model, attend)
        if model.lora_rank is not None and config.train.bf16:
            part.cast(torch.bfloat16, frozen=True)  # no step adds to them what 16 bits would lose
        return part

    return Run(
        config=config,
        mesh=mesh,
        cp=cp,
        objective=objective,
        build=build,
        split=lambda part: split_model(part, mesh.tp),
        weight_of=lambda name, shape, part: initial_weight(model, name, shape, config.train.seed, part),
    )


def described(run: Run[Config], fill: float) -> str:
    """Describe the run in one line: the model, the mesh and the data, of which a share ``fill`` of places is tokens."""
    config, model = run.config, run.config.model
    alone = model.linear_attention and run.mesh.cp.size() == 1
    title = f"{model.traits.title} of {num_parameters(model):,} parameters"
    if model.lora_rank is not None:
        title += f", of which {num_trained(model):,} in adapters of rank {model.lora_rank} are trained"
    if (attention := attention_title(model)) is not None:
        title += f", {attention}"
    method = "linear attention" if alone else config.context.title
    if model.own_softmax_layout and not alone:
        method += f", softmax layers by {config.hybrid.hybrid_softmax_method}, {config.hybrid.hybrid_softmax_layout}"
    schedule = config.context.delta_rule_schedule
    if model.traits.delta and run.mesh.cp.size() > 1 and schedule != "auto":
        method += f", states of the delta rule by {schedule}"
    drawn = "drawn " if config.data.mock_data else ""
    packing = config.data.packing
    if config.data.pack_documents:
        packing += f", none cut that fits, {1 - fill:.2%} padding"
    if config.data.blend_by_length:
        packing += f", of documents of {config.data.length_blend}"
    return run.summary(title, method, f"sequences of {config.train.seq_length} {drawn}tokens{packing}")


if __name__ == "__main__":
    run_entry(main)
