"""The pods of a job: how they are made, and how they are doing."""
