"""Vision tower and aligner."""

from vision_exp.tower.modules import Aligner, VisionTower

__all__ = ["Aligner", "VisionTower"]
