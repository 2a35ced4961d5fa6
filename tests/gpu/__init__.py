"""Short scripts for a machine with a GPU. Each also runs on a CPU at a tiny size, where a test runs it."""
