"""Checks a running server's image input from outside: any OpenAI-compatible chat server's.

Every check says what it compared; what was not checked is never called right. Checks of content are
skipped on a model that answers no sense (random weights), checks that compare answers where a
server's own repeats differ so much that a wrong answer would not be distinguishable. Both say so.
"""
