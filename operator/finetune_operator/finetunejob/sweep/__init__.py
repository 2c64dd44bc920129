"""The trials of `spec.sweep`: their values, their objects, and what is read of them. Pure: no I/O, no clock."""
