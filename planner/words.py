"""Configurations in a few words: the method, the mesh and what decides memory."""

from typing import Any

from parallel.mesh import SIZES


def method_of(config: Any) -> str:
    """Describe the method in a few words."""
    context = config.context
    return context.title + (f", {context.context_parallel_placement}" if context.context_parallel_team_size > 1 else "")


def mesh_of(config: Any) -> str:
    """Describe the mesh in a few words."""
    named = ((name.split("_")[0], getattr(config.mesh, name)) for name in SIZES)
    return ", ".join(f"{name} {size}" for name, size in named if size > 1) or "data"


def memory_of(config: Any) -> str:
    """Describe the sharding and what is computed again, in chunks or moved, in a few words."""
    again = config.recompute
    chunks = [name for name, size in (("loss", again.loss_chunk_size), ("FFN", again.ffn_chunk_size)) if size]
    words = [config.data_parallel.strategy, again.recompute_granularity]
    words += [f"{' and '.join(chunks)} in chunks"] * bool(chunks) + ["offload"] * again.recompute_offload
    words += ["moments on the host"] * config.optimizer.optimizer_cpu_offload
    return ", ".join(word for word in words if word != "none")


def described(config: Any) -> str:
    """Describe all three, what is to be said."""
    return ", ".join(filter(None, (method_of(config), mesh_of(config), memory_of(config))))
