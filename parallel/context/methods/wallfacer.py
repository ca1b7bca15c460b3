"""WallFacer (Liu et al. 2024): teams share queries, and KV circulates in one ring per member.

Of P ranks, C form a team and G = P / C^2 teams form a team group. Rank = r_t C + r_a: member r_a of
team r_t. A ring of P ranks passes all KV through every rank. Here a rank sees only 1 / C of all KV,
but computes with it for the queries of C ranks. That is the same work with 1 / C of the ring's
traffic, at the price of a gather of queries and a reduction of results in the team.
"""

from math import isqrt

from parallel.context.layout import ContextError
from parallel.context.methods.base import BalancedMethod, Ranks, Round, Send, Shape


class WallFacer(BalancedMethod):
    """Team members gather Q, K and V; each attends for the whole team to 1 / C of all KV.

    First, member r_a sends the team's KV to team r_a G + r_t // C, member r_t % C (algorithm 2).
    Then member a of team t holds the KV of team (t % G) C + a, and G rounds pass it around the
    members a of a team group (algorithm 3). With 8 ranks in teams of 2, so G = 2, ranks hold the KV
    of these ranks in each round:

        round       0       1       2
        rank 0   0, 1    0, 1    4, 5
        rank 1   0, 1    2, 3    6, 7
        rank 2   2, 3    4, 5    0, 1

    Round 0 only moves KV to where the ring starts, and computes nothing.
    """

    name = "wallfacer"
    teams = True

    def rounds(self, rank: Ranks, shape: Shape) -> list[Round]:
        c = shape.team_size
        g = shape.size // c**2
        team, member = divmod(rank, c)
        group = team // g
        next_rank = ((team + 1) % g + g * group) * c + member
        rounds = []
        first = 0  # a team of one rank already has its KV
        if c > 1:
            first = 1
            target = (member * g + team // c) * c + team % c
            rounds.append(Round(self._members(team, c), (Send(target, 1),), None))
        for i in range(g):
            held_team = ((team - i) % g) * c + member
            due = first + i + 1
            if i < g - 1:
                onward = Send(next_rank, due)
                rounds.append(Round(self._members(held_team, c), (onward,), onward))
            else:
                home = Send(held_team * c + group, due)
                rounds.append(Round(self._members(held_team, c), (), home))
        return rounds

    def team(self, rank: Ranks, shape: Shape) -> tuple[Ranks, ...]:
        return self._members(rank // shape.team_size, shape.team_size)

    def check(self, shape: Shape, causal: bool) -> None:
        super().check(shape, causal)
        size = shape.size
        c = shape.team_size
        if size % c**2:
            fitting = [str(team) for team in range(1, isqrt(size) + 1) if size % team**2 == 0]
            raise ContextError(
                f"context_parallel_team_size is {c}, but its square {c**2} does not divide the "
                f"{size} ranks of wallfacer (or groups of ulysses_degree ranks); sizes that do: "
                f"{', '.join(fitting)}"
            )

    @staticmethod
    def _members(team: Ranks, team_size: int) -> tuple[Ranks, ...]:
        return tuple(team * team_size + member for member in range(team_size))
