"""What every tier shares: processes, ports, servers, and waiting for a condition. It imports nothing else of the tests."""
