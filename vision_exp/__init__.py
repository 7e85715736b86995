"""Overlay that lets a text-only vLLM serve DeepSeek-V4-Flash-Vision-Exp with images.

Empty of imports on purpose: vLLM imports the DeepSeek-V4 package for every quantised model,
so importing this package must cost nothing. `vision_exp.install.install` is the entry point.
"""

__version__ = "0.1.0"
