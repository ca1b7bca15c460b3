"""Conversations to tokens, with which of them are learned."""
