"""Vision tower and aligner: tower.py reads on its own, the rest makes it fast.

linears.py and parallel.py make its linear layers. On a GPU the same blocks run as fused.py's
kernels, single images in graphs.py's CUDA graphs, with the parts that backends.py selects; what
only Hopper GPUs run is in hopper/.
"""

from vision_exp.tower.tower import Aligner, VisionTower

__all__ = ["Aligner", "VisionTower"]
