"""The Spark session, and the modes in which it runs."""
