"""Running in compiled chunks: bars, interruption, searches for hyperparameters and the judgement of their ends."""
