"""What the decisions about both kinds share. Pure: no I/O, no clock."""
