"""CPU-seconds of first and next runs."""
