"""Values as text, as Spark expressions."""
