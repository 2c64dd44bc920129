"""Functions that the `decide` functions of all kinds share. Pure: no I/O, no clock."""
