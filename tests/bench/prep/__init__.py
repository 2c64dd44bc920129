"""How fast a corpus is prepared, beside the way that tutorials show and beside the tokenizer alone."""
