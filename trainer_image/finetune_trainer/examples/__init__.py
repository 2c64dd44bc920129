"""What one example is: columns, messages, templates, tokens, and the part of it that is learned."""
