"""Finds the few places in vLLM's sources that image input needs, and edits them safely."""

__version__ = "0.1.0"
#: What the package `vision_exp` has beside the overlay: run from this tool's folder, never staged.
UNSTAGED = ("validate", "preview.py")
