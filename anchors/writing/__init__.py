"""All-or-nothing writing; knows nothing of anchors."""
