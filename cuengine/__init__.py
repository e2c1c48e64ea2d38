"""cuengine: a small serving engine for LLaMA-family models."""
