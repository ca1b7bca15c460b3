"""Conversations to tokens, with a loss mask of the assistant's turns."""
