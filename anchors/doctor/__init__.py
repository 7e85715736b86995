"""What a person needs to know about an installation, read without importing vLLM."""
