"""All policy of promotions. Pure: no I/O, no clock of its own; the same input gives the same decision."""
