"""Compare the fastest plan with those for twice the length and for twice the GPUs."""

from typing import Any
from xml.etree.ElementTree import Element

from planner.cluster import Cluster
from planner.extremes import of_length
from planner.levers import described
from planner.limits import nothing_left
from planner.page.elements import Child, element, table
from planner.search import Ranking
from runtime.progress import amount, duration
from tools.common.plan_text import PlanRow
from tools.common.plans.ranked import Plans


def doubled_section(plans: Plans) -> list[Element]:
    """Return a table of the fastest plans for twice the length and for twice the GPUs."""
    now = _column(plans.rows[0], plans.world_size)
    longer = _fastest(plans, _twice_as_long(plans.config), plans.world_size)
    wider = _fastest(plans, plans.config, 2 * plans.world_size)
    heads = ["", "now", "twice the length", "twice the GPUs"]
    lines: list[list[Child]] = [[*heads]]
    for name in now:
        lines.append([name, now[name], longer.get(name, ""), wider.get(name, "")])
    sentence = (
        "The fastest plan of each case, searched in the same way. Tokens/s of all GPUs and of one "
        "say whether more GPUs pay."
    )
    return [element("p", sentence), table(lines, "doubled", words=range(4))]


def _twice_as_long(config: Any) -> Any:
    """Return the configuration with twice the tokens: of a diffusion model, twice the frames.

    Images have no frames, and get twice the height.
    """
    if config.reads_text:
        return of_length(config, 2 * config.sequence_length)
    channels, size, *others = config.model.latent_shape
    return config.updated(latent_shape=(channels, 2 * size, *others))


def _fastest(plans: Plans, config: Any, world_size: int) -> dict[str, str]:
    """Return the column of the fastest plan; if there is none, the reason."""
    ranking, _ = plans.rank_plans(plans.args, config, world_size, plans.cluster)
    if not ranking.candidates:
        return {
            "processes": f"{world_size:,}",
            "tokens of a sequence": f"{config.sequence_length:,}",
            "plan": _reason(ranking, plans.cluster),
        }
    candidate = ranking.candidates[0]
    dp = candidate.config.mesh.data_parallel_size(world_size)
    return _column(PlanRow(candidate, dp), world_size)


def _reason(ranking: Ranking, cluster: Cluster) -> str:
    """Return why there is no plan: all were too large, or all were refused."""
    reason = nothing_left(ranking, cluster)
    if ranking.over_memory or ranking.over_host_memory:
        return f"nothing fits: {reason}"
    return f"refused: {next(iter(ranking.refused), reason)}"


def _column(row: PlanRow, world_size: int) -> dict[str, str]:
    """Return what the table of doubled sizes says of a plan."""
    config = row.candidate.config
    prediction = row.candidate.prediction
    return {
        "processes": f"{world_size:,}",
        "data-parallel ranks": f"{row.dp:,}",
        "tokens of a sequence": f"{config.sequence_length:,}",
        "sequences of a step": f"{config.train.batch_size(row.dp):,}",
        "plan": described(config),
        "a step": duration(prediction.time),
        "tokens/s": f"{row.tokens_per_second:,.0f}",
        "tokens/s of a process": f"{row.tokens_per_second / world_size:,.0f}",
        "memory": amount(prediction.bytes),
        "host memory": amount(prediction.host) if prediction.host else "none",
    }
