"""Files on a volume or in an object store: S3, Google Cloud Storage, Azure, volumes of Unity Catalog."""
