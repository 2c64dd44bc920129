"""The evaluation of a registered version: on rows that training never read, next to the base model."""
