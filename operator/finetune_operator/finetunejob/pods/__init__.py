"""The pods of a job: how they are built, and what state they are in."""
