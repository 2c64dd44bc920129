"""The preparation: builds a Delta table of training, validation and test examples from a corpus, on Spark."""
