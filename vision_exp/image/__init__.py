"""From an image to patches, bit for bit as the reference does it."""

from vision_exp.image.transform import ImagePatches, image_to_patches, images_to_patches

__all__ = ["ImagePatches", "image_to_patches", "images_to_patches"]
