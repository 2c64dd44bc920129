"""The estimate of memory and time before anything is loaded."""
