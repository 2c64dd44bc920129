"""A kopf operator that reconciles FineTuneJob resources."""
