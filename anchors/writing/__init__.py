"""All-or-nothing writing of a Job, which is paths and bytes; knows nothing of anchors."""
