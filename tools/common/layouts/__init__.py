"""Draw plans: the rank of each token, and the tiles that each rank computes in each round."""
