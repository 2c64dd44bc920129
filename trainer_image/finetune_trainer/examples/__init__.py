"""An example of the corpus: its columns, messages, template and tokens, and the tokens to train on."""
