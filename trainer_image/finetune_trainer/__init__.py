"""The programs of a FineTuneJob's pods: `prep` on Spark, `train` on torch, and how both end (`outcome`)."""
