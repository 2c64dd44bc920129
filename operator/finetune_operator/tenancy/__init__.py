"""What the namespaces of each tenant may use: the file of the platform team, and the checks of specs against it."""
