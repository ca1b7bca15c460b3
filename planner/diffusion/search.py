"""Search over the ways in which ranks train on clips, and for the largest clip that fits.

A candidate is a number of ranks that share each clip, a method with its options, and gradient
checkpointing or not. The number of clips per step is fixed, so with more ranks per clip there are
fewer groups, with more micro-batches each.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from parallel.context.config import FullContextConfig
from parallel.context.layout import BALANCED
from parallel.context.methods import METHODS
from planner.cluster import Cluster
from planner.diffusion.clip import Clip
from planner.diffusion.run import ClipRun, plan_of
from planner.diffusion.step import ClipPrediction, ClipStep
from planner.diffusion.transformer import Transformer
from planner.extremes import last_good
from planner.search import ROOM, variants
from runtime.errors import UserError, divisors
from runtime.progress import Progress

ALONE = FullContextConfig(context_parallel_method="ring", context_parallel_layout="contiguous")
"""Configuration for a single rank, on which all methods are the same; others are variants of it.

Its layout suits every method, since tokens of clips stay in order.
"""
MAX_STEPS = 1 << 12
"""Maximum number of tokens along frames, or along the height, of the clips to try."""


class Choices(NamedTuple):
    """Values that a search varies."""

    contexts: tuple[int, ...]
    """Numbers of ranks per clip."""
    methods: tuple[str, ...]
    recomputed: tuple[int, ...]
    """Numbers of blocks to recompute in the backward pass: none, or all."""


class ClipCandidate(NamedTuple):
    """A run that fits, and its prediction."""

    run: ClipRun
    prediction: ClipPrediction


@dataclass(frozen=True)
class ClipRanking:
    """Runs that fit, fastest first, and why the others do not."""

    candidates: list[ClipCandidate]
    refused: Counter[str]
    """Number of impossible runs, keyed by the reason."""
    over_memory: list[float]
    """Minimum bytes, over all settings tried, of each run that does not fit."""


def full_methods() -> tuple[str, ...]:
    """Return the methods of full attention that keep tokens in order."""
    names = []
    for name, method in METHODS.items():
        in_order = method.layout(causal=False) in ("contiguous", BALANCED)
        if in_order and not method.for_slices_only:
            names.append(name)
    return tuple(names)


def runs_of(
    model: Transformer,
    clip: Clip,
    base: ClipRun,
    cluster: Cluster,
    choices: Choices,
    refused: Counter[str],
) -> Iterator[ClipRun]:
    """Yield the possible runs, each once; count the reasons against the others in ``refused``."""
    for context in choices.contexts:
        run = replace(base, context=context)
        if run.batch % (run.groups * run.samples):
            refused[
                f"batch is {run.batch}, but {run.groups} groups of {context} ranks need a multiple "
                f"of {run.groups * run.samples}; set batch to such a multiple"
            ] += 1
            continue
        for method in _methods(context, cluster, choices.methods):
            candidate = replace(run, method=method)
            try:
                plan_of(model, clip, candidate, cluster)
            except UserError as error:
                refused[str(error)] += 1
                continue
            yield candidate


def _methods(context: int, cluster: Cluster, names: tuple[str, ...]) -> Iterator[FullContextConfig]:
    """Yield every method with every option that fits the ranks."""
    if context == 1:
        yield ALONE
        return
    for name in names:
        for method in variants(ALONE, name, context, cluster.gpus_per_node):
            assert isinstance(method, FullContextConfig)
            yield method


def rank_clip(
    model: Transformer, clip: Clip, base: ClipRun, cluster: Cluster, choices: Choices
) -> ClipRanking:
    """Rank the possible runs, each with its fastest choice of checkpointing that fits.

    Raises ClipError if the clip does not suit the model.
    """
    clip.attended_tokens(model)
    ranking = ClipRanking([], Counter(), [])
    with Progress() as progress:
        for run in runs_of(model, clip, base, cluster, choices, ranking.refused):
            progress(f"searching: {run.method.title} over {run.context} ranks")

            # Without and with gradient checkpointing.
            fitting = []
            sizes = []
            for recomputed in choices.recomputed:
                candidate = replace(run, recomputed=recomputed)
                prediction = ClipStep(model, clip, candidate, cluster).predict()
                sizes.append(prediction.bytes)
                if prediction.bytes <= 1e9 * cluster.memory_gb:
                    fitting.append(ClipCandidate(candidate, prediction))
            if fitting:
                ranking.candidates.append(_fastest(fitting, cluster))
            else:
                ranking.over_memory.append(min(sizes))
    ranking.candidates.sort(key=lambda candidate: candidate.prediction.time)
    return ranking


def _fastest(fitting: list[ClipCandidate], cluster: Cluster) -> ClipCandidate:
    """Return the fastest run that leaves the allocator spare memory; else the fastest."""
    limit = ROOM * 1e9 * cluster.memory_gb
    roomy = [candidate for candidate in fitting if candidate.prediction.bytes <= limit]
    return min(roomy or fitting, key=lambda candidate: candidate.prediction.time)


def largest_clips(
    model: Transformer, clip: Clip, base: ClipRun, cluster: Cluster, choices: Choices
) -> list[tuple[int, Clip | None, Clip | None]]:
    """Return each number of ranks with the longest and the largest clip that fit; None if none do.

    The longest clip has the given height and width. The largest has the given frames, and the given
    shape as nearly as whole tokens allow. Both leave a tenth of the memory to the allocator.
    """
    clip.attended_tokens(model)

    largest = []
    with Progress() as progress:
        for context in choices.contexts:
            chosen = choices._replace(contexts=(context,))

            def fits(candidate: Clip, chosen: Choices = chosen) -> bool:
                progress(f"searching: {candidate.frames} x {candidate.height} x {candidate.width}")
                return _fits(model, candidate, base, cluster, chosen)

            longest = None if model.makes_pictures else _last_clip(fits, _lengths(model, clip))
            largest.append((context, longest, _last_clip(fits, _sizes(model, clip))))
    return largest


def _last_clip(fits: Callable[[Clip], bool], clip_of: Callable[[int], Clip]) -> Clip | None:
    """Return the last clip of a growing sequence that fits; None if the first does not."""
    if not fits(clip_of(1)):
        return None
    return clip_of(last_good(lambda number: fits(clip_of(number)), MAX_STEPS, exact=True))


def _lengths(model: Transformer, clip: Clip) -> Callable[[int], Clip]:
    """Return a function from a number of tokens along frames to the clip of this length."""
    vae = clip.vae or model.vae

    def clip_of(number: int) -> Clip:
        return replace(clip, frames=1 + (number * model.patch.frames - 1) * vae.frames)

    return clip_of


def _sizes(model: Transformer, clip: Clip) -> Callable[[int], Clip]:
    """Return a function from a number of tokens along the height to the clip of this size."""
    vae = clip.vae or model.vae
    step_height = vae.height * model.patch.height
    step_width = vae.width * model.patch.width

    def clip_of(number: int) -> Clip:
        height = number * step_height
        columns = max(1, round(height * clip.width / clip.height / step_width))
        return replace(clip, height=height, width=columns * step_width)

    return clip_of


def _fits(
    model: Transformer, clip: Clip, base: ClipRun, cluster: Cluster, choices: Choices
) -> bool:
    """Return True if the clip fits with any method, at the maximum recomputation in ``choices``."""
    limit = ROOM * 1e9 * cluster.memory_gb
    for run in runs_of(model, clip, base, cluster, choices, Counter()):
        candidate = replace(run, recomputed=max(choices.recomputed))
        memory = ClipStep(model, clip, candidate, cluster).memory()
        if sum(memory.values()) <= limit:
            return True
    return False


def contexts_of(gpus: int) -> tuple[int, ...]:
    """Return the numbers of ranks that can share a clip."""
    return tuple(divisors(gpus))
