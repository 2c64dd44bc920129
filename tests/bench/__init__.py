"""Benchmarks: commands that measure the product beside what people would use instead."""
