"""The preparation: makes one Delta table of training, validation and test examples from a corpus, on Spark."""
