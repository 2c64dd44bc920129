"""The machinery that runs the reconcilers: watches, cache, work queue, resync, Leases, statuses and Events."""
