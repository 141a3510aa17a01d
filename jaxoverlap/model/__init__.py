"""Model definitions and weights: configuration, flax modules, loading."""
