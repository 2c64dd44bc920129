"""The training loop.

In the order of the pipeline: `launch` starts a `worker` for each rank; a worker reads the `recipe`, `data` and
`pack` make batches, `model` is loaded, adapted and sharded, `loop` takes the steps (with an objective of
`objectives`, a `schedule`, a `checkpoint` and a `track`er), `export` writes the model and `register` names it.
"""
