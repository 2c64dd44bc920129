"""The steps from rows to examples, each a function on a DataFrame."""
