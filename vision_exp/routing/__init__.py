"""Expert selection: image rows choose with a bias of their own."""

from vision_exp.routing.topk import mm_topk

__all__ = ["mm_topk"]
