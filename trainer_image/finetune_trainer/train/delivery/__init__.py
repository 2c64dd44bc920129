"""From trained weights to a model version: `export` writes files, `lineage` documents them, `register` names them."""
