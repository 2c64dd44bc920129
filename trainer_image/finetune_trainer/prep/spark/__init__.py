"""The Spark session, and where it runs."""
