"""`python -m bench.trainer`: the trainer's speed beside a padded script's and TRL's, on the same rows in one run.

In reading order: `shapes` (the models), `rows` (what all of them train on), `work` (the configuration of a contender),
`padded` and `trl_packed` (the two others, with `meter`), `contenders` (how each is run and read), `process`,
`report` (medians, ratios, goals, table) and `machine`.
"""
