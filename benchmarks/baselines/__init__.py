"""What the engines supersede: methods of the sources that tests and benchmarks compare with; not installed."""
