"""Models by their URI: where they are read, kept between jobs, and written."""
