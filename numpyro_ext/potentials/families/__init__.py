"""One likelihood a file."""
