"""Checks a running server's image input from outside.

    python3 -m vision_exp.validate --url http://localhost:8000/v1 [--json FILE]

For any OpenAI-compatible chat server. Every check says what it compared; what was not checked is
never called right. Checks of content are skipped on a model that answers no sense (random weights),
checks that compare answers where a server's own repeats differ so much that a wrong answer could
not be told from a right one. Both are said to be.
"""
