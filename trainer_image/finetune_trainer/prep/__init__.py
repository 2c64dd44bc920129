"""The preparation: a corpus becomes one Delta table of training, validation and test examples, on Spark."""
