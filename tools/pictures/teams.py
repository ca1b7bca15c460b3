"""Draw WallFacer's teams, placement and rings, and what methods send inside and between nodes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallel.context import ContextError, Plan, make_plan
from tools.pictures import FAINT, INK, MASKED, colour, ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSIDE, BETWEEN = "#56B4E9", "#D55E00"
TOKENS_PER_RANK = 1024  # the picture's unit is one rank's K and V, whatever their length
HEAD_DIM, BFLOAT16 = 128, 2


@dataclass(frozen=True)
class Links:
    """Traffic of all ranks in a forward and backward, in units of one rank's K and V."""

    label: str
    inside: float
    between: float


def links(size: int, ranks_per_node: int, heads: int, kv_heads: int) -> list[Links]:
    """Return the traffic inside and between nodes of every method and team size that suits ``size`` ranks."""
    contestants: list[tuple[str, str, dict[str, Any]]] = [("ring", "zigzag", {})]
    if size % ranks_per_node == 0:
        contestants.append(("double ring", "double_ring", {"ranks_per_node": ranks_per_node}))
    for degree in range(2, size + 1):
        if size % degree == 0:
            contestants.append((f"Ulysses {degree}, ring {size // degree}", "zigzag", {"ulysses_degree": degree}))
    for team in range(2, size + 1):
        if size % team**2 == 0:
            for placement in ("collect_intra", "p2p_intra"):
                teams = {"team_size": team, "placement": placement}
                contestants.append((f"WallFacer {team}, {placement}", "wallfacer", teams))
    found = []
    for label, method, options in contestants:
        plan = make_plan(method, seq_len=size * TOKENS_PER_RANK, size=size, **options)
        try:
            plan.check_heads(heads, kv_heads)
        except ContextError:  # this degree does not fit these heads
            continue
        found.append(_measured(label, plan, ranks_per_node, heads, kv_heads))
    return found


def _measured(label: str, plan: Plan, ranks_per_node: int, heads: int, kv_heads: int) -> Links:
    unit = 2 * plan.local_len * kv_heads * HEAD_DIM * BFLOAT16
    total = between = 0
    for rank in range(plan.size):
        cost = plan.cost(rank, batch=1, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, element_size=BFLOAT16)
        for sent in (cost.forward, cost.backward):
            total += sent.total
            between += sent.between_nodes(rank, ranks_per_node)
    return Links(label, (total - between) / unit, between / unit)


def draw(plan: Plan, ranks_per_node: int, heads: int, kv_heads: int) -> "Figure":
    """Draw teams as columns and their members as rows, above what each method sends over which links."""
    from matplotlib.figure import Figure

    measured = links(plan.size, ranks_per_node, heads, kv_heads)
    members = plan.geometry.team_size
    teams = plan.size // members
    width, grid, bars = max(9.0, 0.95 * teams + 2.2), 1.05 * members + 0.9, 0.3 * len(measured) + 0.9
    figure = Figure(figsize=(width, grid + bars + 1.2), facecolor="white", layout="constrained")
    above, below = figure.subplots(2, height_ratios=(grid, bars))
    _teams(above, plan, ranks_per_node)
    _bars(below, measured, ranks_per_node, heads, kv_heads)
    return figure


def _teams(axes: "Axes", plan: Plan, ranks_per_node: int) -> None:
    """Draw a cell per rank, in its node's colour, with the KV it holds after the placement; arrows are rings."""
    from matplotlib.patches import FancyArrowPatch, Rectangle

    geometry, nodes = plan.geometry, -(-plan.size // ranks_per_node)
    members, placement = geometry.team_size, geometry.options.placement
    ring = plan.size // members**2
    teams = sorted({geometry.team(rank) for rank in range(plan.size)}, key=lambda team: int(plan.positions(team[0])[0]))
    where = {
        rank: (index + 0.45 * (index // ring), -1.15 * member)
        for index, team in enumerate(teams)
        for member, rank in enumerate(team)
    }
    for rank, (x, y) in where.items():
        face = colour(rank // ranks_per_node, max(2, nodes))
        axes.add_patch(Rectangle((x - 0.4, y - 0.36), 0.8, 0.72, facecolor=face, edgecolor="none"))
        first = next(step for step in geometry.steps(rank) if step.gradient is not None)
        text = f"KV of\nteam {teams.index(first.holds)}"
        axes.text(x, y + 0.19, f"rank {rank}", ha="center", va="center", size=8, color=ink_on(face), weight="bold")
        axes.text(x, y - 0.1, text, ha="center", va="center", size=7, color=ink_on(face), linespacing=0.95)
        for transfer in first.transfers:
            to, _ = where[transfer.send_to]
            onward = to > x  # else the ring closes, below its ranks
            ends = ((x + 0.4, y), (to - 0.4, y)) if onward else ((x, y - 0.36), (to, y - 0.36))
            bend = f"arc3,rad={0 if onward else -0.25 / (x - to)}"
            arrow: dict[str, Any] = {"connectionstyle": bend, "arrowstyle": "-|>", "mutation_scale": 8, "color": FAINT}
            axes.add_patch(FancyArrowPatch(*ends, **arrow))
    for index in range(len(teams)):
        axes.text(where[teams[index][0]][0], 0.58, f"team {index}", ha="center", size=8.5, color=INK)
    axes.set_xlim(-0.6, where[teams[-1][0]][0] + 0.6)
    axes.set_ylim(-1.15 * members + 0.45, 0.95)
    title = f"{plan.size} ranks on {nodes} nodes (colours), teams of {members}, rings of {ring}, {placement}"
    axes.set_title(title, size=11, color=INK, weight="bold", loc="left")
    axes.set_axis_off()


def _bars(axes: "Axes", measured: list[Links], ranks_per_node: int, heads: int, kv_heads: int) -> None:
    rows = range(len(measured))
    inside, between = [links.inside for links in measured], [links.between for links in measured]
    axes.barh(rows, between, color=BETWEEN, height=0.7, label="between nodes")
    axes.barh(rows, inside, left=between, color=INSIDE, height=0.7, label=f"inside nodes of {ranks_per_node}")
    most = max(links.inside + links.between for links in measured)
    for row, links in zip(rows, measured, strict=True):
        text = f"{links.between:,.0f} + {links.inside:,.0f}"
        axes.text(links.inside + links.between + 0.008 * most, row, text, va="center", size=7.5, color=FAINT)
    axes.set_yticks(rows, [links.label for links in measured], size=8, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * most)
    axes.set_xlabel(f"sent forward and backward, in KV of one rank; {heads} query and {kv_heads} key heads")
    axes.tick_params(length=0, labelsize=8)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MASKED)
