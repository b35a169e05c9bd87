"""Tools around ``jit`` that know nothing of models."""
