"""WallFacer's algorithms as the paper prints them, against the plan.

They also show what placement does to the links.
"""

from parallel.context import make_plan

TEAMS = [(size, team) for size in range(1, 257) for team in range(2, 17) if size % team**2 == 0]


def initial_target(team, member, teams, members):
    """Algorithm 2: the global rank that gets the KV of this member's team."""
    group_size = teams // members
    return (member * group_size + team // members) * members + team % members


def ring_neighbour(team, member, teams, members, step):
    """Algorithm 3: the next (step 1) or last (step -1) rank of this member's ring."""
    group_size = teams // members
    return member + ((team + step) % group_size + group_size * (team // group_size)) * members


def test_plans_follow_the_paper_s_algorithms_up_to_256_ranks():
    for size, members in TEAMS:
        plan, teams = (
            make_plan("wallfacer", seq_len=2 * size, size=size, team_size=members),
            size // members,
        )
        for rank in range(0, size, max(1, size // 16)):
            team, member = divmod(rank, members)
            placement, *rounds = plan.geometry.rounds_of(rank)
            assert placement.sends[0].to == initial_target(team, member, teams, members)
            assert len(rounds) == size // members**2
            for step in rounds[:-1]:
                assert step.sends[0].to == ring_neighbour(team, member, teams, members, 1)
                assert step.sends[0].source == ring_neighbour(team, member, teams, members, -1)


def test_placement_decides_what_crosses_between_nodes():
    shape = {"batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64, "element_size": 2}

    def crossing(method, **options):
        plan = make_plan(method, seq_len=32768, size=32, **options)
        return sum(plan.cost(rank, **shape).forward.between_nodes(rank, 8) for rank in range(32))

    ring = crossing("zigzag")
    teams, rings = (
        crossing("wallfacer", team_size=2, placement=name)
        for name in ("collect_intra", "p2p_intra")
    )
    double = crossing("double_ring", ranks_per_node=8)
    assert rings < teams
    assert double < ring
    assert crossing("zigzag", ulysses_degree=8) < ring
