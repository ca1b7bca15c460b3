"""WallFacer (Liu et al. 2024): teams share queries, and KV goes around one ring per member instead
of one for all.

Of P ranks, C form a team and G = P / C^2 teams form a team group. Rank = r_t C + r_a: member r_a of
team r_t.
"""

from math import isqrt

from parallel.context.layout import ContextError
from parallel.context.methods.base import BalancedMethod, Ranks, Round, Send, Shape


class WallFacer(BalancedMethod):
    """A team's members gather Q, K and V; each attends for the whole team to 1 / C of all KV.

    First, member r_a sends the team's KV to team r_a G + r_t // C, member r_t % C (algorithm 2).
    Then member a of team t holds the KV of team (t % G) C + a, and G rounds pass it around the
    members a of a team group (algorithm 3).
    """

    name = "wallfacer"
    teams = True

    def rounds(self, rank: Ranks, shape: Shape) -> list[Round]:
        size, c = shape.size, shape.team_size
        g = size // c**2
        team, member = divmod(rank, c)
        group = team // g
        following = ((team + 1) % g + g * group) * c + member
        first = 1 if c > 1 else 0  # a team of one has its KV in place
        found = []
        if first:
            placed = (member * g + team // c) * c + team % c
            found.append(Round(self._members(team, c), (Send(placed, 1),), None))
        for i in range(g):
            held = ((team - i) % g) * c + member
            on, home = Send(following, first + i + 1), Send(held * c + group, first + i + 1)
            found.append(
                Round(self._members(held, c), (on,) if i < g - 1 else (), on if i < g - 1 else home)
            )
        return found

    def team(self, rank: Ranks, shape: Shape) -> tuple[Ranks, ...]:
        return self._members(rank // shape.team_size, shape.team_size)

    def check(self, shape: Shape, causal: bool) -> None:
        super().check(shape, causal)
        size, c = shape.size, shape.team_size
        if size % c**2:
            fitting = [team for team in range(1, isqrt(size) + 1) if size % team**2 == 0]
            raise ContextError(
                f"context_parallel_team_size is {c}, whose square {c**2} does not divide the {size} ranks of wallfacer "
                f"(or groups of ulysses_degree ranks); sizes that do: {', '.join(map(str, fitting))}"
            )

    @staticmethod
    def _members(team: Ranks, team_size: int) -> tuple[Ranks, ...]:
        return tuple(team * team_size + member for member in range(team_size))
