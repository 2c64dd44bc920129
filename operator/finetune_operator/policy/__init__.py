"""Functions that the `decide` functions of both kinds share. Pure: no I/O, no clock."""
