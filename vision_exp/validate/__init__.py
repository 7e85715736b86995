"""Checks a running server's image input from outside: any OpenAI-compatible chat server's.

What was not checked is never called right. Checks of content are skipped on a model that answers no
sense, as with random weights, and comparisons where a wrong answer would not be distinguishable.
"""
