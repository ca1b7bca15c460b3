"""Rings: Ring Attention, Striped Attention, zigzag, and a double ring.

Ring Attention: Liu, Zaharia, Abbeel 2023. Striped Attention: Brandon et al. 2023. The first three
have the same rounds and differ only in their layouts, and so in how they divide the work under a
causal mask. With contiguous blocks, rank r then sees r + 1 of P blocks. Since the ranks of a ring
keep in step, every round takes as long as its busiest rank, so half of the compute is lost.
"""

from parallel.context.methods.base import BalancedMethod, Method, Ranks, Round, Send, Shape


class Ring(Method):
    """One round per rank: round i holds the KV of rank - i and passes it to rank + 1.

    Section 3 of the paper. The layout is contiguous blocks; under a causal mask the last rank has
    twice the average work. The gradient of the KV travels one round behind it, and has passed all
    ranks that attended to the KV when it reaches the owner.
    """

    name = "ring"
    layouts = ("contiguous",)

    def rounds(self, rank: Ranks, shape: Shape) -> list[Round]:
        next_rank = (rank + 1) % shape.size
        rounds = []
        for i in range(shape.size):
            owner = (rank - i) % shape.size
            if i < shape.size - 1:
                onward = Send(next_rank, i + 1)
                rounds.append(Round((owner,), (onward,), onward))
            else:
                rounds.append(Round((owner,), (), Send(owner, i + 1)))
        return rounds


class Striped(Ring):
    """Rank j owns tokens j, j + P, j + 2P, ...

    Each round's mask is a triangle, half a block on every rank.
    """

    name = "striped"
    layouts = ("striped",)


class Zigzag(Ring):
    """Rank r owns chunks r and 2P - 1 - r of 2P.

    It is as balanced as striping, but has long runs of consecutive tokens, which suit kernels and
    packed documents.
    """

    name = "zigzag"
    layouts = ("zigzag",)


class DoubleRing(BalancedMethod):
    """KV goes once around each node, and meanwhile from node to node.

    LoongTrain, Gu et al. 2024, section 4.3. The gradient takes the same path: it accumulates along
    the inner ring, and the last rank there sends the node's sum to the rank with the same index in
    the next node, which adds its own part. A transfer between nodes may take as many rounds as a
    node has ranks, which hides the slow links. With 2 nodes of 3 ranks, rank 0 holds the KV of

        round   0   1   2   3   4   5
        rank    0   2   1   3   5   4
    """

    name = "double_ring"
    nodes = True

    def rounds(self, rank: Ranks, shape: Shape) -> list[Round]:
        node_size = shape.per_node
        num_nodes = shape.size // node_size
        node, member = divmod(rank, node_size)
        next_in_node = node * node_size + (member + 1) % node_size
        next_node = (node + 1) % num_nodes * node_size + member

        rounds = []
        for i in range(shape.size):
            lap, step = divmod(i, node_size)
            is_last_lap = lap == num_nodes - 1
            owner = (node - lap) % num_nodes * node_size + (member - step) % node_size
            sends = []
            if step == 0 and not is_last_lap:
                sends.append(Send(next_node, i + node_size))
            if step < node_size - 1:
                gradient = Send(next_in_node, i + 1)
                sends.append(gradient)
            elif is_last_lap:
                gradient = Send(owner, i + 1)
            else:
                gradient = Send(next_node, i + node_size)
            rounds.append(Round((owner,), tuple(sends), gradient))
        return rounds
