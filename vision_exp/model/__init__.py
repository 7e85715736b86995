"""The checkpoint as vLLM sees it: registry, model class, weights, multimodal processor."""
