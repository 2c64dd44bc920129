"""Models by their URI: reads them, caches them between jobs, and writes them."""
