"""The programs of a FineTuneJob's pods: `prep` on Spark, `train` on torch, `evaluate` on torch, and what they share."""
