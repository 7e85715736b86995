"""Judges other vLLM trees: does the next release still fit, and if not, where does it differ."""
