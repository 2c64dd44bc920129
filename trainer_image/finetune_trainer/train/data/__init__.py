"""From prepared splits to batches: `read` rows, `encode` examples, store them as a `dataset`, `pack`, `feed`."""
