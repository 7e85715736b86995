"""An image that fails ends its requests, not the engine."""
