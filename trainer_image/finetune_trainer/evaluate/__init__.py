"""The evaluation of a registered version: on rows that training never read, beside the base model."""
