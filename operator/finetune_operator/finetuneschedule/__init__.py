"""FineTuneSchedule: observe, decide, apply, and the pass that joins them."""
