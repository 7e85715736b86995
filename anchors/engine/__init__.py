"""The patch engine: pure from target to verified plan, one crash-safe transaction after it."""
