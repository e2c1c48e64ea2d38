"""Models: configuration, weights, rope, tokenizers, chat templates, finding a model by name."""
