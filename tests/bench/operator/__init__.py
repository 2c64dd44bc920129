"""`python -m bench.operator`: the operator beside JobSet, on a control plane without kubelets.

In reading order: `api` and `plane` (the servers), `contenders` (the operator and JobSet), `fleet` (many jobs, from the first create to
the last pod), `visit` (fleets, an idle minute and a restart of one contender), `running` (jobs that report progress and fail: `pods`,
`run_writer`, `job_watch`), `usage` (CPU time and memory of a process), `requests` (requests by client, from the servers' logs),
`figures` (what is measured) and `report` (goals, JSON, tables).
"""
