"""From trained weights to a model version: `export` writes, `lineage` documents, `deliver` uploads and registers."""
