"""Tokens of one image see each other both ways in prefill."""
