"""A measure of the tests' power: small faults put into product code, and whether the tests notice them.

`python -m long.mutants --help` lists what can be done; `make mutants` does it. docs/design/tests.md has the result.
"""
