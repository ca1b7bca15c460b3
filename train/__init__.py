"""The one training loop that both entries share."""
