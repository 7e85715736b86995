"""Which releases of vLLM there are, and their wheels and trees."""
