"""The training loop.

In the order of the pipeline: `launch` starts a `worker` for each rank; a worker loads the recipe (`runtime`), makes
batches (`data`), builds a sharded network (`build`, over `model` and `objectives`), trains it (`loop`, with
`checkpoint`), and exports and registers the result (`delivery`).
"""
